//! The buffers of one call, by the names that a schedule gives them.

use std::{any::Any, fmt, ops::Range};

use drumline_kernels::{
    Addend, Source, Target, copy, copy_past_cache, fetch, fetch_past_cache, take_over,
};
use drumline_schedule::step::Buffer;
use smallvec::SmallVec;

use super::{
    layout::Stretch,
    local::{Area, Local, Operand},
    machine::Computation,
    plan::Plan,
};
use crate::{
    ReduceOp, Result,
    bytes::Bytes,
    error::Cause,
    host::Host,
    operator::{AnyOperator, by_function},
};

/// A list of operands. Short lists need no allocation.
type Operands<T> = SmallVec<[T; 8]>;

/// The caller's buffers, as bytes.
pub enum Buffers<'a> {
    /// A blocking call lends them.
    Lent {
        /// The buffer of the result.
        data: &'a mut [u8],
        /// The buffer that is only read.
        input: &'a [u8],
    },
    /// A call in the background holds them.
    Held(Box<dyn Held>),
}

/// Buffers that a call in the background holds, and their owner.
pub trait Held: Any + Send {
    /// The bytes of the buffer of the result.
    fn data(&self) -> &[u8];
    /// The bytes of the buffer that is only read.
    fn input(&self) -> &[u8];
    /// Both, the first one to write.
    fn both(&mut self) -> (&mut [u8], &[u8]);
    /// Hands the result, and the buffers with it, to the owner.
    fn end(self: Box<Self>, result: Result<()>);
}

impl Buffers<'_> {
    /// The buffer of the result.
    #[inline]
    pub fn data(&self) -> &[u8] {
        match self {
            Buffers::Lent { data, .. } => data,
            Buffers::Held(held) => held.data(),
        }
    }

    /// Both buffers, the first one to write.
    #[inline]
    pub(crate) fn both(&mut self) -> (&mut [u8], &[u8]) {
        match self {
            Buffers::Lent { data, input } => (data, input),
            Buffers::Held(held) => held.both(),
        }
    }

    /// The buffer that is only read.
    #[inline]
    pub(crate) fn input(&self) -> &[u8] {
        match self {
            Buffers::Lent { input, .. } => input,
            Buffers::Held(held) => held.input(),
        }
    }

    /// The owner of held buffers, if it is of this type.
    pub fn held_mut<H: Held>(&mut self) -> Option<&mut H> {
        match self {
            Buffers::Lent { .. } => None,
            Buffers::Held(held) => (&mut **held as &mut dyn Any).downcast_mut(),
        }
    }
}

impl fmt::Debug for Buffers<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self {
            Buffers::Lent { .. } => "lent",
            Buffers::Held(_) => "held",
        };
        write!(f, "Buffers({kind}, {} bytes)", self.data().len())
    }
}

/// The buffers and the working memory of one call, and how values are combined there.
#[derive(Debug)]
pub struct Memory<'a> {
    operator: Option<AnyOperator>,
    pub(crate) buffers: Buffers<'a>,
    /// Copies of the buffers on which the call works in their place.
    pub(crate) data: Option<Bytes>,
    pub(crate) input: Option<Bytes>,
    scratch: Bytes,
    sums: Bytes,
}

/// Working memory that is kept from call to call, because fresh pages cost more than the
/// arithmetic on them. It grows to what the largest call needed.
#[derive(Debug, Default)]
pub struct Pool {
    scratch: Bytes,
    sums: Bytes,
}

