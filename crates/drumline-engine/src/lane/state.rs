//! The state of a lane.

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
    executor::{Machine, Pool},
    host::Host,
    membership::Membership,
    operation::Operation,
    recorder::{Open, Recorder},
    transport::Connections,
    usage::Usage,
};

/// Collective, algorithm, root, and whether sums lie apart.
pub(super) type ScheduleKey = (&'static str, &'static str, Rank, bool);

/// A call in the background. It holds its buffers.
pub type Job = Box<Operation<'static>>;

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
    /// The number of the next collective.
    pub(super) sequence: u64,
    pub(super) machine: Machine,
    pub(super) plans: Plans,
    pub(super) schedules: HashMap<ScheduleKey, Arc<Schedule>>,
    pub(super) pool: Pool,
    pub(super) queue: VecDeque<Job>,
    pub(super) running: Option<Running>,
    /// How many sends and receives are under way.
    pub(super) points: usize,
    /// When [`Lane::progress_points`] must look at their times again.
    pub(super) points_due: Option<Instant>,
    /// Whether some have waited so long that each turn finds out which ranks are late.
    pub(super) points_followed: bool,
    /// The peers whose messages had been awaited for long when this rank last looked.
    pub(super) points_awaited: BTreeSet<Rank>,
    pub(super) points_looked_at: Option<Instant>,
    /// What this rank has told its peers about its waiting. `None`: they believe that it does not wait.
    pub(super) told: Option<Told>,
    /// When this rank last looked whether a peer has failed, in a call over links that was about to succeed.
    pub(super) peers_looked_at: Option<Instant>,
    /// Whether neighbours have been told to ring the doorbell.
    pub(super) asleep: bool,
    pub(super) state: State,
    pub(super) closing: Option<Closing>,
    /// Whether the lane will be dropped without a goodbye.
    pub(super) without_goodbye: bool,
    pub(super) usage: Arc<Usage>,
    pub(super) recorder: Recorder,
}

pub(super) enum State {
    Open,
    /// This rank has said goodbye.
    Left,
    Failed(Arc<CollectiveError>),
}

/// This rank has said goodbye and waits until all others have.
#[derive(Clone, Copy, Debug)]
pub(super) struct Closing {
    pub(super) give_up_at: Instant,
    /// The time before `give_up_at` from which this rank looks for late ranks. A rank that did not look in
    /// this time was stopped itself, and gets more time to hear the others.
    pub(super) lead: Duration,
    pub(super) has_looked: bool,
}

impl Closing {
    /// When this rank must look even if no peer does anything. `now` is the time.
    pub(super) fn due(&self, now: Instant) -> Instant {
        let look_at = self.give_up_at - self.lead;
        if now < look_at { look_at } else { self.give_up_at }
    }
}

/// The collective that the machine carries out.
#[derive(Debug)]
pub(super) struct Running {
    /// When it began, if the clock has been read since.
    pub(super) started: Option<Instant>,
    /// Set when the collective first has to wait.
    pub(super) patience: Option<Patience>,
    /// The number of collectives for which its time counts.
    pub(super) stands_for: u32,
    pub(super) collective: Collective,
    /// The length of this rank's buffer.
    pub(super) bytes: u64,
    /// The record of the collective. It ends when it is dropped.
    pub(super) open: Open,
    /// The newest failure of another group when it began: [`Seen::newest`](crate::membership::Seen::newest).
    pub(super) failure: usize,
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lane").field("member", &self.member).finish_non_exhaustive()
    }
}
