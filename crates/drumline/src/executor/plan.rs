//! A call laid out.

use std::{sync::Arc, time::Duration};

use drumline_schedule::{
    Collective, Counts, MemoryUse, Schedule,
    step::{Buffer, Loc, Step},
    tree::{Node, merges},
};
use drumline_shm::PAYLOAD_BYTES;

use super::{layout::Layout, machine::Machine, message::Description};

/// Everything that follows from the shape of a call: worked out when a group first makes such a
/// call, and kept. What is left for each call is in the [`Machine`] and in the caller's buffers.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) schedule: Arc<Schedule>,
    /// As the call is told to peers: of call number 0.
    description: Description,
    digest: u64,
    /// With the first window.
    pub(super) layout: Layout,
    pub(super) element_bytes: usize,
    /// Whether narrow floats are widened for the whole operation.
    pub(crate) wide: bool,
    /// Whether peers reach the caller's data.
    pub(crate) registered: bool,
    /// The time limit, if it is not that of the group.
    pub(crate) timeout: Option<Duration>,
    /// How often the schedule posts.
    pub(super) posts: u64,
    pub(super) uses_messages: bool,
    /// Whether slots are so short that they lie in the lines of announcements.
    pub(super) in_line: bool,
    /// Whether this rank gets a result.
    pub(crate) writes: bool,
    /// For each step that combines many inputs, how: a stack program. Empty for the others.
    merges: Vec<Vec<usize>>,
    /// What the schedule names of each scratch slot.
    pub(super) scratch: Vec<(usize, Vec<Loc>)>,
}

/// What a [`Plan`] is made of.
#[derive(Debug)]
pub(crate) struct Shape {
    pub(crate) schedule: Arc<Schedule>,
    pub(crate) description: Description,
    pub(crate) counts: Counts,
    /// Bytes of the elements that travel.
    pub(crate) element_bytes: usize,
    pub(crate) wide: bool,
    /// Bytes of a staging slot, where the data goes through these.
    pub(crate) slot_bytes: Option<usize>,
    pub(crate) timeout: Option<Duration>,
}

impl Plan {
    pub(crate) fn new(shape: Shape) -> Plan {
        let Shape { schedule, description, counts, element_bytes, wide, slot_bytes, timeout } =
            shape;
        let staged = slot_bytes.is_some();
        let slot = slot_bytes.map(|bytes| bytes / element_bytes);
        let layout = Layout::new(&schedule, counts, slot);
        let is_data = |loc: Loc| loc.buffer == Buffer::Data;
        let staging = schedule.steps.iter().filter_map(|step| match step {
            Step::RecvReduce { dst, .. } => Some(Machine::staging(*dst)),
            _ => None,
        });
        let named = schedule.steps.iter().flat_map(|step| step.reads().chain(step.writes()));
        let mut scratch: Vec<(usize, Vec<Loc>)> = Vec::new();
        for loc in named.chain(staging) {
            let Buffer::Scratch(id) = loc.buffer else { continue };
            match scratch.iter_mut().find(|(known, _)| *known == id) {
                Some((_, places)) => places.push(loc),
                None => scratch.push((id, vec![loc])),
            }
        }
        Plan {
            description,
            digest: description.digest(),
            in_line: staged && layout.slot_len() * element_bytes <= PAYLOAD_BYTES,
            layout,
            element_bytes,
            wide,
            registered: schedule.memory == MemoryUse::Registered,
            timeout,
            posts: schedule.posts() as u64,
            uses_messages: schedule.uses_messages(),
            writes: schedule.steps.iter().any(|step| step.writes().any(is_data)),
            merges: schedule.steps.iter().map(merges_of).collect(),
            scratch,
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
        let layout = Layout::new(&schedule, Counts::Even(0), None);
        Plan {
            schedule: Arc::new(schedule),
            description: Description::NONE,
            digest: 0,
            layout,
            element_bytes: 1,
            wide: false,
            registered: false,
            timeout: None,
            posts: 0,
            uses_messages: false,
            in_line: false,
            writes: false,
            merges: Vec::new(),
            scratch: Vec::new(),
        }
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

    /// How the step with that index combines its inputs.
    pub(super) fn merges(&self, index: usize) -> &[usize] {
        &self.merges[index]
    }
}

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
