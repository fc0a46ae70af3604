//! The buffers of one call, by the names that a schedule gives them.

use std::{
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
};

use drumline_kernels::{
    Addend, Element, Source, Target, copy, copy_past_cache, fetch, fetch_past_cache, reduce_sums,
    reduce_to_sums, reduce_tree, reduce_tree_with, take_over,
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
    error::Cause,
    host::Host,
    operator::{Combine, Function},
    panics::panic_text,
};

/// A list of operands. Short lists need no allocation.
type Operands<T> = SmallVec<[T; 8]>;

/// The memory of one call, with its element type hidden: the transport sees bytes, and local steps are
/// computed here.
pub trait Memory {
    /// The bytes of a stretch, to read.
    fn bytes(&self, stretch: Stretch) -> &[u8];
    /// The bytes of a stretch, to write.
    fn bytes_mut(&mut self, stretch: Stretch) -> &mut [u8];
    /// Carries out a step. Operands of neighbours lie in `host`.
    fn compute(&mut self, computation: Computation<'_>, host: Option<&Host>) -> Result<(), Cause>;
}

/// The caller's buffers and the working memory of one call.
///
/// `D` and `I` lend or own the caller's elements: a blocking call lends them, an asynchronous
/// one owns them.
#[derive(Debug)]
pub(crate) struct Buffers<T, D, I> {
    op: Combine<T>,
    pub data: D,
    pub input: I,
    scratch: Block,
    sums: Block,
}

/// Memory in which elements of any type can lie.
type Block = Vec<Word>;

/// A word with the size and the alignment of the largest element.
type Word = [u64; 2];

/// Working memory that is kept from call to call, because fresh pages cost more than the
/// arithmetic on them. It grows to what the largest call needed.
#[derive(Debug, Default)]
pub struct Pool {
    scratch: Block,
    sums: Block,
}

/// All operands of a rank in one window. They are raw pointers, so one step can name several of them.
#[derive(Clone, Copy)]
struct Places<'a, T: Element> {
    plan: &'a Plan,
    window: usize,
    data: Target<'a, T>,
    input: Source<'a, T>,
    scratch: Target<'a, T>,
    sums: Target<'a, T::Accumulator>,
    host: Option<&'a Host>,
}

impl<'a, T: Element> Places<'a, T> {
    #[inline(always)]
    fn source(&self, operand: &Operand) -> Result<Source<'a, T>, Cause> {
        match operand.area {
            Area::Input => Ok(self.input.slice(self.range(operand))),
            _ => Ok(self.target(operand)?.as_source()),
        }
    }

    #[inline(always)]
    fn target(&self, operand: &Operand) -> Result<Target<'a, T>, Cause> {
        let range = self.range(operand);
        Ok(match operand.area {
            Area::Data => self.data.slice(range),
            Area::Scratch => self.scratch.slice(range),
            Area::Line => self.host().own_line(range),
            Area::LineOf(seat) => self.host().line_of(seat, range),
            Area::Slot => self.host().own_slot(range),
            Area::SlotOf(seat) => self.host().slot_of(seat, range),
            Area::RegisteredOf(seat) => self.host().registered_of(seat, range)?,
            Area::Input => unreachable!("no schedule writes to the input"),
            Area::Sums => unreachable!("sums are combined and copied apart"),
        })
    }

    fn sum(&self, operand: &Operand) -> Target<'a, T::Accumulator> {
        self.sums.slice(self.range(operand))
    }

    fn range(&self, operand: &Operand) -> Range<usize> {
        self.plan.range(operand, self.window)
    }

    fn host(&self) -> &'a Host {
        let Some(host) = self.host else {
            unreachable!("shared memory is named only where there is some");
        };
        host
    }

    /// Carries out a step. It is generic over the element type only, not over the buffers, so that it is
    /// compiled once for each element type.
    fn carry_out(&self, op: &Combine<T>, local: &Local) -> Result<(), Cause> {
        let takes_over = |src: &Operand| {
            matches!(src.area, Area::SlotOf(_)) && self.host.is_some_and(Host::is_pair)
        };
        match local {
            Local::Copy { dst, src } if dst.area == Area::Sums => {
                copy(self.sum(dst), self.sum(src).as_source());
            }
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
                self.combine_apart(op, dsts, srcs, merges, *finish)?;
            }
            Local::Combine { dsts, srcs, merges, finish, apart: false } => {
                let mut into: Operands<Target<'_, T>> = SmallVec::new();
                for dst in dsts {
                    into.push(self.target(dst)?);
                }
                let mut from: Operands<Source<'_, T>> = SmallVec::new();
                for src in srcs {
                    from.push(self.source(src)?);
                }
                op.tree(&into, &from, merges, *finish)?;
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
        op: &Combine<T>,
        dsts: &[Operand],
        srcs: &[Operand],
        merges: &[usize],
        finish: Option<usize>,
    ) -> Result<(), Cause> {
        let Combine::Builtin(op) = op else {
            unreachable!("an operator of the caller's own works on elements as they are");
        };
        let mut from: Operands<Addend<'_, T>> = SmallVec::new();
        for src in srcs {
            from.push(match src.area {
                Area::Sums => Addend::Sum(self.sum(src).as_source()),
                _ => Addend::Element(self.source(src)?),
            });
        }
        if dsts[0].area == Area::Sums {
            let into: Operands<_> = dsts.iter().map(|dst| self.sum(dst)).collect();
            reduce_to_sums(*op, &into, &from, merges);
            return Ok(());
        }
        let mut into: Operands<Target<'_, T>> = SmallVec::new();
        for dst in dsts {
            into.push(self.target(dst)?);
        }
        reduce_sums(*op, &into, &from, merges, finish);
        Ok(())
    }
}

