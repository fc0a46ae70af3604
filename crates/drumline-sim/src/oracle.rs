//! What collectives must give, computed one element at a time and without the core's kernels.

use bytemuck::Pod;
use drumline::{
    Bool, Complex, DType, F8E4M3, F8E5M2, ReduceOp, SumOrder, bf16, f16, internals::Kind,
};
use drumline_schedule::Topology;
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
    pub(crate) elements: usize,
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
        match self.kind {
            Kind::AllReduce(_) | Kind::Broadcast(_) => (contribution(self.elements), vec![]),
            Kind::ReduceScatter(_) => {
                (noise(self.elements), contribution(world_size * self.elements))
            }
            Kind::AllGather => (noise(world_size * self.elements), contribution(self.elements)),
            Kind::Barrier => (vec![], vec![]),
        }
    }

    /// What `rank` must have in its buffer after.
    pub(crate) fn expected(&self, rank: usize, topology: &Topology) -> Vec<u8> {
        let ranks = topology.world_size;
        match self.kind {
            Kind::AllReduce(op) => self.reduced(op, topology, self.elements),
            Kind::ReduceScatter(op) => {
                let all = self.reduced(op, topology, ranks * self.elements);
                let block = self.elements * self.dtype.size();
                all[rank * block..(rank + 1) * block].to_vec()
            }
            Kind::Broadcast(root) => self.contribution(root, self.elements),
            Kind::AllGather => {
                (0..ranks).flat_map(|rank| self.contribution(rank, self.elements)).collect()
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
