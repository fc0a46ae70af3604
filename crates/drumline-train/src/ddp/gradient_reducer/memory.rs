//! The memory of a bucket.

use std::{fmt, ops::Range, sync::Arc, time::Instant};

use drumline_group::{
    DType, Element, ProcessGroup, ReduceOp, RegisteredBuffer, bf16, driving, f16,
};
use drumline_kernels::{Source, Target, narrow, reduce_tree, widen, with_ieee_rounding};

use super::{
    super::{Bucket, Wire, shards::Shards},
    values::{Values, ValuesMut},
};
use crate::Result;

/// Memory in which a collective works without copies between the ranks of a host.
type Buffer<T> = RegisteredBuffer<T>;

/// The elements of a bucket: the gradients of its members, then one mark for each member, then marks of the rank. A
/// rank sets a mark to 1. After the all-reduce a mark is above zero if *some* rank had set it, because it is an
/// average of zeros and ones. [`Block`](super::plan::Block) says which of them there are.
pub(super) enum Memory {
    F32(Buffer<f32>),
    F64(Buffer<f64>),
    F16(Buffer<f16>),
    Bf16(Buffer<bf16>),
    /// `values` are rounded to `wire` when they leave, and replaced by what comes back.
    Narrowed {
        values: Vec<f32>,
        wire: Buffer<bf16>,
    },
}

/// Evaluates one expression for any dtype.
macro_rules! with_elements {
    ($memory:expr, $elements:ident => $result:expr) => {
        match $memory {
            Memory::F32($elements) => $result,
            Memory::F64($elements) => $result,
            Memory::F16($elements) => $result,
            Memory::Bf16($elements) => $result,
            Memory::Narrowed { values: $elements, .. } => $result,
        }
    };
}

impl Memory {
    /// Memory for `elements` elements, marks among them.
    pub(super) fn new(
        bucket: &Bucket,
        elements: usize,
        wire: Wire,
        group: &ProcessGroup,
    ) -> Result<Self> {
        Ok(match (bucket.dtype, wire) {
            (DType::F64, _) => Memory::F64(group.alloc_registered(elements)?),
            (DType::F16, _) => Memory::F16(group.alloc_registered(elements)?),
            (DType::Bf16, _) => Memory::Bf16(group.alloc_registered(elements)?),
            (_, Wire::Bf16) => {
                let wire = group.alloc_registered(elements)?;
                Memory::Narrowed { values: vec![0.0; elements], wire }
            }
            (_, Wire::AsIs) => Memory::F32(group.alloc_registered(elements)?),
        })
    }

    /// Memory for `elements` elements that no neighbour reaches.
    pub(super) fn private(bucket: &Bucket, elements: usize, wire: Wire) -> Self {
        match (bucket.dtype, wire) {
            (DType::F64, _) => Memory::F64(RegisteredBuffer::private(elements)),
            (DType::F16, _) => Memory::F16(RegisteredBuffer::private(elements)),
            (DType::Bf16, _) => Memory::Bf16(RegisteredBuffer::private(elements)),
            (_, Wire::Bf16) => Memory::Narrowed {
                values: vec![0.0; elements],
                wire: RegisteredBuffer::private(elements),
            },
            (_, Wire::AsIs) => Memory::F32(RegisteredBuffer::private(elements)),
        }
    }

