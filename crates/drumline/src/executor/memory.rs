//! The buffers of one operation, by the names that a schedule gives them.

use std::panic::{AssertUnwindSafe, catch_unwind};

use drumline_kernels::{Element, Source, Target, copy, fetch, reduce_tree, reduce_tree_with};
use drumline_schedule::step::{Buffer, Loc, Side, Step};

use super::{layout::Layout, machine::Machine, plan::Plan};
use crate::{error::Cause, host::Host, operator::Combine, work::panic_text};

/// Bytes for a transport, and local steps for the executor; the element type is hidden.
pub(crate) trait Memory {
    fn bytes(&self, loc: Loc) -> &[u8];
    fn bytes_mut(&mut self, loc: Loc) -> &mut [u8];
    /// Carries out a step other than a message. Places of peers lie in `host`; `merges` says how a
    /// step combines many inputs.
    fn compute(&mut self, step: &Step, merges: &[usize], host: Option<&Host>) -> Result<(), Cause>;
    /// Goes on with another window of the buffers.
    fn show(&mut self, layout: &Layout);
}

/// The caller's buffers and the working memory of one call.
///
/// `D` and `I` lend or own the caller's elements: a blocking call lends them, an asynchronous
/// one owns them.
#[derive(Debug)]
pub(crate) struct Buffers<T, D, I> {
    op: Combine<T>,
    /// How many ranks have a part in what is finished.
    contributions: usize,
    layout: Option<Layout>,
    pub(crate) data: D,
    pub(crate) input: I,
    scratch: Scratch,
}

/// The parts of all scratch slots that a schedule names, behind each other in one block.
#[derive(Debug, Default)]
struct Scratch {
    slots: Vec<Slot>,
    memory: Block,
}

#[derive(Debug)]
struct Slot {
    id: usize,
    /// What the schedule names of it.
    places: Vec<Loc>,
    /// The first element of the slot that is backed, in the window at hand.
    first: usize,
    /// Where in the block it lies, in elements.
    at: usize,
}

/// Memory that every element type can lie in.
pub(super) type Block = Vec<Word>;

/// As large as the largest element, and aligned like the most aligned.
type Word = [u64; 2];

/// Working memory that is kept from call to call, because fresh pages cost more than the
/// arithmetic on them. It grows to what the largest call needed.
#[derive(Debug, Default)]
pub(crate) struct Pool(Block);

impl Scratch {
    /// Room for what the schedule of `plan` names, in any window. It holds left-overs.
    fn new(plan: &Plan, pool: &mut Pool) -> Scratch {
        let element_bytes = plan.element_bytes;
        let mut end = 0;
        let last = (!plan.scratch.is_empty()).then(|| plan.layout.last());
        let slots = plan.scratch.iter().map(|(id, places)| {
            let mut slot = Slot { id: *id, places: places.clone(), first: 0, at: 0 };
            let hull = slot.hull(&plan.layout);
            (slot.first, slot.at) = (hull.start, end);
            // In a shorter window, borders of blocks may lie further apart by one.
            let of_last = last.as_ref().map_or(0, |last| slot.hull(last).len());
            let len = hull.len().max(of_last);
            // Slots begin on cache lines of their own.
            end += (len * element_bytes).next_multiple_of(64) / element_bytes;
            slot
        });
        let slots = slots.collect();
        let mut memory = std::mem::take(&mut pool.0);
        let words = (end * element_bytes).div_ceil(size_of::<Word>());
        if memory.len() < words {
            memory.resize(words, [0; 2]);
        }
        Scratch { slots, memory }
    }
}

impl Slot {
    /// The elements of the slot that the schedule names.
    fn hull(&self, layout: &Layout) -> std::ops::Range<usize> {
        let ranges = self.places.iter().map(|loc| layout.resolve(*loc));
        let hull =
            ranges.reduce(|hull, range| hull.start.min(range.start)..hull.end.max(range.end));
        hull.unwrap_or(0..0)
    }
}

/// All of a rank's own places at once: raw operands, so that a step can name several.
#[derive(Clone, Copy)]
struct Places<'a, T> {
    layout: &'a Layout,
    data: Target<'a, T>,
    input: Source<'a, T>,
    scratch: Target<'a, T>,
    slots: &'a [Slot],
    host: Option<&'a Host>,
}

