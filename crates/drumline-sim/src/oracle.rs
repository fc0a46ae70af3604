//! What collectives must give, computed one element at a time and without the core's kernels.

use std::ops::Range;

use bytemuck::Pod;
use drumline::{
    Bool, Complex, DType, F8E4M3, F8E5M2, ReduceOp, SumOrder, bf16, f16, internals::Kind,
};
use drumline_schedule::{Borders, Counts, Topology};
use fastrand::Rng;

use crate::value::Value;

/// Calls a function that is generic over the type of the elements.
macro_rules! by_type {
    ($dtype:expr, $function:ident($($argument:expr),*)) => {
        match $dtype {
            DType::U8 => $function::<u8>($($argument),*),
            DType::U16 => $function::<u16>($($argument),*),
            DType::U32 => $function::<u32>($($argument),*),
            DType::U64 => $function::<u64>($($argument),*),
            DType::I8 => $function::<i8>($($argument),*),
            DType::I16 => $function::<i16>($($argument),*),
            DType::I32 => $function::<i32>($($argument),*),
            DType::I64 => $function::<i64>($($argument),*),
            DType::F16 => $function::<f16>($($argument),*),
            DType::Bf16 => $function::<bf16>($($argument),*),
            DType::F32 => $function::<f32>($($argument),*),
            DType::F64 => $function::<f64>($($argument),*),
            DType::Bool => $function::<Bool>($($argument),*),
            DType::Complex64 => $function::<Complex<f32>>($($argument),*),
            DType::Complex128 => $function::<Complex<f64>>($($argument),*),
            DType::F8E4M3 => $function::<F8E4M3>($($argument),*),
            DType::F8E5M2 => $function::<F8E5M2>($($argument),*),
            other => unreachable!("an element type that the oracle does not know: {other}"),
        }
    };
}

/// A collective, as all ranks should call it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) group: usize,
    pub(crate) kind: Kind,
    pub(crate) dtype: DType,
    /// Of a block; of the longest one that there may be, if they differ.
    pub(crate) elements: usize,
    /// Whether blocks differ in length.
    pub(crate) uneven: bool,
    pub(crate) registered: bool,
    /// What its data are made from.
    pub(crate) seed: u64,
}

impl Call {
    /// What `rank` has in its two buffers before: the one for the result, and the one that is
    /// only read.
    pub(crate) fn buffers(&self, rank: usize, world_size: usize) -> (Vec<u8>, Vec<u8>) {
        let contribution = |elements| self.contribution(rank, elements);
        let noise = |elements| vec![0xa5; elements * self.dtype.size()];
        let (own, all) = (self.block(0, rank), self.sum(0..world_size, |peer| self.block(0, peer)));
        let at_root = |root, elements| if rank == root { elements } else { 0 };
        match self.kind {
            Kind::AllReduce(_)
            | Kind::Reduce(..)
            | Kind::Scan(_)
            | Kind::ExclusiveScan(_)
            | Kind::Broadcast(_) => (contribution(self.elements), vec![]),
            Kind::ReduceScatter(_) => (noise(own), contribution(all)),
            Kind::AllGather => (noise(all), contribution(own)),
            Kind::Gather(root) => (noise(at_root(root, all)), contribution(own)),
            Kind::Scatter(root) => (noise(own), contribution(at_root(root, all))),
            Kind::AllToAll => {
                let received = self.sum(0..world_size, |from| self.block(from, rank));
                let sent = self.sum(0..world_size, |to| self.block(rank, to));
                (noise(received), contribution(sent))
            }
            Kind::Barrier => (vec![], vec![]),
        }
    }

    /// The lengths of its blocks, as `rank` knows them.
    pub(crate) fn counts(&self, rank: usize, world_size: usize) -> Counts {
        let borders = |block: &dyn Fn(usize) -> usize| {
            let counts: Vec<usize> = (0..world_size).map(block).collect();
            match Borders::new(&counts) {
                Some(borders) => borders,
                None => unreachable!("plans are short"),
            }
        };
        match self.kind {
            _ if !self.uneven => Counts::Even(self.elements),
            Kind::AllToAll => Counts::Own {
                sent: borders(&|to| self.block(rank, to)),
                received: borders(&|from| self.block(from, rank)),
            },
            _ => Counts::ByRank(borders(&|peer| self.block(0, peer))),
        }
    }

    /// The elements of the block of rank `to`; in an all-to-all, of that which `from` has for it.
    fn block(&self, from: usize, to: usize) -> usize {
        match self.uneven {
            true => Rng::with_seed(self.seed ^ (from << 8 | to) as u64).usize(0..=self.elements),
            false => self.elements,
        }
    }

