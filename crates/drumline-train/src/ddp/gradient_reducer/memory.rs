//! The memory of a bucket.

use std::{convert::Infallible, fmt, iter::once, ops::Range, sync::Arc, time::Instant};

use drumline_group::{
    DType, ProcessGroup, ReduceOp, RegisteredBuffer,
    backend::Collective,
    driving::{self, Ask},
};
use drumline_kernels::{Number, Source, Target, with_ieee_rounding};

use super::{
    super::{Bucket, Wire, shards::Shards},
    values::{Values, ValuesMut},
};
use crate::Result;

/// The elements of a bucket: the gradients of its members, then one mark for each member, then marks of the rank. A
/// rank sets a mark to 1. After the all-reduce a mark is above zero if *some* rank had set it, because it is an
/// average of zeros and ones. [`Block`](super::plan::Block) says which of them there are.
pub(super) struct Memory {
    dtype: DType,
    elements: Bytes,
    /// If elements are rounded to bf16 when they leave: the memory in which they travel. What comes back replaces them.
    wire: Option<Bytes>,
}

impl Memory {
    /// Memory for `elements` elements, marks among them, in which a collective works without copies between the ranks of
    /// a host.
    pub(super) fn new(
        bucket: &Bucket,
        elements: usize,
        wire: Wire,
        group: &ProcessGroup,
    ) -> Result<Self> {
        Self::of(bucket, elements, wire, |len| Bytes::registered(len, group))
    }

    /// Memory for `elements` elements that no neighbour reaches.
    pub(super) fn private(bucket: &Bucket, elements: usize, wire: Wire) -> Self {
        let private = |len| Ok::<_, Infallible>(Bytes::private(len));
        let Ok(memory) = Self::of(bucket, elements, wire, private);
        memory
    }

    fn of<E>(
        bucket: &Bucket,
        elements: usize,
        wire: Wire,
        allocate: impl FnOnce(usize) -> Result<Bytes, E>,
    ) -> Result<Self, E> {
        let dtype = bucket.dtype;
        let bytes = elements * dtype.size();
        Ok(match dtype == DType::F32 && matches!(wire, Wire::Bf16) {
            true => {
                let wire = Some(allocate(elements * DType::Bf16.size())?);
                Self { dtype, elements: Bytes::private(bytes), wire }
            }
            false => Self { dtype, elements: allocate(bytes)?, wire: None },
        })
    }