impl<T: Element, D: AsMut<[T]> + AsRef<[T]>, I: AsRef<[T]>> Buffers<T, D, I> {
    /// Buffers of a call that has not begun.
    pub(crate) fn new(op: Combine<T>, data: D, input: I) -> Buffers<T, D, I> {
        Buffers { op, data, input, scratch: Block::default(), sums: Block::default() }
    }

    /// Takes the working memory that the call needs from the pool. It holds values of earlier calls.
    pub(crate) fn lay_out(&mut self, plan: &Plan, pool: &mut Pool) {
        lend(&mut pool.scratch, &mut self.scratch, plan.scratch_bytes());
        lend(&mut pool.sums, &mut self.sums, plan.sums_bytes());
    }

    /// Returns the working memory to the pool.
    pub(crate) fn release(&mut self, pool: &mut Pool) {
        give_back(&mut pool.scratch, &mut self.scratch);
        give_back(&mut pool.sums, &mut self.sums);
    }

    pub(crate) fn op(&self) -> &Combine<T> {
        &self.op
    }

    /// The operator and both buffers.
    pub(crate) fn parts(&mut self) -> (&Combine<T>, &mut D, &mut I) {
        (&self.op, &mut self.data, &mut self.input)
    }

    /// The operator, and the operands on which it works in a window.
    fn places<'a>(
        &'a mut self,
        plan: &'a Plan,
        window: usize,
        host: Option<&'a Host>,
    ) -> (&'a Combine<T>, Places<'a, T>) {
        let places = Places {
            plan,
            window,
            data: Target::from(self.data.as_mut()),
            input: Source::from(self.input.as_ref()),
            scratch: Target::from(bytemuck::cast_slice_mut(&mut self.scratch)),
            sums: Target::from(bytemuck::cast_slice_mut(&mut self.sums)),
            host,
        };
        (&self.op, places)
    }
}

impl<T: Element, D: AsMut<[T]> + AsRef<[T]>, I: AsRef<[T]>> Memory for Buffers<T, D, I> {
    fn bytes(&self, stretch: Stretch) -> &[u8] {
        bytemuck::cast_slice(match stretch.buffer {
            Buffer::Sum(_) => return part::<T::Accumulator>(&self.sums, stretch),
            Buffer::Data => &self.data.as_ref()[stretch.range()],
            Buffer::Input => &self.input.as_ref()[stretch.range()],
            Buffer::Scratch(_) => return part::<T>(&self.scratch, stretch),
            Buffer::Slot => unreachable!("messages never touch shared memory"),
        })
    }

    fn bytes_mut(&mut self, stretch: Stretch) -> &mut [u8] {
        bytemuck::cast_slice_mut(match stretch.buffer {
            Buffer::Sum(_) => {
                let sums = bytemuck::cast_slice_mut::<Word, T::Accumulator>(&mut self.sums);
                return bytemuck::cast_slice_mut(&mut sums[stretch.range()]);
            }
            Buffer::Data => &mut self.data.as_mut()[stretch.range()],
            Buffer::Scratch(_) => {
                &mut bytemuck::cast_slice_mut::<Word, T>(&mut self.scratch)[stretch.range()]
            }
            Buffer::Input => unreachable!("no schedule writes to the input"),
            Buffer::Slot => unreachable!("messages never touch shared memory"),
        })
    }

    fn compute(&mut self, computation: Computation<'_>, host: Option<&Host>) -> Result<(), Cause> {
        let (op, places) = self.places(computation.plan, computation.window, host);
        places.carry_out(op, computation.local)
    }
}

/// The bytes of a stretch of elements of `E`.
fn part<E: Element>(block: &[Word], stretch: Stretch) -> &[u8] {
    bytemuck::cast_slice(&bytemuck::cast_slice::<Word, E>(block)[stretch.range()])
}

/// Moves a block that has at least this length out of the pool, if any is needed.
fn lend(pool: &mut Block, block: &mut Block, bytes: usize) {
    let words = bytes.div_ceil(size_of::<Word>());
    if words == 0 {
        return;
    }
    *block = std::mem::take(pool);
    if block.len() < words {
        block.resize(words, [0; 2]);
    }
}

fn give_back(pool: &mut Block, block: &mut Block) {
    if !block.is_empty() {
        *pool = std::mem::take(block);
    }
}

impl<T: Element> Combine<T> {
    /// Combines all sources by a stack program. If the caller's operator panics, the call fails, as it does
    /// when a peer is lost, and the peers are told.
    pub(crate) fn tree(
        &self,
        dsts: &[Target<'_, T>],
        srcs: &[Source<'_, T>],
        merges: &[usize],
        finish: Option<usize>,
    ) -> Result<(), Cause> {
        match self {
            Combine::Builtin(op) => {
                reduce_tree(*op, dsts, srcs, merges, finish);
                Ok(())
            }
            Combine::Custom { name, function } => {
                by_function(name, &**function, dsts, srcs, merges)
            }
        }
    }
}

#[inline(never)]
fn by_function<T: Element>(
    name: &str,
    function: &Function<T>,
    dsts: &[Target<'_, T>],
    srcs: &[Source<'_, T>],
    merges: &[usize],
) -> Result<(), Cause> {
    let combine = || reduce_tree_with(function, dsts, srcs, merges);
    catch_unwind(AssertUnwindSafe(combine)).map_err(|panic| Cause::Panicked {
        text: format!("the operator {name:?}: {}", panic_text(&*panic)),
    })
}
