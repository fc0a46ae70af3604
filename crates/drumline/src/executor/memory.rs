//! The buffers of one operation, by the names that a schedule gives them.

use std::{
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
};

use drumline_kernels::{Element, Source, Target, copy, reduce_tree, reduce_tree_with};
use drumline_schedule::{
    Pipeline, Schedule,
    step::{Buffer, Loc, Side, Step},
    tree::{Node, merges},
};

use super::{
    layout::{Layout, Place},
    machine::Machine,
};
use crate::{error::Cause, host::Host, operator::Combine, work::panic_text};

/// Bytes for a transport, and local steps for the executor; the element type is hidden.
pub(crate) trait Memory {
    fn bytes(&self, place: Place) -> &[u8];
    fn bytes_mut(&mut self, place: Place) -> &mut [u8];
    /// Carries out a step other than a message, in a window. Places of peers lie in `host`.
    fn compute(&mut self, step: &Step, window: usize, host: Option<&Host>) -> Result<(), Cause>;
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
    layout: Layout,
    data: D,
    input: I,
    scratch: Scratch,
}

/// The parts of all scratch slots that a schedule names, behind each other in one block.
#[derive(Debug)]
struct Scratch {
    slots: Slots,
    memory: Block,
}

/// Where they lie: behind each other, once for every window that needs its own at a time.
#[derive(Debug)]
struct Slots {
    slots: Vec<Slot>,
    copies: usize,
    /// What one of them takes, in elements.
    stride: usize,
}

#[derive(Debug)]
struct Slot {
    id: usize,
    /// What the schedule names of it.
    places: Vec<Loc>,
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
    /// Room for what `schedule` names, in any window. It holds left-overs.
    fn new<T: Element>(schedule: &Schedule, layout: &Layout, pool: &mut Pool) -> Scratch {
        let staging = schedule.steps.iter().filter_map(|step| match step {
            Step::RecvReduce { dst, .. } => Some(Machine::staging(*dst)),
            _ => None,
        });
        let named = schedule.steps.iter().flat_map(|step| step.reads().chain(step.writes()));
        let mut slots: Vec<Slot> = Vec::new();
        for loc in named.chain(staging) {
            let Buffer::Scratch(id) = loc.buffer else { continue };
            match slots.iter_mut().find(|slot| slot.id == id) {
                Some(slot) => slot.places.push(loc),
                None => slots.push(Slot { id, places: vec![loc], at: 0 }),
            }
        }
        let mut end = 0;
        let windows = layout.windows();
        for slot in &mut slots {
            slot.at = end;
            // In a shorter window, borders of blocks may lie further apart by one.
            let len = slot.hull(layout, 0).len().max(slot.hull(layout, windows - 1).len());
            // Slots begin on cache lines of their own.
            end += (len * size_of::<T>()).next_multiple_of(64) / size_of::<T>();
        }
        let copies = Pipeline::of(schedule).scratch_copies().min(windows);
        let mut memory = std::mem::take(&mut pool.0);
        let words = (copies * end * size_of::<T>()).div_ceil(size_of::<Word>());
        if memory.len() < words {
            memory.resize(words, [0; 2]);
        }
        Scratch { slots: Slots { slots, copies, stride: end }, memory }
    }
}

impl Slots {
    /// Where a place of slot `id` lies in the block, in elements.
    fn resolve(&self, id: usize, place: Place, layout: &Layout) -> Range<usize> {
        let Some(slot) = self.slots.iter().find(|slot| slot.id == id) else {
            unreachable!("the layout covers every slot that the schedule names");
        };
        let range = layout.resolve(place);
        let copy = place.window % self.copies * self.stride;
        let start = copy + slot.at + range.start - slot.hull(layout, place.window).start;
        start..start + range.len()
    }
}

impl Slot {
    /// The elements of the slot that the schedule names, in a window.
    fn hull(&self, layout: &Layout, window: usize) -> Range<usize> {
        let ranges = self.places.iter().map(|&loc| layout.resolve(Place { loc, window }));
        let hull =
            ranges.reduce(|hull, range| hull.start.min(range.start)..hull.end.max(range.end));
        hull.unwrap_or(0..0)
    }
}

/// All of a rank's own places at once: raw operands, so that a step can name several.
#[derive(Clone, Copy)]
struct Places<'a, T> {
    layout: &'a Layout,
    window: usize,
    data: Target<'a, T>,
    input: Source<'a, T>,
    scratch: Target<'a, T>,
    slots: &'a Slots,
    host: Option<&'a Host>,
}