    pub(super) fn slice(&self, range: Range<usize>) -> Values<'_> {
        Values::of(self.dtype, &self.elements.as_ref()[in_bytes(self.dtype, range)])
    }

    pub(super) fn slice_mut(&mut self, range: Range<usize>) -> ValuesMut<'_> {
        ValuesMut::of(self.dtype, self.bytes_mut(range))
    }

    fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        &mut self.elements.as_mut()[in_bytes(self.dtype, range)]
    }

    pub(super) fn zero(&mut self, range: Range<usize>) {
        self.bytes_mut(range).fill(0);
    }

    pub(super) fn set_mark(&mut self, at: usize, mark: u8) {
        let element = (self.dtype.kernels().element)(Number::Integer(mark.into()));
        let Some(element) = element else { unreachable!("gradients are floats") };
        let place = self.bytes_mut(at..at + 1);
        place.copy_from_slice(&element[..place.len()]);
    }

    pub(super) fn mark(&self, at: usize) -> f64 {
        self.slice(at..at + 1).first()
    }

    pub(super) fn is_marked(&self, at: usize) -> bool {
        self.mark(at) != 0.0
    }

    /// Divides sums, and rounds once.
    pub(super) fn divide(&mut self, range: Range<usize>, by: usize) {
        let divide = self.dtype.kernels().reduce_tree;
        let sums = Target::from(self.bytes_mut(range));
        if !sums.is_empty() {
            with_ieee_rounding(|| {
                divide(ReduceOp::Avg, &[sums], &[sums.as_source()], &[0], Some(by));
            });
        }
    }

    /// Makes averages over `all` ranks those over `active` of them.
    pub(super) fn divide_again(&mut self, range: Range<usize>, all: usize, active: usize) {
        let (all, active) = (all as f64, active as f64);
        // A product that is exact before the division keeps whole numbers whole.
        self.slice_mut(range).replace(|average| average * all / active);
    }

    /// Begins to average the elements over all ranks, or to add them.
    pub(super) fn all_reduce(self, op: ReduceOp, group: &ProcessGroup) -> Travelling {
        let (elements, behind) = self.pack();
        let work = behind.ask(Collective::AllReduce).by(op).begin(group, elements, [0; 0]);
        Travelling::new(move || {
            let (elements, at) = driving::wait_and_tell(work?)?;
            Ok(Arrived { whole: Some(behind.unpack(elements)), part: None, at })
        })
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
        let (whole, behind) = self.pack();
        let (part, behind_part) = part.split();
        let whole = Arc::new(whole);
        let ask = behind.ask(Collective::ReduceScatter).by(op).in_blocks(counts);
        let work = ask.begin(group, part, Held(whole.clone()));
        Travelling::new(move || {
            let (part, at) = driving::wait_and_tell(work?)?;
            let whole = Arc::into_inner(whole).map(|whole| behind.join(whole));
            Ok(Arrived { whole, part: Some(behind_part.unpack(part)), at })
        })
    }

    /// Begins to add the sums of shards that all ranks bring. This rank brings `self` and `upper`. Each rank gets as many
    /// elements of all sums as `counts` says, and adds them. `part`, if there is one, has room for these. If not, the
    /// ranks hand on what they have added.
    pub(super) fn add_nodes(
        mut self,
        upper: &[Memory],
        mut part: Option<Memory>,
        counts: Vec<usize>,
        shards: &Arc<Shards>,
        group: &ProcessGroup,
    ) -> Travelling {
        let (dtype, rank, shards, group) =
            (self.dtype, group.rank(), shards.clone(), group.clone());
        let sent: Vec<usize> = counts.iter().map(|count| count * shards.nodes[rank]).collect();
        let received: Vec<usize> = shards.nodes.iter().map(|it| it * counts[rank]).collect();
        let bytes = move |elements: usize| Bytes::private(elements * dtype.size());
        let mut input = bytes(sent.iter().sum());
        let (mut rest, mut start) = (input.as_mut(), 0);
        for &count in &counts {
            let block = in_bytes(dtype, start..start + count);
            for node in once(&self).chain(upper) {
                let (place, behind) = rest.split_at_mut(block.len());
                place.copy_from_slice(&node.elements.as_ref()[block.clone()]);
                rest = behind;
            }
            start += count;
        }
        let ask = Ask::new(Collective::AllToAll, dtype).in_blocks((&sent, &received));
        let work = ask.begin(&group, bytes(received.iter().sum()), input);
        Travelling::new(move || {
            let nodes = work?.wait()?;
            let mut sum = bytes(counts[rank]);
            if sum.len > 0 {
                let nodes: Vec<Source<'_, u8>> =
                    nodes.as_ref().chunks_exact(sum.len).map(Source::from).collect();
                let (add, sum) = (dtype.kernels().reduce_tree, Target::from(sum.as_mut()));
                with_ieee_rounding(|| add(ReduceOp::Sum, &[sum], &nodes, &shards.merges, None));
            }
            match &mut part {
                Some(part) => part.elements.as_mut().copy_from_slice(sum.as_ref()),
                None => {
                    let ask = Ask::new(Collective::AllGather, dtype).in_blocks(&counts);
                    ask.run(&group, self.elements.as_mut(), sum.as_ref())?;
                }
            }
            Ok(Arrived { whole: Some(self), part, at: Instant::now() })
        })
    }

    /// Begins to collect the first elements of every rank's `part`, as many as `counts` says, here. Nothing is rounded.
    pub(super) fn all_gather(
        self,
        part: Memory,
        counts: &[usize],
        group: &ProcessGroup,
    ) -> Travelling {
        let dtype = self.dtype;
        let front = move |Memory { elements, wire, .. }: Memory, count: usize| {
            let len = elements.len;
            let behind =
                move |elements| Memory { dtype, elements: Bytes { len, ..elements }, wire };
            (Bytes { len: count * dtype.size(), ..elements }, behind)
        };
        let (whole, whole_memory) = front(self, counts.iter().sum());
        let (part, part_memory) = front(part, counts[group.rank()]);
        let part = Arc::new(part);
        let ask = Ask::new(Collective::AllGather, dtype).in_blocks(counts);
        let work = ask.begin(group, whole, Held(part.clone()));
        Travelling::new(move || {
            let (whole, at) = driving::wait_and_tell(work?)?;
            let part = Arc::into_inner(part).map(part_memory);
            Ok(Arrived { whole: Some(whole_memory(whole)), part, at })
        })
    }

    /// The elements as they leave, and what stays behind.
    fn pack(mut self) -> (Bytes, Behind) {
        if let Some(wire) = &mut self.wire {
            let narrow = DType::Bf16.kernels().narrow;
            narrow(wire.as_mut().into(), self.elements.as_ref().into());
        }
        self.split()
    }

    /// The memory in which elements travel, and what stays behind.
    fn split(self) -> (Bytes, Behind) {
        let Self { dtype, elements, wire } = self;
        match wire {
            Some(wire) => (wire, Behind { dtype, elements: Some(elements) }),
            None => (elements, Behind { dtype, elements: None }),
        }
    }
}

/// What stays behind of memory whose elements travel.
struct Behind {
    dtype: DType,
    /// The elements, if they travel rounded.
    elements: Option<Bytes>,
}

impl Behind {
    /// A call on the elements that travel.
    fn ask<'a>(&self, collective: Collective) -> Ask<'a> {
        Ask::new(collective, if self.elements.is_some() { DType::Bf16 } else { self.dtype })
    }

    fn join(self, travelled: Bytes) -> Memory {
        let Self { dtype, elements } = self;
        match elements {
            Some(elements) => Memory { dtype, elements, wire: Some(travelled) },
            None => Memory { dtype, elements: travelled, wire: None },
        }
    }

    /// The memory with the elements that have come back.
    fn unpack(self, arrived: Bytes) -> Memory {
        let mut memory = self.join(arrived);
        if let Some(wire) = &memory.wire {
            let widen = DType::Bf16.kernels().widen;
            widen(memory.elements.as_mut().into(), wire.as_ref().into());
        }
        memory
    }
}

fn in_bytes(dtype: DType, range: Range<usize>) -> Range<usize> {
    range.start * dtype.size()..range.end * dtype.size()
}

/// The bytes of elements, aligned for the largest.
struct Bytes {
    words: RegisteredBuffer<u64>,
    len: usize,
}

impl Bytes {
    fn registered(len: usize, group: &ProcessGroup) -> Result<Bytes> {
        Ok(Bytes { words: group.alloc_registered(len.div_ceil(size_of::<u64>()))?, len })
    }

    fn private(len: usize) -> Bytes {
        Bytes { words: RegisteredBuffer::private(len.div_ceil(size_of::<u64>())), len }
    }
}

impl AsRef<[u8]> for Bytes {
    fn as_ref(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }
}

impl AsMut<[u8]> for Bytes {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.len]
    }
}

/// Bytes that a call reads, and that come back.
struct Held(Arc<Bytes>);

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        (*self.0).as_ref()
    }
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

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({} bytes)", self.elements.len)
    }
}
