//! Where the working memory of a call lies.

use std::ops::Range;

use drumline_schedule::{
    Schedule,
    step::{Buffer, Loc, Step},
};

use super::layout::{Layout, Place};

/// The place for a message that is to be combined into `dst`: a scratch slot that no algorithm uses.
///
/// The message is received whole and then combined. Combining it while it arrives would save one pass over
/// memory.
pub(crate) fn staging(dst: Loc) -> Loc {
    Loc::scratch(usize::MAX, dst.span)
}

/// The working memory of a call, in elements: the parts of all scratch slots that a schedule names, one after
/// the other. A pipeline needs one copy for each window that is under way.
#[derive(Debug)]
pub(crate) struct Scratch {
    slots: Vec<Slot>,
    copies: usize,
    /// The number of elements in one copy.
    stride: usize,
}

#[derive(Debug)]
struct Slot {
    id: usize,
    /// The places in this slot that the schedule names.
    places: Vec<Loc>,
    /// The first element of the slot that has memory, in the first window.
    first: usize,
    /// The position of that element in a copy.
    at: usize,
}

impl Scratch {
    /// Working memory for all places that `schedule` names, in any window: those for sums, or all others. `copies`
    /// windows are under way at once.
    pub(crate) fn new(
        schedule: &Schedule,
        layout: &Layout,
        copies: usize,
        element_bytes: usize,
        for_sums: bool,
    ) -> Scratch {
        let staging = schedule.steps.iter().filter_map(|step| match step {
            Step::RecvReduce { dst, .. } => Some(staging(*dst)),
            _ => None,
        });
        let named = schedule.steps.iter().flat_map(|step| step.reads().chain(step.writes()));
        let mut slots: Vec<Slot> = Vec::new();
        for loc in named.chain(staging).filter(|loc| loc.is_wide() == for_sums) {
            let (Buffer::Scratch(id) | Buffer::Sum(id)) = loc.buffer else { continue };
            match slots.iter_mut().find(|slot| slot.id == id) {
                Some(slot) => slot.places.push(loc),
                None => slots.push(Slot { id, places: vec![loc], first: 0, at: 0 }),
            }
        }
        let windows = layout.windows();
        let mut stride = 0;
        for slot in &mut slots {
            let hull = slot.hull(layout, 0);
            (slot.first, slot.at) = (hull.start, stride);
            // Rounding may put the borders of blocks one element further apart in a shorter window.
            let len = hull.len() + usize::from(windows > 1);
            // Slots begin on cache lines of their own.
            stride += (len * element_bytes).next_multiple_of(64) / element_bytes;
        }
        Scratch { slots, copies: copies.min(windows), stride }
    }

    /// The number of elements in all copies.
    pub(crate) fn len(&self) -> usize {
        self.copies * self.stride
    }

    /// Where a place of slot `id` lies in the block.
    pub(crate) fn resolve(&self, id: usize, place: Place, layout: &Layout) -> Range<usize> {
        let Some(slot) = self.slots.iter().find(|slot| slot.id == id) else {
            unreachable!("the layout covers every slot that the schedule names");
        };
        let range = layout.resolve(place);
        let first = match place.window {
            0 => slot.first,
            window => slot.hull(layout, window).start,
        };
        let copy = place.window % self.copies * self.stride;
        let start = copy + slot.at + range.start - first;
        start..start + range.len()
    }
}

impl Slot {
    /// The smallest range of the slot that contains all places named in a window.
    fn hull(&self, layout: &Layout, window: usize) -> Range<usize> {
        let ranges = self.places.iter().map(|&loc| layout.resolve(Place { loc, window }));
        let hull =
            ranges.reduce(|hull, range| hull.start.min(range.start)..hull.end.max(range.end));
        hull.unwrap_or(0..0)
    }
}

#[cfg(test)]
mod tests {
    use drumline_schedule::{
        ALGORITHMS, Algorithm, Borders, Counts, MemoryUse, Pipeline, Topology,
    };
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The parts of a slot that the schedule names overlap no other slot, in any window.
        #[test]
        fn slots_lie_apart(
            row: prop::sample::Index, root: prop::sample::Index, piece in 1_usize..40,
            counts in prop::collection::vec(0_usize..40, 2..6), even: bool,
        ) {
            // Each element fills a cache line, so padding can hide no overlap.
            const ELEMENT_BYTES: usize = 64;
            let topology = Topology::hosts(&[counts.len()]);
            let in_windows = |row: &&Algorithm| {
                (row.applies)(&topology) && (even || row.uneven) && {
                    let schedule = row.schedule(&topology, 0, 0).unwrap();
                    row.memory == MemoryUse::Staged || schedule.is_pipelined()
                }
            };
            let rows: Vec<&Algorithm> = ALGORITHMS.iter().filter(in_windows).collect();
            let (row, root) = (rows[row.index(rows.len())], root.index(counts.len()));
            let counts = match even {
                true => Counts::Even(counts[0]),
                false => Counts::ByRank(Borders::new(&counts).unwrap()),
            };
            for schedule in row.schedules(&topology, root).unwrap() {
                let layout = Layout::new(&schedule, counts.clone(), None).in_windows_of(piece);
                let copies = Pipeline::of(&schedule).scratch_copies();
                let scratch = Scratch::new(&schedule, &layout, copies, ELEMENT_BYTES, false);
                let ends = scratch.slots.iter().skip(1).map(|slot| slot.at).chain([scratch.stride]);
                for (slot, end) in scratch.slots.iter().zip(ends) {
                    for window in 0..layout.windows() {
                        let copy = window % copies * scratch.stride;
                        for &loc in &slot.places {
                            let place = Place { loc, window };
                            let range = scratch.resolve(slot.id, place, &layout);
                            prop_assert_eq!(range.len(), layout.resolve(place).len());
                            prop_assert!(copy + slot.at <= range.start && range.end <= copy + end);
                            prop_assert!(range.end <= scratch.len());
                        }
                    }
                }
            }
        }
    }
}
