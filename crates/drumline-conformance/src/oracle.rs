//! The expected results of collectives, computed one element at a time.

use std::{
    hash::{DefaultHasher, Hash as _, Hasher as _},
    sync::Arc,
};

use drumline::{
    ReduceOp,
    algorithms::{Rounding, SumOrder},
};
use drumline_kernels::with_element;
use drumline_schedule::Topology;

use crate::{
    Case, Kind,
    value::{Value, read_all},
};

impl Case {
    /// The expected result of each rank. Equal results share one allocation.
    pub fn answers(&self, topology: &Topology) -> Vec<Arc<Vec<u8>>> {
        let ranks = topology.world_size;
        let counts = self.counts(ranks);
        let total = counts.iter().sum();
        let each = |answer: &dyn Fn(usize) -> Vec<u8>| -> Vec<Arc<Vec<u8>>> {
            (0..ranks).map(|rank| Arc::new(answer(rank))).collect()
        };
        let all = |answer: Vec<u8>| {
            let answer = Arc::new(answer);
            vec![answer; ranks]
        };
        let only = |root: usize, answer: &dyn Fn() -> Vec<u8>| {
            each(&|rank| if rank == root { answer() } else { vec![] })
        };
        let inputs = |elements: usize| -> Vec<Vec<u8>> {
            (0..ranks).map(|rank| self.contribution(rank, elements)).collect()
        };
        // The block of length `len` that follows the blocks of the lengths `before`.
        let block = |all: &[u8], before: &[usize], len: usize| {
            let before = before.iter().sum::<usize>() * self.dtype.size();
            all[before..before + len * self.dtype.size()].to_vec()
        };
        let blocks = |all: &[u8]| each(&|rank| block(all, &counts[..rank], counts[rank]));
        let gathered =
            || (0..ranks).flat_map(|rank| self.contribution(rank, counts[rank])).collect();
        match self.kind {
            // The slices of a host together.
            Kind::AllReduce(op) | Kind::ReduceSlices(op) => {
                all(self.reduced(op, topology, &inputs(self.elements)))
            }
            Kind::Reduce(op, root) => {
                let mut answers = inputs(self.elements);
                answers[root] = self.reduced(op, topology, &answers);
                answers.into_iter().map(Arc::new).collect()
            }
            Kind::ReduceScatter(op) => blocks(&self.reduced(op, topology, &inputs(total))),
            Kind::Broadcast(root) => all(self.contribution(root, self.elements)),
            Kind::AllGather => all(gathered()),
            Kind::Gather(root) => only(root, &gathered),
            Kind::Scatter(root) => blocks(&self.contribution(root, total)),
            Kind::AllToAll => {
                let sent: Vec<_> =
                    (0..ranks).map(|rank| self.counts_by_pair(rank, ranks).0).collect();
                let of = |rank: usize| self.contribution(rank, sent[rank].iter().sum());
                let inputs: Vec<_> = (0..ranks).map(of).collect();
                let from = |from: usize, to: usize| {
                    block(&inputs[from], &sent[from][..to], sent[from][to])
                };
                each(&|rank| (0..ranks).flat_map(|it| from(it, rank)).collect())
            }
            Kind::Barrier => all(vec![]),
        }
    }

    /// The expected result of `rank`.
    pub fn expected(&self, rank: usize, topology: &Topology) -> Vec<u8> {
        self.answers(topology)[rank].to_vec()
    }

    /// Whether two results are equal, apart from payloads and signs of NaN.
    pub fn agree(&self, ours: &[u8], theirs: &[u8]) -> bool {
        ours == theirs || self.canonical(ours) == self.canonical(theirs)
    }

    /// A digest that is equal for results that [agree](Case::agree).
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
        with_element!(self.dtype, T => of::<T>(result))
    }

    /// The inputs of all ranks, reduced.
    fn reduced(&self, op: ReduceOp, topology: &Topology, inputs: &[Vec<u8>]) -> Vec<u8> {
        fn reduce<T: Value>(
            op: ReduceOp,
            inputs: &[Vec<u8>],
            hosts: &[Vec<usize>],
            rounds: bool,
        ) -> Vec<u8> {
            let inputs: Vec<Vec<T>> = inputs.iter().map(|bytes| read_all(bytes)).collect();
            let mut result = Vec::with_capacity(size_of_val(&inputs[0][..]));
            let (mut on_host, mut of_hosts) = (Vec::new(), Vec::new());
            for at in 0..inputs[0].len() {
                of_hosts.clear();
                for host in hosts {
                    on_host.clear();
                    on_host.extend(host.iter().map(|&rank| inputs[rank][at].widen()));
                    let sum = tree::<T>(op, &on_host);
                    of_hosts.push(if rounds { T::narrow(sum).widen() } else { sum });
                }
                let sum = tree::<T>(op, &of_hosts);
                let sum = match op {
                    ReduceOp::Avg => T::divide(sum, inputs.len() as u32),
                    _ => sum,
                };
                result.extend_from_slice(bytemuck::bytes_of(&T::narrow(sum)));
            }
            result
        }
        // Hosts that add their own ranks can round the sums.
        let rounds = topology.rounding == Rounding::Host
            && topology.sums_by_placement()
            && topology.has_hosts_of_several();
        let hosts = match topology.order {
            _ if rounds => topology.ranks_by_host().to_vec(),
            SumOrder::Rank | SumOrder::Backend => vec![(0..topology.world_size).collect()],
            SumOrder::Placement => topology.ranks_by_host().to_vec(),
        };
        with_element!(self.dtype, T => reduce::<T>(op, inputs, &hosts, rounds))
    }
}

/// Reduces by the canonical tree, straight from its definition.
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
