//! What collectives must give, computed one element at a time.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use drumline::{ReduceOp, SumOrder};
use drumline_schedule::Topology;
use fastrand::Rng;

use crate::{
    Case, Kind,
    value::{Value, by_type, read_all},
};

impl Case {
    /// What `rank` must have in the buffer for the result after.
    pub fn expected(&self, rank: usize, topology: &Topology) -> Vec<u8> {
        let ranks = topology.world_size;
        let size = self.dtype.size();
        let unchanged = || self.contribution(rank, self.elements);
        // The block of a long buffer that comes behind blocks of these lengths.
        let block = |all: &[u8], before: usize, len: usize| {
            all[before * size..(before + len) * size].to_vec()
        };
        let behind = |rank: usize| (0..rank).map(|it| self.count(it)).sum::<usize>();
        let total = behind(ranks);
        // Prefixes are always in the order of ranks, that of all ranks, too.
        let of_first = |ranks, op| self.reduced(op, &Topology::flat(ranks), self.elements);
        match self.kind {
            Kind::AllReduce(op) => self.reduced(op, topology, self.elements),
            Kind::Reduce(op, root) if rank == root => self.reduced(op, topology, self.elements),
            Kind::Reduce(..) => unchanged(),
            Kind::ReduceScatter(op) => {
                let all = self.reduced(op, topology, total);
                block(&all, behind(rank), self.count(rank))
            }
            Kind::Scan(op) => of_first(rank + 1, op),
            Kind::ExclusiveScan(_) if rank == 0 => unchanged(),
            Kind::ExclusiveScan(op) => of_first(rank, op),
            Kind::Broadcast(root) => self.contribution(root, self.elements),
            Kind::Gather(root) if rank != root => vec![],
            Kind::AllGather | Kind::Gather(_) => {
                (0..ranks).flat_map(|from| self.contribution(from, self.count(from))).collect()
            }
            Kind::Scatter(root) => {
                block(&self.contribution(root, total), behind(rank), self.count(rank))
            }
            Kind::AllToAll => {
                let from = |from: usize| {
                    let before: usize = (0..rank).map(|to| self.count_between(from, to)).sum();
                    let len = self.count_between(from, rank);
                    block(&self.contribution(from, before + len), before, len)
                };
                (0..ranks).flat_map(from).collect()
            }
            Kind::Barrier => vec![],
        }
    }

    /// Whether the two are the same result: payloads and signs of NaN are nobody's business.
    pub fn agree(&self, ours: &[u8], theirs: &[u8]) -> bool {
        ours == theirs || self.canonical(ours) == self.canonical(theirs)
    }

    /// The same for all results that [agree](Case::agree), and with hardly any other.
    pub fn digest(&self, result: &[u8]) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.canonical(result).hash(&mut hasher);
        hasher.finish()
    }

    fn canonical(&self, result: &[u8]) -> Vec<u8> {
        fn of<T: Value>(result: &[u8]) -> Vec<u8> {
            let values: Vec<T> = read_all(result).into_iter().map(T::canonical).collect();
            bytemuck::cast_slice(&values).to_vec()
        }
        by_type!(self.dtype, of(result))
    }

    /// What the operator makes of the contributions of these ranks.
    fn reduced(&self, op: ReduceOp, topology: &Topology, elements: usize) -> Vec<u8> {
        fn reduce<T: Value>(op: ReduceOp, inputs: &[Vec<u8>], hosts: &[Vec<usize>]) -> Vec<u8> {
            let inputs: Vec<Vec<T>> = inputs.iter().map(|bytes| read_all(bytes)).collect();
            let mut result = Vec::new();
            for at in 0..inputs[0].len() {
                let of_host = |host: &Vec<usize>| {
                    let values: Vec<_> =
                        host.iter().map(|&rank| inputs[rank][at].widen()).collect();
                    tree::<T>(op, &values)
                };
                let sum = tree::<T>(op, &hosts.iter().map(of_host).collect::<Vec<_>>());
                let sum = match op {
                    ReduceOp::Avg => T::divide(sum, inputs.len() as u32),
                    _ => sum,
                };
                result.extend_from_slice(bytemuck::bytes_of(&T::narrow(sum)));
            }
            result
        }
        let ranks = 0..topology.world_size;
        let inputs: Vec<_> = ranks.clone().map(|rank| self.contribution(rank, elements)).collect();
        let hosts = match topology.order {
            SumOrder::Rank => vec![ranks.collect()],
            SumOrder::Placement => topology.ranks_by_host().to_vec(),
        };
        by_type!(self.dtype, reduce(op, &inputs, &hosts))
    }
}

/// The canonical tree, as it is defined.
fn tree<T: Value>(op: ReduceOp, values: &[T::Wide]) -> T::Wide {
    match values {
        [one] => *one,
        several => {
            let mut left = 1;
            while 2 * left < several.len() {
                left *= 2;
            }
            let (low, high) = several.split_at(left);
            T::apply(op, tree::<T>(op, low), tree::<T>(op, high))
        }
    }
}

pub(crate) fn random<T: Value>(mut rng: Rng, elements: usize) -> Vec<u8> {
    (0..elements).flat_map(|_| bytemuck::bytes_of(&T::random(&mut rng)).to_vec()).collect()
}