    fn sum(&self, ranks: Range<usize>, block: impl Fn(usize) -> usize) -> usize {
        ranks.map(block).sum()
    }

    /// What `rank` must have in its buffer after.
    pub(crate) fn expected(&self, rank: usize, topology: &Topology) -> Vec<u8> {
        let ranks = topology.world_size;
        let size = self.dtype.size();
        // From one element on so many.
        let cut = |bytes: Vec<u8>, first: usize, elements: usize| {
            bytes[first * size..(first + elements) * size].to_vec()
        };
        let own = self.block(0, rank);
        let (before, all) = (
            self.sum(0..rank, |peer| self.block(0, peer)),
            self.sum(0..ranks, |peer| self.block(0, peer)),
        );
        let gathered =
            || (0..ranks).flat_map(|peer| self.contribution(peer, self.block(0, peer))).collect();
        let up_to = |op, end| self.reduced(op, &Topology::flat(end), self.elements);
        match self.kind {
            Kind::AllReduce(op) => self.reduced(op, topology, self.elements),
            Kind::ReduceScatter(op) => cut(self.reduced(op, topology, all), before, own),
            Kind::Reduce(op, root) if rank == root => self.reduced(op, topology, self.elements),
            Kind::ExclusiveScan(op) if rank > 0 => up_to(op, rank),
            Kind::Reduce(..) | Kind::ExclusiveScan(_) => self.contribution(rank, self.elements),
            Kind::Scan(op) => up_to(op, rank + 1),
            Kind::Broadcast(root) => self.contribution(root, self.elements),
            Kind::AllGather => gathered(),
            Kind::Gather(root) if rank == root => gathered(),
            Kind::Gather(_) => vec![],
            Kind::Scatter(root) => cut(self.contribution(root, all), before, own),
            Kind::AllToAll => {
                let from = |from| {
                    let before = self.sum(0..rank, |to| self.block(from, to));
                    let block = self.block(from, rank);
                    cut(self.contribution(from, before + block), before, block)
                };
                (0..ranks).flat_map(from).collect()
            }
            Kind::Barrier => vec![],
        }
    }

    /// Whether the two are the same result: payloads and signs of NaN are nobody's business.
    pub(crate) fn agree(&self, ours: &[u8], theirs: &[u8]) -> bool {
        fn same<T: Value>(ours: &[u8], theirs: &[u8]) -> bool {
            let all = |bytes| read_all::<T>(bytes);
            ours.len() == theirs.len() && all(ours).iter().zip(all(theirs)).all(|(a, b)| a.same(&b))
        }
        ours == theirs || by_type!(self.dtype, same(ours, theirs))
    }

    fn contribution(&self, rank: usize, elements: usize) -> Vec<u8> {
        fn make<T: Value>(mut rng: Rng, elements: usize) -> Vec<u8> {
            (0..elements).flat_map(|_| bytemuck::bytes_of(&T::random(&mut rng)).to_vec()).collect()
        }
        let rng = Rng::with_seed(self.seed ^ (rank as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        by_type!(self.dtype, make(rng, elements))
    }

    fn reduced(&self, op: ReduceOp, topology: &Topology, elements: usize) -> Vec<u8> {
        fn reduce<T: Value>(op: ReduceOp, inputs: &[Vec<u8>], topology: &Topology) -> Vec<u8> {
            let inputs: Vec<Vec<T>> = inputs.iter().map(|bytes| read_all(bytes)).collect();
            let mut result = Vec::new();
            for at in 0..inputs[0].len() {
                let of_rank = |rank: usize| inputs[rank][at].widen();
                let sum = match topology.order {
                    SumOrder::Rank => tree::<T>(op, &values(0..inputs.len(), of_rank)),
                    SumOrder::Placement => {
                        let hosts = topology.ranks_by_host().iter();
                        let of_host = |host: &Vec<usize>| {
                            tree::<T>(op, &values(host.iter().copied(), of_rank))
                        };
                        tree::<T>(op, &hosts.map(of_host).collect::<Vec<_>>())
                    }
                };
                let sum = match op {
                    ReduceOp::Avg => T::divide(sum, inputs.len() as u32),
                    _ => sum,
                };
                result.extend_from_slice(bytemuck::bytes_of(&T::narrow(sum)));
            }
            result
        }
        fn values<W>(ranks: impl Iterator<Item = usize>, of: impl Fn(usize) -> W) -> Vec<W> {
            ranks.map(of).collect()
        }
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
        let inputs: Vec<_> =
            (0..topology.world_size).map(|rank| self.contribution(rank, elements)).collect();
        by_type!(self.dtype, reduce(op, &inputs, topology))
    }
}

fn read_all<T: Pod>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}
