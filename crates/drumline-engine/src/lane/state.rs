//! What a lane holds.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    fmt,
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant},
};

use drumline_schedule::{Chooser, Collective, Schedule, Topology, step::Rank};

use super::{
    patience::{Patience, Told},
    plans::Plans,
};
use crate::{
    CollectiveError, Settings,
    any_call::Job,
    executor::{Machine, Pool},
    host::Host,
    membership::Membership,
    recorder::{Open, Recorder},
    transport::Connections,
    usage::Usage,
};

/// See the [module's documentation](super).
pub struct Lane {
    pub(super) member: Membership,
    pub(super) topology: Topology,
    pub(super) chooser: Chooser,
    pub(super) settings: Settings,
    pub(super) transport: Box<dyn Connections>,
    pub(super) host: Option<Host>,
    /// Set by `ProcessGroup::abort`, from any thread.
    pub(super) aborted: Arc<AtomicBool>,
    /// Number of the next collective.
    pub(super) sequence: u64,
    pub(super) machine: Machine,
    pub(super) plans: Plans,
    pub(super) schedules: HashMap<(&'static str, &'static str, Rank), Arc<Schedule>>,
    pub(super) pool: Pool,
    pub(super) queue: VecDeque<Box<dyn Job>>,
    pub(super) running: Option<Running>,
    /// Sends and receives that are under way.
    pub(super) points: usize,
    /// When the oldest of them is to be looked at.
    pub(super) points_due: Option<Instant>,
    /// Whether some have waited for so long that it is found out for whom.
    pub(super) points_followed: bool,
    /// With whom those are that have waited for long, when they were last looked at.
    pub(super) points_awaited: BTreeSet<Rank>,
    pub(super) points_looked_at: Option<Instant>,
    /// What peers believe of this rank's waiting, if they believe that it waits.
    pub(super) told: Option<Told>,
    /// Whether neighbours have been told to ring the doorbell.
    pub(super) asleep: bool,
    pub(super) state: State,
    pub(super) closing: Option<Closing>,
    /// Whether a panic ends the group.
    pub(super) forsaken: bool,
    pub(super) usage: Usage,
    pub(super) recorder: Recorder,
}

pub(super) enum State {
    Open,
    /// This rank has said goodbye.
    Left,
    Failed(Arc<CollectiveError>),
}

/// This rank has said goodbye and waits for the others'.
#[derive(Clone, Copy, Debug)]
pub(super) struct Closing {
    pub(super) give_up_at: Instant,
    /// How long before that it looks who is late: a rank that did not was stopped itself, and hears
    /// first what the others say.
    pub(super) lead: Duration,
    pub(super) has_looked: bool,
}

impl Closing {
    /// When there is something to do even if no peer moves; it is `now`.
    pub(super) fn due(&self, now: Instant) -> Instant {
        let look_at = self.give_up_at - self.lead;
        if now < look_at { look_at } else { self.give_up_at }
    }
}

/// The operation that the machine works on.
#[derive(Debug)]
pub(super) struct Running {
    /// When it began, if anybody has looked at the clock since.
    pub(super) started: Option<Instant>,
    /// Once it has had to wait.
    pub(super) patience: Option<Patience>,
    /// How many operations its time stands for.
    pub(super) stands_for: u32,
    pub(super) collective: Collective,
    /// Of this rank's buffer.
    pub(super) bytes: u64,
    /// Ends with the operation.
    pub(super) open: Open,
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lane").field("member", &self.member).finish_non_exhaustive()
    }
}
