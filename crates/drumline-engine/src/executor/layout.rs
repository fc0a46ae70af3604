//! Finds the elements that the symbolic places of a schedule stand for.

use std::ops::Range;

use drumline_schedule::{
    Blocks, Collective, Counts, Schedule, Shelves,
    step::{Buffer, Loc, Rank, Span},
};

/// The lengths of one call's buffers, and the windows in which the call works on them.
///
/// Staging slots are small, so a long call through shared memory runs its schedule once for each window. So
/// does a long call over links: it works on data that has arrived while the data is in the cache. A window
/// covers a part of every block. Where a block is shorter than the window, the window ends with the block.
///
/// In a slot, blocks begin at multiples of the longest window's length, so that neighbours find them:
/// [`Shelves`] says at which.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    collective: Collective,
    world_size: usize,
    rank: Rank,
    root: Rank,
    counts: Counts,
    /// The number of elements in the longest block.
    longest: usize,
    /// The number of elements of each block in a window. The last window may have fewer.
    piece: usize,
    /// The largest such number if there are several windows.
    several: usize,
    /// Where blocks lie in a staging slot.
    shelves: Shelves,
    /// The number of blocks of a window for which it has room.
    slot_blocks: usize,
    /// The number of windows for which it has room.
    slot_windows: usize,
}

/// A place that a schedule names, in one window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub loc: Loc,
    pub window: usize,
}

/// Bytes of one of this rank's own buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    pub(crate) buffer: Buffer,
    pub(crate) first: usize,
    pub(crate) len: usize,
}

impl Stretch {
    pub(crate) fn range(self) -> Range<usize> {
        self.first..self.first + self.len
    }
}

impl Layout {
    /// The layout of the buffers of `schedule`'s rank. A staging slot has room for `slot` elements; `None`
    /// for calls that stage nothing.
    pub fn new(schedule: &Schedule, counts: Counts, slot: Option<usize>) -> Layout {
        let Schedule { collective, world_size, rank, root, .. } = *schedule;
        let longest = counts.longest();
        let slot_windows = schedule.lags.slot_windows;
        let fits = |windows| slot.map_or(usize::MAX, |slot| schedule.window(slot / windows));
        let layout = Layout {
            collective,
            world_size,
            rank,
            root,
            counts,
            longest,
            piece: longest,
            several: fits(slot_windows),
            shelves: schedule.shelves.clone(),
            slot_blocks: schedule.slot_blocks(),
            slot_windows,
        };
        layout.within(fits(1))
    }

    /// The same layout in one window, if it has at most `elements` elements of each block, and otherwise in several
    /// windows that are no longer.
    pub fn within(self, elements: usize) -> Layout {
        match self.piece <= elements {
            true => self,
            false => Layout { piece: elements.min(self.several).max(1), ..self },
        }
    }

    /// The same layout in windows of `elements` elements of each block, at least one.
    pub fn in_windows_of(self, elements: usize) -> Layout {
        Layout { piece: self.longest.min(elements.max(1)), ..self }
    }

    /// The number of elements that a staging slot must hold.
    pub(crate) fn slot_len(&self) -> usize {
        self.slot_blocks * self.piece * self.windows_in_slot()
    }

    /// One window needs no place beside others.
    fn windows_in_slot(&self) -> usize {
        self.windows().min(self.slot_windows)
    }

    /// The number of windows, at least one.
    pub fn windows(&self) -> usize {
        self.longest.div_ceil(self.piece.max(1)).max(1)
    }

    /// The elements of its buffer that a place stands for. Scratch memory and slots hold one window.
    pub fn resolve(&self, Place { loc, window }: Place) -> Range<usize> {
        let Loc { buffer, span, .. } = loc;
        let owner = loc.peer.unwrap_or(self.rank);
        let moved = |range: Range<usize>, by: usize| range.start + by..range.end + by;
        // Where the window begins in a slot.
        let in_slot = || window % self.slot_windows * self.slot_blocks * self.piece;
        match (self.collective.blocks(buffer, owner, self.root), buffer) {
            (Blocks::None, _) => 0..0,
            (Blocks::One, Buffer::Scratch(_) | Buffer::Sum(_)) => {
                span.resolve(self.shown(buffer, owner, window).len())
            }
            (Blocks::One, Buffer::Slot) => {
                moved(span.resolve(self.shown(buffer, owner, window).len()), in_slot())
            }
            (Blocks::One, Buffer::Data | Buffer::Input) => {
                let shown = self.shown(buffer, owner, window);
                moved(span.resolve(shown.len()), shown.start)
            }
            (Blocks::All, Buffer::Data | Buffer::Input) if self.piece == self.longest => {
                self.counts.resolve_in_all(span, buffer, self.world_size)
            }
            _ if span.count == 0 => 0..0,
            // Algorithms that stage name such blocks one by one.
            (Blocks::All, Buffer::Data | Buffer::Input) => {
                let block = Span::block(span.first, self.world_size);
                let start = self.counts.resolve_in_all(block, buffer, self.world_size).start;
                moved(self.shown(buffer, span.first, window), start)
            }
            (Blocks::All, Buffer::Scratch(_) | Buffer::Sum(_)) => {
                0..self.shown(buffer, span.first, window).len()
            }
            (Blocks::All, Buffer::Slot) => {
                let shelf = self.shelves.of(owner, span.first, self.world_size);
                let start = in_slot() + shelf * self.piece;
                moved(0..self.shown(buffer, span.first, window).len(), start)
            }
        }
    }