impl<'a, T: Element> Places<'a, T> {
    fn source(&self, loc: Loc) -> Result<Source<'a, T>, Cause> {
        match (loc.peer, loc.buffer) {
            (None, Buffer::Input) => Ok(self.input.slice(self.layout.resolve(loc))),
            _ => Ok(self.target(loc)?.as_source()),
        }
    }

    fn target(&self, loc: Loc) -> Result<Target<'a, T>, Cause> {
        let range = self.layout.resolve(loc);
        let Some(peer) = loc.peer else {
            return Ok(match loc.buffer {
                Buffer::Data => self.data.slice(range),
                Buffer::Scratch(id) => {
                    let Some(slot) = self.slots.iter().find(|slot| slot.id == id) else {
                        unreachable!("the layout covers every slot that the schedule names");
                    };
                    let start = slot.at + range.start - slot.first;
                    self.scratch.slice(start..start + range.len())
                }
                Buffer::Slot => self.host().own_slot(range),
                Buffer::Input => unreachable!("no schedule writes to the input"),
            });
        };
        match loc.buffer {
            Buffer::Slot => self.host().slot_of(peer, range),
            Buffer::Data => self.host().data_of(peer, range),
            Buffer::Scratch(_) | Buffer::Input => {
                unreachable!("no schedule names a peer's private memory")
            }
        }
    }

    fn host(&self) -> &'a Host {
        let Some(host) = self.host else {
            unreachable!("shared memory is named only where there is some");
        };
        host
    }
}

impl<T: Element, D: AsMut<[T]> + AsRef<[T]>, I: AsRef<[T]>> Buffers<T, D, I> {
    /// Buffers of a call that has not begun.
    pub(crate) fn new(op: Combine<T>, data: D, input: I) -> Buffers<T, D, I> {
        Buffers { op, contributions: 0, layout: None, data, input, scratch: Scratch::default() }
    }

    /// Lays out the working memory that the call needs.
    pub(crate) fn lay_out(&mut self, plan: &Plan, pool: &mut Pool) {
        self.contributions = plan.schedule.contributions();
        self.layout = Some(plan.layout.clone());
        self.scratch = Scratch::new(plan, pool);
    }

    /// Gives the working memory back.
    pub(crate) fn release(&mut self, pool: &mut Pool) {
        if self.layout.take().is_some() {
            pool.0 = std::mem::take(&mut self.scratch).memory;
        }
    }

    pub(crate) fn op(&self) -> &Combine<T> {
        &self.op
    }

    /// The operator and both buffers.
    pub(crate) fn parts(&mut self) -> (&Combine<T>, &mut D, &mut I) {
        (&self.op, &mut self.data, &mut self.input)
    }

    fn layout(&self) -> &Layout {
        let Some(layout) = &self.layout else {
            unreachable!("memory is asked for after it was laid out");
        };
        layout
    }

    fn places<'a>(&'a mut self, host: Option<&'a Host>) -> (&'a Combine<T>, Places<'a, T>) {
        let Some(layout) = &self.layout else {
            unreachable!("memory is asked for after it was laid out");
        };
        let places = Places {
            layout,
            data: Target::from(self.data.as_mut()),
            input: Source::from(self.input.as_ref()),
            scratch: Target::from(bytemuck::cast_slice_mut(&mut self.scratch.memory)),
            slots: &self.scratch.slots,
            host,
        };
        (&self.op, places)
    }

    /// Where `loc` lies in the block of scratch, in elements.
    fn in_scratch(&self, id: usize, loc: Loc) -> std::ops::Range<usize> {
        let range = self.layout().resolve(loc);
        let Some(slot) = self.scratch.slots.iter().find(|slot| slot.id == id) else {
            unreachable!("the layout covers every slot that the schedule names");
        };
        let start = slot.at + range.start - slot.first;
        start..start + range.len()
    }
}

impl<T: Element, D: AsMut<[T]> + AsRef<[T]>, I: AsRef<[T]>> Memory for Buffers<T, D, I> {
    fn bytes(&self, loc: Loc) -> &[u8] {
        bytemuck::cast_slice(match loc.buffer {
            Buffer::Data => &self.data.as_ref()[self.layout().resolve(loc)],
            Buffer::Input => &self.input.as_ref()[self.layout().resolve(loc)],
            Buffer::Scratch(id) => {
                let range = self.in_scratch(id, loc);
                &bytemuck::cast_slice::<Word, T>(&self.scratch.memory)[range]
            }
            Buffer::Slot => unreachable!("messages never touch shared memory"),
        })
    }

