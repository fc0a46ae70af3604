//! A call laid out.

use std::{ops::Range, sync::Arc};

use drumline_schedule::{
    Collective, Counts, MemoryUse, Pipeline, Schedule,
    step::{Buffer, Loc, Step},
    tree::{Node, merges},
};
use drumline_shm::PAYLOAD_BYTES;

use super::{
    layout::{Layout, Place},
    message::Description,
    scratch::Scratch,
};

/// Everything that follows from the shape of a call: worked out when a group first makes such a
/// call, and kept. What is left for each call is in the [`Machine`](super::Machine) and in the caller's buffers.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) schedule: Arc<Schedule>,
    /// As the call is told to peers: of call number 0.
    description: Description,
    digest: u64,
    pub(super) layout: Layout,
    pub(super) windows: usize,
    pub(super) pipeline: Pipeline,
    pub(super) element_bytes: usize,
    /// Whether narrow floats are widened for the whole operation.
    pub(crate) wide: bool,
    /// Whether peers reach the caller's data.
    pub(crate) registered: bool,
    /// How often the schedule posts.
    pub(super) posts: u64,
    pub(super) uses_messages: bool,
    /// Bytes of a slot that a piece takes.
    slot_bytes: usize,
    /// Bytes of a slot in which pieces lie behind each other; 0 if all begin where the slot does.
    slot_room: usize,
    /// Whether slots are so short that they lie in the lines of announcements.
    pub(super) in_line: bool,
    /// Whether this rank gets a result.
    pub(crate) writes: bool,
    /// How many ranks have a part in what is finished.
    pub(super) contributions: usize,
    /// For each step that combines many inputs, how: a stack program. Empty for the others.
    merges: Vec<Vec<usize>>,
    scratch: Scratch,
}

/// What a [`Plan`] is made of.
#[derive(Debug)]
pub(crate) struct Shape {
    pub(crate) schedule: Arc<Schedule>,
    pub(crate) description: Description,
    pub(crate) layout: Layout,
    /// Bytes of a staging slot.
    pub(crate) slot_room: usize,
    /// Bytes of the elements that travel.
    pub(crate) element_bytes: usize,
    pub(crate) wide: bool,
}

impl Plan {
    pub(crate) fn new(shape: Shape) -> Plan {
        let Shape { schedule, description, layout, slot_room, element_bytes, wide } = shape;
        let windows = layout.windows();
        let pipeline = if windows > 1 { Pipeline::of(&schedule) } else { Pipeline::default() };
        let is_data = |loc: Loc| loc.buffer == Buffer::Data;
        let slot_bytes = layout.slot_len() * element_bytes;
        let in_line = schedule.memory == MemoryUse::Staged && slot_bytes <= PAYLOAD_BYTES;
        Plan {
            description,
            digest: description.digest(),
            element_bytes,
            wide,
            registered: schedule.memory == MemoryUse::Registered,
            posts: schedule.posts() as u64,
            uses_messages: schedule.uses_messages(),
            slot_bytes,
            slot_room: if schedule.collective.has_root() && !in_line { slot_room } else { 0 },
            in_line,
            writes: schedule.steps.iter().any(|step| step.writes().any(is_data)),
            contributions: schedule.contributions(),
            merges: schedule.steps.iter().map(merges_of).collect(),
            scratch: Scratch::new(&schedule, &layout, pipeline.scratch_copies(), element_bytes),
            layout,
            windows,
            pipeline,
            schedule,
        }
    }

    /// The plan of doing nothing.
    pub(super) fn idle() -> Plan {
        let schedule = Schedule {
            collective: Collective::Barrier,
            algorithm: "none",
            world_size: 1,
            rank: 0,
            root: 0,
            memory: MemoryUse::Private,
            uneven: false,
            steps: Vec::new(),
        };
        Plan::new(Shape {
            layout: Layout::new(&schedule, Counts::Even(0), None),
            slot_room: 0,
            schedule: Arc::new(schedule),
            description: Description::NONE,
            element_bytes: 1,
            wide: false,
        })
    }