impl<'a> Memory<'a> {
    /// The memory of a call that has not begun.
    #[inline(always)]
    pub(crate) fn new(operator: Option<AnyOperator>, buffers: Buffers<'a>) -> Memory<'a> {
        let (scratch, sums) = (Bytes::default(), Bytes::default());
        Memory { operator, buffers, data: None, input: None, scratch, sums }
    }

    /// The bytes of the element by which this rank multiplies its own values.
    #[inline]
    pub(crate) fn factor(&self) -> Option<&[u8; 16]> {
        match &self.operator {
            Some(AnyOperator::PremulSum { factor, .. }) => Some(factor),
            _ => None,
        }
    }

    /// The operator, the data and the input of a call that a backend carries out.
    pub(crate) fn parts(&mut self) -> (Option<&AnyOperator>, &mut [u8], &[u8]) {
        let Memory { operator, buffers, input: copy, .. } = self;
        let (data, input) = buffers.both();
        (operator.as_ref(), data, copy.as_deref().unwrap_or(input))
    }

    /// Takes the working memory that the call needs from the pool. It holds values of earlier calls.
    #[inline]
    pub(crate) fn lay_out(&mut self, plan: &Plan, pool: &mut Pool) {
        lend(&mut pool.scratch, &mut self.scratch, plan.scratch_bytes());
        lend(&mut pool.sums, &mut self.sums, plan.sums_bytes());
    }

    /// Returns the working memory to the pool.
    #[inline]
    pub(crate) fn release(&mut self, pool: &mut Pool) {
        give_back(&mut pool.scratch, &mut self.scratch);
        give_back(&mut pool.sums, &mut self.sums);
    }

    #[inline]
    pub(crate) fn input(&self) -> &[u8] {
        self.input.as_deref().unwrap_or_else(|| self.buffers.input())
    }

    /// The bytes of a stretch, to read.
    pub fn bytes(&self, stretch: Stretch) -> &[u8] {
        let buffer = match stretch.buffer {
            Buffer::Data => self.data.as_deref().unwrap_or_else(|| self.buffers.data()),
            Buffer::Input => self.input(),
            Buffer::Scratch(_) => &self.scratch,
            Buffer::Sum(_) => &self.sums,
            Buffer::Slot => unreachable!("messages never touch shared memory"),
        };
        &buffer[stretch.range()]
    }

    /// The bytes of a stretch, to write.
    pub fn bytes_mut(&mut self, stretch: Stretch) -> &mut [u8] {
        let buffer = match stretch.buffer {
            Buffer::Data => match &mut self.data {
                Some(copy) => &mut **copy,
                None => self.buffers.both().0,
            },
            Buffer::Scratch(_) => &mut *self.scratch,
            Buffer::Sum(_) => &mut *self.sums,
            Buffer::Input => unreachable!("no schedule writes to the input"),
            Buffer::Slot => unreachable!("messages never touch shared memory"),
        };
        &mut buffer[stretch.range()]
    }

    /// Carries out a step. Operands of neighbours lie in `host`.
    #[inline]
    pub(crate) fn compute(
        &mut self,
        computation: Computation<'_>,
        host: Option<&Host>,
    ) -> Result<(), Cause> {
        let Computation { plan, local, window } = computation;
        let Memory { operator, buffers, data: copy, input, scratch, sums } = self;
        let (own_data, own_input) = buffers.both();
        let places = Places {
            plan,
            window,
            data: Target::from(copy.as_deref_mut().unwrap_or(own_data)),
            input: Source::from(input.as_deref().unwrap_or(own_input)),
            scratch: Target::from(&mut scratch[..]),
            sums: Target::from(&mut sums[..]),
            host,
        };
        places.carry_out(operator.as_ref(), local)
    }
}

/// All operands of a rank in one window. They are raw pointers, so one step can name several of them.
#[derive(Clone, Copy)]
struct Places<'a> {
    plan: &'a Plan,
    window: usize,
    data: Target<'a, u8>,
    input: Source<'a, u8>,
    scratch: Target<'a, u8>,
    sums: Target<'a, u8>,
    host: Option<&'a Host>,
}