    fn bytes_mut(&mut self, loc: Loc) -> &mut [u8] {
        bytemuck::cast_slice_mut(match loc.buffer {
            Buffer::Data => {
                let range = self.layout().resolve(loc);
                &mut self.data.as_mut()[range]
            }
            Buffer::Scratch(id) => {
                let range = self.in_scratch(id, loc);
                &mut bytemuck::cast_slice_mut::<Word, T>(&mut self.scratch.memory)[range]
            }
            Buffer::Input => unreachable!("no schedule writes to the input"),
            Buffer::Slot => unreachable!("messages never touch shared memory"),
        })
    }

    fn show(&mut self, layout: &Layout) {
        self.layout = Some(layout.clone());
        for slot in &mut self.scratch.slots {
            slot.first = slot.hull(layout).start;
        }
    }

    fn compute(&mut self, step: &Step, merges: &[usize], host: Option<&Host>) -> Result<(), Cause> {
        let ranks = self.contributions;
        let finish = |finish: bool| finish.then_some(ranks);
        let (op, places) = self.places(host);
        match step {
            Step::RecvReduce { dst, side, finish: last, .. } => {
                let arrived = places.source(Machine::staging(*dst))?;
                op.pair(places.target(*dst)?, arrived, *side, finish(*last))?;
            }
            Step::Reduce { dst, src, side, finish: last } => {
                op.pair(places.target(*dst)?, places.source(*src)?, *side, finish(*last))?;
            }
            Step::ReduceTree { dsts, srcs, finish: last } => {
                let into = dsts.iter().map(|dst| places.target(*dst));
                let from = srcs.iter().map(|(_, src)| places.source(*src));
                let combine = |into: &[_], from: &[_]| op.tree(into, from, merges, finish(*last));
                let nothing = Target::from(&mut [][..]);
                listed(nothing, into, |into| {
                    listed(nothing.as_source(), from, |from| combine(into, from))
                })?;
            }
            Step::Copy { dst, src } => match host {
                // Nobody else reads it. (What lies in a line is too short to be taken over.)
                Some(host)
                    if src.peer.is_some() && src.buffer == Buffer::Slot && host.is_pair() =>
                {
                    fetch(places.target(*dst)?, places.target(*src)?);
                }
                _ => copy(places.target(*dst)?, places.source(*src)?),
            },
            Step::Send { .. }
            | Step::Recv { .. }
            | Step::Flush { .. }
            | Step::Post
            | Step::Wait { .. } => unreachable!("these are the machine's business"),
        }
        Ok(())
    }
}

/// Up to this many operands are listed without asking for memory.
const FEW: usize = 8;

/// Hands a list of operands over.
fn listed<T: Copy, R>(
    empty: T,
    operands: impl ExactSizeIterator<Item = Result<T, Cause>>,
    with: impl FnOnce(&[T]) -> Result<R, Cause>,
) -> Result<R, Cause> {
    let len = operands.len();
    if len > FEW {
        return with(&operands.collect::<Result<Vec<T>, Cause>>()?);
    }
    let mut list = [empty; FEW];
    for (place, operand) in list.iter_mut().zip(operands) {
        *place = operand?;
    }
    with(&list[..len])
}

impl<T: Element> Combine<T> {
    /// Combines what has come into `dst`.
    fn pair(
        &self,
        dst: Target<'_, T>,
        incoming: Source<'_, T>,
        side: Side,
        finish: Option<usize>,
    ) -> Result<(), Cause> {
        let srcs = match side {
            Side::Left => [incoming, dst.as_source()],
            Side::Right => [dst.as_source(), incoming],
        };
        self.tree(&[dst], &srcs, &[0, 1], finish)
    }

    /// Combines all sources by a stack program. A function of the caller's may panic; then the
    /// operation fails as it does when a peer is lost, and nobody is left waiting.
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
                let combine = || reduce_tree_with(&**function, dsts, srcs, merges);
                catch_unwind(AssertUnwindSafe(combine)).map_err(|panic| Cause::Panicked {
                    text: format!("the operator {name:?}: {}", panic_text(&*panic)),
                })
            }
        }
    }
}
