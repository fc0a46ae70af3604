//! The workers of a host, and the world that they belong to.

use std::collections::BTreeSet;

use drumline_launch::{Ending, membership::WorldPlan};

use super::draw::KEEPERS;
use crate::time::Nanos;

/// The workers of a host in one world.
#[derive(Clone, Debug)]
pub(super) struct Workers {
    pub(super) world: u64,
    pub(super) first_rank: usize,
    /// When they were started. `None`: they are being started.
    pub(super) since: Option<Nanos>,
    /// They were told to end, or one of them has failed.
    pub(super) is_ending: bool,
    /// They wait at their next step, which is behind this one.
    pub(super) held: Option<Option<u64>>,
    /// They have said that they go on when others die.
    pub(super) regroup: bool,
    /// They were killed, and the launcher has not heard of it.
    pub(super) are_dead: bool,
    /// Their keepers that were killed.
    pub(super) dead_keepers: [bool; KEEPERS],
}

/// What happens to workers.
#[derive(Clone, Copy, Debug)]
pub(super) enum Turn {
    /// They start to run.
    Run,
    /// They say that they go on when others die.
    Regroup,
    /// All exit with 0.
    Succeed,
    /// One fails.
    Fail(Ending),
    /// All are held.
    Hold,
    /// They have ended as they were told to.
    Stop,
    /// They are gone, after they were abandoned or one has failed.
    Go { failed: bool },
}

/// The workers of all hosts that run together.
#[derive(Clone, Debug)]
pub(super) struct World {
    pub(super) plan: WorldPlan,
    pub(super) started: BTreeSet<u64>,
    pub(super) succeeded: BTreeSet<u64>,
    pub(super) failed: BTreeSet<u64>,
    /// When the last of them was started.
    pub(super) complete_at: Option<Nanos>,
    /// The last step that a held rank has begun.
    pub(super) begun: Option<u64>,
    pub(super) stops_at: Option<u64>,
}

impl World {
    pub(super) fn new(plan: WorldPlan) -> World {
        World {
            plan,
            started: BTreeSet::new(),
            succeeded: BTreeSet::new(),
            failed: BTreeSet::new(),
            complete_at: None,
            begun: None,
            stops_at: None,
        }
    }
}