impl<'a> Places<'a> {
    #[inline(always)]
    fn source(&self, operand: &Operand) -> Result<Source<'a, u8>, Cause> {
        match operand.area {
            Area::Input => Ok(self.input.slice(self.range(operand))),
            _ => Ok(self.target(operand)?.as_source()),
        }
    }

    #[inline(always)]
    fn target(&self, operand: &Operand) -> Result<Target<'a, u8>, Cause> {
        let range = self.range(operand);
        Ok(match operand.area {
            Area::Data => self.data.slice(range),
            Area::Scratch => self.scratch.slice(range),
            Area::Sums => self.sums.slice(range),
            Area::Line => self.host().own_line(range),
            Area::LineOf(seat) => self.host().line_of(seat, range),
            Area::Slot => self.host().own_slot(range),
            Area::SlotOf(seat) => self.host().slot_of(seat, range),
            Area::RegisteredOf(seat) => {
                self.host().registered_of(seat, range, self.plan.kernels.align)?
            }
            Area::Input => unreachable!("no schedule writes to the input"),
        })
    }

    #[inline(always)]
    fn range(&self, operand: &Operand) -> Range<usize> {
        self.plan.range(operand, self.window)
    }

    #[inline(always)]
    fn host(&self) -> &'a Host {
        let Some(host) = self.host else {
            unreachable!("shared memory is named only where there is some");
        };
        host
    }

    fn carry_out(&self, operator: Option<&AnyOperator>, local: &Local) -> Result<(), Cause> {
        let takes_over = |src: &Operand| {
            matches!(src.area, Area::SlotOf(_)) && self.host.is_some_and(Host::is_pair)
        };
        match local {
            Local::Copy { dst, src } => {
                let into = self.target(dst)?;
                let is_callers = matches!(dst.area, Area::Data | Area::RegisteredOf(_));
                match (takes_over(src), self.plan.passes_cache && is_callers) {
                    (true, true) => fetch_past_cache(into, self.target(src)?),
                    (true, false) => fetch(into, self.target(src)?),
                    (false, true) => copy_past_cache(into, self.source(src)?),
                    (false, false) => copy(into, self.source(src)?),
                }
            }
            Local::Combine { dsts, srcs, merges, finish, apart: true } => {
                self.combine_apart(operator, dsts, srcs, merges, *finish)?;
            }
            Local::Combine { dsts, srcs, merges, finish, apart: false } => {
                let mut into: Operands<Target<'_, u8>> = SmallVec::new();
                for dst in dsts {
                    into.push(self.target(dst)?);
                }
                let mut from: Operands<Source<'_, u8>> = SmallVec::new();
                for src in srcs {
                    from.push(self.source(src)?);
                }
                match operator {
                    Some(AnyOperator::Custom { name, function, .. }) => {
                        by_function(name, &**function, &into, &from, merges)?;
                    }
                    other => {
                        let reduce_tree = self.plan.kernels.reduce_tree;
                        reduce_tree(builtin(other), &into, &from, merges, *finish);
                    }
                }
            }
        }
        // In a rooted collective data flows one way, so no later copy takes over the slot that was read here.
        if let Local::Combine { srcs, .. } = local
            && self.plan.schedule.collective.has_root()
        {
            for src in srcs.iter().filter(|src| takes_over(src)) {
                take_over(self.target(src)?);
            }
        }
        Ok(())
    }

    /// Combines operands, some in places for sums. All destinations have one width.
    #[inline(never)]
    fn combine_apart(
        &self,
        operator: Option<&AnyOperator>,
        dsts: &[Operand],
        srcs: &[Operand],
        merges: &[usize],
        finish: Option<usize>,
    ) -> Result<(), Cause> {
        let op = builtin(operator);
        let mut from: Operands<Addend<'_, u8>> = SmallVec::new();
        for src in srcs {
            from.push(match src.area {
                Area::Sums => Addend::Sum(self.source(src)?),
                _ => Addend::Element(self.source(src)?),
            });
        }
        let mut into: Operands<Target<'_, u8>> = SmallVec::new();
        for dst in dsts {
            into.push(self.target(dst)?);
        }
        match dsts[0].area {
            Area::Sums => (self.plan.kernels.reduce_to_sums)(op, &into, &from, merges),
            _ => (self.plan.kernels.reduce_sums)(op, &into, &from, merges, finish),
        }
        Ok(())
    }
}

/// The operator of the library by which values are combined.
#[inline]
fn builtin(operator: Option<&AnyOperator>) -> ReduceOp {
    match operator.and_then(AnyOperator::builtin) {
        Some(op) => op,
        // `Call::problem` refuses a call that reduces without an operator, and functions work on elements as they are.
        None => unreachable!("a step combines values by an operator of the library"),
    }
}

/// Moves a block that has at least this length out of the pool, if any is needed.
#[inline]
fn lend(pool: &mut Bytes, block: &mut Bytes, bytes: usize) {
    if bytes > 0 {
        *block = std::mem::take(pool);
        block.grow(bytes);
    }
}

#[inline]
fn give_back(pool: &mut Bytes, block: &mut Bytes) {
    if !block.is_empty() {
        *pool = std::mem::take(block);
    }
}
