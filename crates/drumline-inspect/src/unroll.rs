//! Pipelines as schedules without windows.

use drumline_schedule::step::{Buffer, Loc, Rank, Span, Step};
use drumline_schedule::{Blocks, Pipeline, Schedule, Topology};

/// A schedule without windows that does the same as `schedule` in a pipeline of `windows` windows. The data
/// must be divisible into this number of equal parts. The checker uses it to prove pipelines.
pub fn unrolled(topology: &Topology, schedule: &Schedule, windows: usize) -> Schedule {
    let pipeline = Pipeline::of(schedule);
    let copies = pipeline.scratch_copies();
    let slots = SlotUse::InTurn;
    Unrolling { topology, schedule, pipeline: &pipeline, copies, slots, windows }.schedule()
}

/// How turns use the slots of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotUse {
    /// Turns use two slots in turn.
    InTurn,
    /// Two ranks that are alone on their host swap slots from one turn to the next. Other ranks have two.
    Exchanged,
}

/// A pipeline, and the memory that its windows use.
pub(crate) struct Unrolling<'a> {
    pub(crate) topology: &'a Topology,
    pub(crate) schedule: &'a Schedule,
    pub(crate) pipeline: &'a Pipeline,
    /// The number of windows that have scratch of their own.
    pub(crate) copies: usize,
    pub(crate) slots: SlotUse,
    /// The number of windows. Slots of both turns must have room among them.
    pub(crate) windows: usize,
}

impl Unrolling<'_> {
    pub(crate) fn schedule(&self) -> Schedule {
        let turns = 0..self.pipeline.turns(self.windows);
        let steps = turns.flat_map(|turn| self.entry(turn).chain(self.turn(turn)));
        // The new steps name parts of blocks.
        Schedule { steps: steps.collect(), uneven: false, ..self.schedule.clone() }
    }

    /// The rule of entry: all neighbours have posted in the turn before.
    fn entry(&self, turn: usize) -> impl Iterator<Item = Step> {
        let posts = self.schedule.posts();
        let upto = turn.checked_sub(1).filter(|_| posts > 0).map(|before| before * posts + 1);
        let neighbours = self.topology.neighbours(self.schedule.rank).iter();
        let peers = neighbours.copied().filter(|peer| *peer != self.schedule.rank);
        upto.into_iter()
            .flat_map(move |upto| peers.clone().map(move |peer| Step::Wait { peer, upto }))
    }

    fn turn(&self, turn: usize) -> impl Iterator<Item = Step> {
        let posts = self.schedule.posts();
        self.schedule.steps.iter().enumerate().filter_map(move |(index, step)| {
            match *step {
                Step::Post => return Some(Step::Post),
                Step::Wait { peer, upto } => {
                    return Some(Step::Wait { peer, upto: turn * posts + upto });
                }
                _ => {}
            }
            let window =
                turn.checked_sub(self.pipeline.lag(index)).filter(|it| *it < self.windows)?;
            Some(match *step {
                Step::Flush { to, upto } => {
                    let upto = self.pipeline.posted(self.schedule, to, upto, window, self.windows);
                    Step::Flush { to, upto }
                }
                _ => step.clone().moved(|rank| rank, |loc| self.within(loc, turn, window)),
            })
        })
    }

    /// A place in one window, as a place in the whole. Windows take turns in using the copies of scratch.
    fn within(&self, loc: Loc, turn: usize, window: usize) -> Loc {
        let Unrolling { schedule, copies, windows, .. } = *self;
        let (peer, place) = match loc.buffer {
            Buffer::Slot => self.place(loc.peer, turn, window),
            _ => (loc.peer, window),
        };
        let Span { first, count, of } = loc.span;
        let first = match (loc.buffer, schedule.blocks(loc)) {
            (Buffer::Scratch(_) | Buffer::Sum(_), _) => first,
            (Buffer::Slot, Blocks::All) => self.shelf(loc, first) * windows + place,
            // A window of every block.
            (_, Blocks::All) => first * windows + place,
            (_, Blocks::One | Blocks::None) => place * of + first,
        };
        let buffer = match loc.buffer {
            Buffer::Scratch(slot) => Buffer::Scratch(slot * copies + window % copies),
            Buffer::Sum(slot) => Buffer::Sum(slot * copies + window % copies),
            other => other,
        };
        Loc { peer, buffer, span: Span { first, count, of: of * windows } }
    }

    /// The owner of the memory that is `peer`'s slot in a turn, and the place of a window there.
    fn place(&self, peer: Option<Rank>, turn: usize, window: usize) -> (Option<Rank>, usize) {
        let slot_windows = self.schedule.lags.slot_windows;
        let in_slot = window % slot_windows;
        let rank = self.schedule.rank;
        match (self.slots, self.topology.neighbours(rank)) {
            (SlotUse::Exchanged, &[a, b]) => {
                let other = a + b - peer.unwrap_or(rank);
                let swapped = (other != rank).then_some(other);
                (if turn % 2 == 1 { swapped } else { peer }, in_slot)
            }
            _ => (peer, turn % 2 * slot_windows + in_slot),
        }
    }

    /// Where a block lies, if slots have no more shelves than there are blocks.
    fn shelf(&self, loc: Loc, block: Rank) -> usize {
        let Schedule { shelves, world_size, rank, .. } = self.schedule;
        match shelves.count(*world_size) <= *world_size {
            true => shelves.of(loc.peer.unwrap_or(*rank), block, *world_size),
            false => block,
        }
    }
}