    pub(super) fn slice(&self, range: Range<usize>) -> Values<'_> {
        with_elements!(self, elements => (&elements[range]).into())
    }

    pub(super) fn slice_mut(&mut self, range: Range<usize>) -> ValuesMut<'_> {
        match self {
            Memory::F32(elements) => ValuesMut::F32(&mut elements[range]),
            Memory::F64(elements) => ValuesMut::F64(&mut elements[range]),
            Memory::F16(elements) => ValuesMut::F16(&mut elements[range]),
            Memory::Bf16(elements) => ValuesMut::Bf16(&mut elements[range]),
            Memory::Narrowed { values, .. } => ValuesMut::F32(&mut values[range]),
        }
    }

    pub(super) fn zero(&mut self, range: Range<usize>) {
        with_elements!(self, elements => elements[range].fill(bytemuck::Zeroable::zeroed()));
    }

    pub(super) fn set_mark(&mut self, at: usize, mark: u8) {
        with_elements!(self, elements => elements[at] = mark.into());
    }

    pub(super) fn mark(&self, at: usize) -> f64 {
        with_elements!(self, elements => widened(elements[at]))
    }

    pub(super) fn is_marked(&self, at: usize) -> bool {
        self.mark(at) != 0.0
    }

    /// Divides sums, and rounds once.
    pub(super) fn divide(&mut self, range: Range<usize>, by: usize) {
        with_ieee_rounding(|| match self.slice_mut(range) {
            ValuesMut::F32(values) => values.iter_mut().for_each(|it| *it /= by as f32),
            ValuesMut::F64(values) => values.iter_mut().for_each(|it| *it /= by as f64),
            ValuesMut::F16(values) => {
                values.iter_mut().for_each(|it| *it = f16::from_f32(it.to_f32() / by as f32));
            }
            ValuesMut::Bf16(values) => {
                values.iter_mut().for_each(|it| *it = bf16::from_f32(it.to_f32() / by as f32));
            }
        });
    }

    /// Makes averages over `all` ranks those over `active` of them.
    pub(super) fn divide_again(&mut self, range: Range<usize>, all: usize, active: usize) {
        let (all, active) = (all as f64, active as f64);
        // A product that is exact before the division keeps whole numbers whole.
        let again = |average: f64| average * all / active;
        match self.slice_mut(range) {
            ValuesMut::F32(values) => {
                values.iter_mut().for_each(|it| *it = again((*it).into()) as f32);
            }
            ValuesMut::F64(values) => values.iter_mut().for_each(|it| *it = again(*it)),
            ValuesMut::F16(values) => {
                values.iter_mut().for_each(|it| *it = f16::from_f64(again((*it).into())));
            }
            ValuesMut::Bf16(values) => {
                values.iter_mut().for_each(|it| *it = bf16::from_f64(again((*it).into())));
            }
        }
    }

    /// Begins to average the elements over all ranks, or to add them.
    pub(super) fn all_reduce(self, op: ReduceOp, group: &ProcessGroup) -> Travelling {
        fn whole<T: Element>(
            buffer: Buffer<T>,
            (op, group): (ReduceOp, &ProcessGroup),
            memory: impl FnOnce(Buffer<T>) -> Memory + Send + 'static,
        ) -> Travelling {
            let work = group.all_reduce_async(buffer, op);
            Travelling::new(move || {
                let (buffer, at) = driving::wait_and_tell(work?)?;
                Ok(Arrived { whole: Some(memory(buffer)), part: None, at })
            })
        }
        let call = (op, group);
        match self {
            Memory::F32(buffer) => whole(buffer, call, Memory::F32),
            Memory::F64(buffer) => whole(buffer, call, Memory::F64),
            Memory::F16(buffer) => whole(buffer, call, Memory::F16),
            Memory::Bf16(buffer) => whole(buffer, call, Memory::Bf16),
            Memory::Narrowed { mut values, mut wire } => {
                narrow((&mut wire[..]).into(), &values[..]);
                whole(wire, call, |wire| {
                    widen(&mut values[..], (&wire[..]).into());
                    Memory::Narrowed { values, wire }
                })
            }
        }
    }

    /// Begins to average or add the elements over all ranks, and to bring this rank its block. `counts` are the lengths of
    /// the blocks, and `part` has room for this rank's.
    pub(super) fn reduce_scatter(
        self,
        part: Memory,
        counts: &[usize],
        op: ReduceOp,
        group: &ProcessGroup,
    ) -> Travelling {
        fn to_part<T: Element>(
            [whole, part]: [Buffer<T>; 2],
            (counts, op, group): (&[usize], ReduceOp, &ProcessGroup),
            [whole_memory, part_memory]: [impl FnOnce(Buffer<T>) -> Memory + Send + 'static; 2],
        ) -> Travelling {
            let whole = Arc::new(whole);
            let input = Held(whole.clone());
            let work = group.reduce_scatter_v_async(input, counts, part, op);
            Travelling::new(move || {
                let (part, at) = driving::wait_and_tell(work?)?;
                let whole = Arc::into_inner(whole).map(whole_memory);
                Ok(Arrived { whole, part: Some(part_memory(part)), at })
            })
        }
        let call = (counts, op, group);
        match (self, part) {
            (Memory::F32(whole), Memory::F32(part)) => {
                to_part([whole, part], call, [Memory::F32; 2])
            }
            (Memory::F64(whole), Memory::F64(part)) => {
                to_part([whole, part], call, [Memory::F64; 2])
            }
            (Memory::F16(whole), Memory::F16(part)) => {
                to_part([whole, part], call, [Memory::F16; 2])
            }
            (Memory::Bf16(whole), Memory::Bf16(part)) => {
                to_part([whole, part], call, [Memory::Bf16; 2])
            }
            (
                Memory::Narrowed { values, wire: mut whole },
                Memory::Narrowed { values: mut of_part, wire: part },
            ) => {
                narrow((&mut whole[..]).into(), &values[..]);
                let memories: [Box<dyn FnOnce(Buffer<bf16>) -> Memory + Send>; 2] = [
                    Box::new(|wire| Memory::Narrowed { values, wire }),
                    Box::new(|wire| {
                        widen(&mut of_part[..], (&wire[..]).into());
                        Memory::Narrowed { values: of_part, wire }
                    }),
                ];
                to_part([whole, part], call, memories)
            }
            _ => unreachable!("both are memory of one bucket"),
        }
    }

    /// Begins to add the sums of shards that all ranks bring. This rank brings `self` and `upper`. Each rank gets as many
    /// elements of all sums as `counts` says, and adds them. `part`, if there is one, has room for these. If not, the
    /// ranks hand on what they have added.
    pub(super) fn add_nodes(
        self,
        upper: &[Memory],
        part: Option<Memory>,
        counts: Vec<usize>,
        shards: &Arc<Shards>,
        group: &ProcessGroup,
    ) -> Travelling {
        fn added<T: Element>(
            mut whole: Buffer<T>,
            upper: Vec<&[T]>,
            mut part: Option<Buffer<T>>,
            (counts, shards, group): (Vec<usize>, Arc<Shards>, ProcessGroup),
            memory: fn(Buffer<T>) -> Memory,
        ) -> Travelling {
            let rank = group.rank();
            let (mut input, mut start) = (Vec::with_capacity(whole.len() * shards.nodes[rank]), 0);
            for &count in &counts {
                for node in std::iter::once(&whole[..]).chain(upper.iter().copied()) {
                    input.extend_from_slice(&node[start..start + count]);
                }
                start += count;
            }
            let sent: Vec<usize> = counts.iter().map(|count| count * shards.nodes[rank]).collect();
            let received: Vec<usize> = shards.nodes.iter().map(|it| it * counts[rank]).collect();
            let output = vec![T::zeroed(); received.iter().sum()];
            let work = group.all_to_all_v_async(input, &sent, output, &received);
            Travelling::new(move || {
                let nodes = work?.wait()?;
                let mut sum = vec![T::zeroed(); counts[rank]];
                if !sum.is_empty() {
                    let nodes: Vec<Source<'_, T>> =
                        nodes.chunks_exact(sum.len()).map(Source::from).collect();
                    let sum = Target::from(&mut sum[..]);
                    with_ieee_rounding(|| {
                        reduce_tree(ReduceOp::Sum, &[sum], &nodes, &shards.merges, None);
                    });
                }
                match &mut part {
                    Some(part) => part.copy_from_slice(&sum),
                    None => group.all_gather_v(&sum, &mut whole, &counts)?,
                }
                let (whole, part) = (Some(memory(whole)), part.map(memory));
                Ok(Arrived { whole, part, at: Instant::now() })
            })
        }
        /// All elements of each memory.
        fn all<T: Element>(upper: &[Memory]) -> Vec<&[T]> {
            let all = |memory: &Memory| with_elements!(memory, elements => elements.len());
            upper.iter().filter_map(|it| it.slice(0..all(it)).as_slice()).collect()
        }
        let call = (counts, shards.clone(), group.clone());
        match (self, part) {
            (Memory::F32(whole), None) => added(whole, all(upper), None, call, Memory::F32),
            (Memory::F64(whole), None) => added(whole, all(upper), None, call, Memory::F64),
            (Memory::F32(whole), Some(Memory::F32(part))) => {
                added(whole, all(upper), Some(part), call, Memory::F32)
            }
            (Memory::F64(whole), Some(Memory::F64(part))) => {
                added(whole, all(upper), Some(part), call, Memory::F64)
            }
            _ => unreachable!("shards have gradients of f32 and f64, and memory of one bucket"),
        }
    }

    /// Begins to collect the first elements of every rank's `part`, as many as `counts` says, here. Nothing is rounded.
    pub(super) fn all_gather(
        self,
        part: Memory,
        counts: &[usize],
        group: &ProcessGroup,
    ) -> Travelling {
        fn from_parts<T: Element, B>(
            [whole, part]: [B; 2],
            (counts, group): (&[usize], &ProcessGroup),
            [whole_memory, part_memory]: [impl FnOnce(B) -> Memory + Send + 'static; 2],
        ) -> Travelling
        where
            B: AsRef<[T]> + AsMut<[T]> + Send + Sync + 'static,
        {
            let part = Arc::new(Front { buffer: part, length: counts[group.rank()] });
            let whole = Front { buffer: whole, length: counts.iter().sum() };
            let work = group.all_gather_v_async(Held(part.clone()), whole, counts);
            Travelling::new(move || {
                let (whole, at) = driving::wait_and_tell(work?)?;
                let part = Arc::into_inner(part).map(|front| part_memory(front.buffer));
                Ok(Arrived { whole: Some(whole_memory(whole.buffer)), part, at })
            })
        }
        let call = (counts, group);
        match (self, part) {
            (Memory::F32(whole), Memory::F32(part)) => {
                from_parts([whole, part], call, [Memory::F32; 2])
            }
            (Memory::F64(whole), Memory::F64(part)) => {
                from_parts([whole, part], call, [Memory::F64; 2])
            }
            (Memory::F16(whole), Memory::F16(part)) => {
                from_parts([whole, part], call, [Memory::F16; 2])
            }
            (Memory::Bf16(whole), Memory::Bf16(part)) => {
                from_parts([whole, part], call, [Memory::Bf16; 2])
            }
            (
                Memory::Narrowed { values: whole, wire },
                Memory::Narrowed { values: part, wire: wire_of_part },
            ) => {
                let memory = |wire: Buffer<bf16>| |values| Memory::Narrowed { values, wire };
                from_parts::<f32, _>([whole, part], call, [memory(wire), memory(wire_of_part)])
            }
            _ => unreachable!("both are memory of one bucket"),
        }
    }
}

fn widened(mark: impl Into<f64>) -> f64 {
    mark.into()
}

/// Memory with which the group works.
pub(super) struct Travelling(Box<dyn FnOnce() -> Result<Arrived> + Send>);

/// Memory that has come back.
#[derive(Debug)]
pub(super) struct Arrived {
    /// That of a whole bucket. `None` if the group still holds it.
    pub(super) whole: Option<Memory>,
    /// That of this rank's block, if it is memory of its own. `None` as above.
    pub(super) part: Option<Memory>,
    /// When the call was complete.
    pub(super) at: Instant,
}

impl Travelling {
    fn new(wait: impl FnOnce() -> Result<Arrived> + Send + 'static) -> Self {
        Self(Box::new(wait))
    }

    pub(super) fn wait(self) -> Result<Arrived> {
        self.0()
    }
}

impl fmt::Debug for Travelling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Travelling")
    }
}

/// A buffer that a call reads, and that comes back.
struct Held<B>(Arc<B>);

impl<T, B: AsRef<[T]>> AsRef<[T]> for Held<B> {
    fn as_ref(&self) -> &[T] {
        (*self.0).as_ref()
    }
}

/// The first elements of a buffer.
struct Front<B> {
    buffer: B,
    length: usize,
}

impl<T, B: AsRef<[T]>> AsRef<[T]> for Front<B> {
    fn as_ref(&self) -> &[T] {
        &self.buffer.as_ref()[..self.length]
    }
}

impl<T, B: AsMut<[T]>> AsMut<[T]> for Front<B> {
    fn as_mut(&mut self) -> &mut [T] {
        &mut self.buffer.as_mut()[..self.length]
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = with_elements!(self, elements => size_of_val(&elements[..]));
        write!(f, "Memory({bytes} bytes)")
    }
}