    /// The elements of a block that a window covers.
    fn shown(&self, buffer: Buffer, block: Rank, window: usize) -> Range<usize> {
        let len = self.counts.block(buffer, block);
        let border = |window: usize| window.saturating_mul(self.piece).min(len);
        border(window)..border(window + 1)
    }

    /// The number of elements in this rank's buffers together.
    pub(crate) fn buffers_len(&self) -> usize {
        let len = |buffer| match self.collective.blocks(buffer, self.rank, self.root) {
            Blocks::None => 0,
            Blocks::One => self.counts.block(buffer, self.rank),
            Blocks::All => self.counts.resolve_in_all(Span::WHOLE, buffer, self.world_size).len(),
        };
        len(Buffer::Data) + len(Buffer::Input)
    }
}

#[cfg(test)]
mod tests {
    use drumline_schedule::{
        ALGORITHMS, Algorithm, Borders, MemoryUse, SumOrder, Topology, step::Step,
    };
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn of_two_ranks_each_lays_out_where_it_has_read() {
        let topology = Topology::hosts(&[2]);
        for collective in [Collective::AllGather, Collective::ReduceScatter, Collective::AllToAll] {
            let row = Algorithm::find(collective, "shm").unwrap();
            for schedule in row.schedules(&topology, 0).unwrap() {
                let layout = Layout::new(&schedule, Counts::Even(24), Some(32));
                let in_slots = |locs: Vec<Loc>| -> Vec<Range<usize>> {
                    let slots = locs.into_iter().filter(|loc| loc.buffer == Buffer::Slot);
                    slots.map(|loc| layout.resolve(Place { loc, window: 0 })).collect()
                };
                let laid_out = in_slots(schedule.steps.iter().flat_map(Step::writes).collect());
                let read = in_slots(schedule.steps.iter().flat_map(Step::reads).collect());
                assert_eq!((laid_out.len(), &laid_out), (1, &read), "{collective}");
            }
        }
    }

    proptest! {
        /// The windows of a place cover the whole place, without gap or overlap. What a neighbour reads in a
        /// slot is what the owner wrote there, and it fits.
        #[test]
        fn pieces_tile_the_buffers(
            row: prop::sample::Index, root: prop::sample::Index, slot in 1_usize..64,
            counts in prop::collection::vec(0_usize..40, 2..6), even: bool,
        ) {
            let world_size = counts.len();
            let staged = |row: &&Algorithm| {
                row.memory == MemoryUse::Staged
                    && (row.applies)(&Topology::hosts(&[world_size]))
                    && (even || row.uneven)
            };
            let rows: Vec<&Algorithm> = ALGORITHMS.iter().filter(staged).collect();
            let (row, root) = (rows[row.index(rows.len())], root.index(world_size));
            let counts = match even {
                true => Counts::Even(counts[0]),
                false => Counts::ByRank(Borders::new(&counts).unwrap()),
            };
            for schedule in row.schedules(&Topology::hosts(&[world_size]), root).unwrap() {
                let whole = Layout::new(&schedule, counts.clone(), None);
                for loc in schedule.steps.iter().flat_map(|step| step.reads().chain(step.writes())) {
                    let layout = Layout::new(&schedule, counts.clone(), Some(slot));
                    let blocks = match schedule.collective.blocks(Buffer::Slot, 0, root) {
                        Blocks::All => world_size,
                        _ => 1,
                    };
                    let mut seen = Vec::new();
                    for window in 0..layout.windows() {
                        let range = layout.resolve(Place { loc, window });
                        if loc.buffer == Buffer::Slot {
                            prop_assert!(range.end <= slot.max(blocks), "beyond the slot");
                            let owner = loc.peer.unwrap_or(schedule.rank);
                            let of_owner = Layout { rank: owner, ..layout.clone() };
                            let own = Place { loc: Loc { peer: None, ..loc }, window };
                            prop_assert_eq!(&of_owner.resolve(own), &range);
                        }
                        seen.extend(range);
                    }
                    let cut = loc.span.of != 1 && schedule.blocks(loc) == Blocks::One;
                    if matches!(loc.buffer, Buffer::Data | Buffer::Input) && !cut {
                        prop_assert_eq!(seen, whole.resolve(Place { loc, window: 0 }).collect::<Vec<_>>());
                    }
                }
            }
        }
    }

    /// Windows that are under way at once lie apart in a slot, also the last one, which is shorter.
    #[test]
    fn windows_lie_apart_in_slots() {
        let topology = Topology::hosts(&[3, 3]).with_order(SumOrder::Placement);
        let row = Algorithm::find(Collective::AllReduce, "hierarchical").unwrap();
        for schedule in row.schedules(&topology, 0).unwrap() {
            let layout = Layout::new(&schedule, Counts::Even(1_000), Some(30));
            assert!(layout.slot_len() <= 30 && layout.windows() >= 100);
            let place = |window| layout.resolve(Place { loc: Loc::slot(Span::WHOLE), window });
            let apart = |a: Range<usize>, b: Range<usize>| a.end <= b.start || b.end <= a.start;
            for window in 2..layout.windows() {
                let (summed, shared_out) = (place(window), place(window - 2));
                assert!(apart(summed, shared_out), "window {window}");
            }
        }
    }
}
