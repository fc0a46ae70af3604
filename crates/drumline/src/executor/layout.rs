//! Which elements a schedule's symbolic places stand for.

use std::ops::Range;

use drumline_schedule::{
    Blocks, Collective, Counts, Schedule,
    step::{Buffer, Loc, Rank, Span},
};

/// The lengths of one call's buffers, and the window of them that is worked on.
///
/// Staging slots are small, so a long operation through shared memory is done piece by piece: the
/// schedule runs once for every window. A window is a window of every block, cut short where the
/// block ends. A block of a slot begins where it would if all were as long as the longest window,
/// so that neighbours find it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    collective: Collective,
    world_size: usize,
    rank: Rank,
    root: Rank,
    counts: Counts,
    /// Elements of the longest block.
    longest: usize,
    /// Blocks of a staging slot.
    slot_blocks: usize,
    /// The elements of each block that are worked on now.
    window: Range<usize>,
    /// The longest window.
    piece: usize,
}

impl Layout {
    /// The buffers of `schedule`'s rank; a staging slot has room for `slot` elements. `None` is for
    /// operations that stage nothing.
    pub(crate) fn new(schedule: &Schedule, counts: Counts, slot: Option<usize>) -> Layout {
        let Schedule { collective, world_size, rank, root, .. } = *schedule;
        let longest = counts.longest();
        let slot_blocks = match collective.blocks(Buffer::Slot, rank, root) {
            Blocks::All => world_size,
            Blocks::One | Blocks::None => 1,
        };
        let piece = slot.map_or(longest, |slot| longest.min((slot / slot_blocks).max(1)));
        let window = 0..piece;
        Layout { collective, world_size, rank, root, counts, longest, slot_blocks, window, piece }
    }

    /// The most elements that a staging slot has to hold.
    pub(super) fn slot_len(&self) -> usize {
        self.slot_blocks * self.piece
    }

    /// Goes on to the next window, if there is one.
    pub(crate) fn advance(&mut self) -> bool {
        let start = self.window.end;
        let more = start < self.longest;
        if more {
            self.window = start..self.longest.min(start + self.piece);
        }
        more
    }

    /// The same with its last window, which may be shorter than the others.
    pub(crate) fn last(&self) -> Layout {
        let start = self.longest.saturating_sub(1) / self.piece.max(1) * self.piece;
        Layout { window: start..self.longest, ..self.clone() }
    }

    /// The elements of its buffer that `loc` stands for. Scratch and slots hold one window.
    pub(crate) fn resolve(&self, loc: Loc) -> Range<usize> {
        let Loc { buffer, span, .. } = loc;
        let owner = loc.peer.unwrap_or(self.rank);
        let moved = |range: Range<usize>, by: usize| range.start + by..range.end + by;
        match (self.collective.blocks(buffer, owner, self.root), buffer) {
            (Blocks::None, _) => 0..0,
            (Blocks::One, Buffer::Scratch(_) | Buffer::Slot) => {
                span.resolve(self.shown(buffer, owner).len())
            }
            (Blocks::One, Buffer::Data | Buffer::Input) => {
                let shown = self.shown(buffer, owner);
                moved(span.resolve(shown.len()), shown.start)
            }
            (Blocks::All, Buffer::Data | Buffer::Input) if self.window.len() == self.longest => {
                self.counts.resolve_in_all(span, buffer, self.world_size)
            }
            _ if span.count == 0 => 0..0,
            // Staged algorithms name such blocks one by one.
            (Blocks::All, Buffer::Data | Buffer::Input) => {
                let block = Span::block(span.first, self.world_size);
                let start = self.counts.resolve_in_all(block, buffer, self.world_size).start;
                moved(self.shown(buffer, span.first), start)
            }
            (Blocks::All, Buffer::Slot | Buffer::Scratch(_)) => {
                let start = span.first * self.piece;
                start..start + self.shown(buffer, span.first).len()
            }
        }
    }

    /// The elements of that block that the window shows.
    fn shown(&self, buffer: Buffer, block: Rank) -> Range<usize> {
        let len = self.counts.block(buffer, block);
        self.window.start.min(len)..self.window.end.min(len)
    }

    /// How many elements `loc` stands for.
    pub(crate) fn len(&self, loc: Loc) -> usize {
        self.resolve(loc).len()
    }
}

#[cfg(test)]
mod tests {
    use drumline_schedule::{ALGORITHMS, Algorithm, Borders, MemoryUse, Topology};
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The windows of a place tile what it is as a whole, and what neighbours find in a slot is
        /// what its owner put there, and fits.
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
                    let mut layout = Layout::new(&schedule, counts.clone(), Some(slot));
                    let blocks = match schedule.collective.blocks(Buffer::Slot, 0, root) {
                        Blocks::All => world_size,
                        _ => 1,
                    };
                    let mut seen = Vec::new();
                    loop {
                        let range = layout.resolve(loc);
                        if loc.buffer == Buffer::Slot {
                            prop_assert!(range.end <= slot.max(blocks), "beyond the slot");
                            let owner = loc.peer.unwrap_or(schedule.rank);
                            let of_owner = Layout { rank: owner, ..layout.clone() };
                            prop_assert_eq!(&of_owner.resolve(Loc { peer: None, ..loc }), &range);
                        }
                        seen.extend(range);
                        if !layout.advance() {
                            break;
                        }
                    }
                    let cut = loc.span.of != 1 && schedule.blocks(loc) == Blocks::One;
                    if matches!(loc.buffer, Buffer::Data | Buffer::Input) && !cut {
                        prop_assert_eq!(seen, whole.resolve(loc).collect::<Vec<_>>());
                    }
                }
            }
        }
    }
}