    /// The call, of that number.
    pub(super) fn description(&self, sequence: u64) -> Description {
        self.description.numbered(sequence)
    }

    /// What stands for [`Plan::description`] where there is no room for it. Equal for ranks that
    /// make the same call; for others only by a chance of one in 2^64.
    pub(super) fn digest(&self, sequence: u64) -> u64 {
        // An odd factor: no two numbers of one plan have the same digest.
        self.digest ^ sequence.wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    /// Where in its slot a piece begins that may begin at `from`, and where the next one may; in
    /// bytes.
    ///
    /// Where all that a rank lays out goes the same way, its peers have just read what lies in the
    /// slot, and writing there is several times as slow as elsewhere. So pieces lie behind each
    /// other as far as there is room.
    pub(super) fn slot_place(&self, from: usize) -> (usize, usize) {
        if self.slot_room == 0 {
            return (0, from);
        }
        let start = if from + self.slot_bytes <= self.slot_room { from } else { 0 };
        (start, (start + self.slot_bytes).next_multiple_of(LINE_BYTES))
    }

    /// How many elements of working memory the call needs.
    pub(super) fn scratch_len(&self) -> usize {
        self.scratch.len()
    }

    /// Where a place of the scratch slot `id` lies in it.
    pub(super) fn in_scratch(&self, id: usize, place: Place) -> Range<usize> {
        self.scratch.resolve(id, place, &self.layout)
    }

    /// How the step with that index combines its inputs.
    pub(super) fn merges(&self, index: usize) -> &[usize] {
        &self.merges[index]
    }
}

/// No two pieces share a line of a slot.
const LINE_BYTES: usize = 64;

/// The stack program of a step that sums many inputs.
fn merges_of(step: &Step) -> Vec<usize> {
    let Step::ReduceTree { srcs, .. } = step else { return Vec::new() };
    let nodes: Vec<Node> = srcs.iter().map(|(node, _)| *node).collect();
    let root = Node { lo: nodes[0].lo, len: nodes.iter().map(|node| node.len).sum() };
    let Some(merges) = merges(root, &nodes) else {
        unreachable!("the inputs of a ReduceTree tile a node");
    };
    merges
}

#[cfg(test)]
mod tests {
    use drumline_schedule::{Algorithm, Topology};
    use proptest::prelude::*;

    use super::*;
    use crate::{DType, executor::Operation};

    const ROOM: usize = 4096;

    /// A broadcast, or an all_gather, through slots of `ROOM` bytes.
    fn plan(collective: Collective, elements: usize) -> Plan {
        let row = Algorithm::find(collective, "shm").unwrap();
        let schedule = Arc::new(row.schedule(&Topology::hosts(&[2]), 0, 0).unwrap());
        let operation = Operation::Barrier;
        Plan::new(Shape {
            layout: Layout::new(&schedule, Counts::Even(elements), Some(ROOM / 4)),
            schedule,
            description: Description::new(0, 0, operation, DType::F32, elements, "shm"),
            slot_room: ROOM,
            element_bytes: 4,
            wide: false,
        })
    }

    proptest! {
        #[test]
        fn pieces_that_go_one_way_take_new_places_until_the_slot_is_full(
            calls in prop::collection::vec((any::<bool>(), 0_usize..1000), 1..100),
        ) {
            let (mut from, mut since) = (0, Vec::<Range<usize>>::new());
            for (one_way, elements) in calls {
                let collective = match one_way {
                    true => Collective::Broadcast,
                    false => Collective::AllGather,
                };
                let plan = plan(collective, elements);
                let (start, next) = plan.slot_place(from);
                if !one_way || plan.in_line {
                    prop_assert_eq!((start, next), (0, from));
                    continue;
                }
                let place = start..start + plan.slot_bytes;
                prop_assert!(place.end <= ROOM && start.is_multiple_of(64) && next >= place.end);
                if start == 0 {
                    prop_assert!(from == 0 || from + plan.slot_bytes > ROOM);
                    since.clear();
                }
                prop_assert!(since.iter().all(|other| other.end <= place.start));
                since.push(place);
                from = next;
            }
        }
    }
}