impl<'a, T: Element> Places<'a, T> {
    fn source(&self, loc: Loc) -> Result<Source<'a, T>, Cause> {
        match (loc.peer, loc.buffer) {
            (None, Buffer::Input) => {
                let place = Place { loc, window: self.window };
                Ok(self.input.slice(self.layout.resolve(place)))
            }
            _ => Ok(self.target(loc)?.as_source()),
        }
    }

    fn target(&self, loc: Loc) -> Result<Target<'a, T>, Cause> {
        let place = Place { loc, window: self.window };
        let range = self.layout.resolve(place);
        let Some(peer) = loc.peer else {
            return Ok(match loc.buffer {
                Buffer::Data => self.data.slice(range),
                Buffer::Scratch(id) => {
                    self.scratch.slice(self.slots.resolve(id, place, self.layout))
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
    /// Lays out the working memory that `schedule` needs.
    pub(crate) fn new(
        schedule: &Schedule,
        layout: Layout,
        op: Combine<T>,
        data: D,
        input: I,
        pool: &mut Pool,
    ) -> Buffers<T, D, I> {
        let scratch = Scratch::new::<T>(schedule, &layout, pool);
        let contributions = schedule.contributions();
        Buffers { op, contributions, layout, data, input, scratch }
    }

    /// Gives the working memory back, and the caller's.
    pub(crate) fn recycle(self, pool: &mut Pool) -> (D, I) {
        pool.0 = self.scratch.memory;
        (self.data, self.input)
    }

    pub(crate) fn data(&self) -> &D {
        &self.data
    }

    fn places<'a>(&'a mut self, window: usize, host: Option<&'a Host>) -> Places<'a, T> {
        Places {
            layout: &self.layout,
            window,
            data: Target::from(self.data.as_mut()),
            input: Source::from(self.input.as_ref()),
            scratch: Target::from(bytemuck::cast_slice_mut(&mut self.scratch.memory)),
            slots: &self.scratch.slots,
            host,
        }
    }
}

impl<T: Element, D: AsMut<[T]> + AsRef<[T]>, I: AsRef<[T]>> Memory for Buffers<T, D, I> {
    fn bytes(&self, place: Place) -> &[u8] {
        bytemuck::cast_slice(match place.loc.buffer {
            Buffer::Data => &self.data.as_ref()[self.layout.resolve(place)],
            Buffer::Input => &self.input.as_ref()[self.layout.resolve(place)],
            Buffer::Scratch(id) => {
                let range = self.scratch.slots.resolve(id, place, &self.layout);
                &bytemuck::cast_slice::<Word, T>(&self.scratch.memory)[range]
            }
            Buffer::Slot => unreachable!("messages never touch shared memory"),
        })
    }

    fn bytes_mut(&mut self, place: Place) -> &mut [u8] {
        bytemuck::cast_slice_mut(match place.loc.buffer {
            Buffer::Data => &mut self.data.as_mut()[self.layout.resolve(place)],
            Buffer::Scratch(id) => {
                let range = self.scratch.slots.resolve(id, place, &self.layout);
                &mut bytemuck::cast_slice_mut::<Word, T>(&mut self.scratch.memory)[range]
            }
            Buffer::Input => unreachable!("no schedule writes to the input"),
            Buffer::Slot => unreachable!("messages never touch shared memory"),
        })
    }

    fn compute(&mut self, step: &Step, window: usize, host: Option<&Host>) -> Result<(), Cause> {
        let (op, ranks) = (self.op.clone(), self.contributions);
        let finish = |finish: bool| finish.then_some(ranks);
        let places = self.places(window, host);
        match step {
            Step::RecvReduce { dst, side, finish: last, .. } => {
                let arrived = places.source(Machine::staging(*dst))?;
                op.pair(places.target(*dst)?, arrived, *side, finish(*last))?;
            }
            Step::Reduce { dst, src, side, finish: last } => {
                op.pair(places.target(*dst)?, places.source(*src)?, *side, finish(*last))?;
            }
            Step::ReduceTree { dsts, srcs, finish: last } => {
                let into: Vec<_> =
                    dsts.iter().map(|dst| places.target(*dst)).collect::<Result<_, _>>()?;
                let from: Vec<_> =
                    srcs.iter().map(|(_, src)| places.source(*src)).collect::<Result<_, _>>()?;
                op.tree(&into, &from, &tree_of(srcs), finish(*last))?;
            }
            Step::Copy { dst, src } => copy(places.target(*dst)?, places.source(*src)?),
            Step::Send { .. }
            | Step::Recv { .. }
            | Step::Flush { .. }
            | Step::Post
            | Step::Wait { .. } => unreachable!("these are the machine's business"),
        }
        Ok(())
    }
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

/// The stack program that sums `srcs`.
fn tree_of(srcs: &[(Node, Loc)]) -> Vec<usize> {
    let nodes: Vec<Node> = srcs.iter().map(|(node, _)| *node).collect();
    let root = Node { lo: nodes[0].lo, len: nodes.iter().map(|node| node.len).sum() };
    let Some(merges) = merges(root, &nodes) else {
        unreachable!("the inputs of a ReduceTree tile a node");
    };
    merges
}
