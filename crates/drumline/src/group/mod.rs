//! Process groups: the ranks that work together, and what they can do.

mod collectives;
mod connect;
mod default_group;
mod drive;
mod family;
mod init;
mod objects;
mod points;
mod registered;
mod subgroups;

use std::{
    fmt,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize},
    },
    time::{Duration, Instant},
};

use drumline_schedule::step::Rank;
use drumline_shm::Arena;

use crate::{
    Config, Result,
    executor::Progress,
    lane::Lane,
    trace::Recorder,
    transport::{Waker, mesh::Membership},
};

pub use default_group::{default_group, is_initialized};
use drive::Inbox;
use family::Family;
pub use init::{init_process_group, init_with_store};
pub use registered::RegisteredBuffer;
pub use subgroups::GroupOptions;

/// The ranks of a job and the operations they do together.
///
/// Every rank makes the same collective calls in the same order. The handle can be cloned and sent
/// to other threads: all clones are one group, and their collectives run one after another. Sends
/// and receives ([`send`](ProcessGroup::send)) run beside them.
///
/// A blocking call (`all_reduce`) runs on the caller's thread and returns when this rank's part
/// is done. An asynchronous one (`all_reduce_async`) takes its buffer by value and returns a
/// [`Work`](crate::Work) at once.
///
/// When a call fails, the group is poisoned: its peers learn why, and every later call on any
/// rank fails with the first failure's text. Connect a new group to go on.
///
/// ```
/// use drumline::{ProcessGroup, ReduceOp};
///
/// // Three ranks in one process, each on a thread of its own.
/// std::thread::scope(|threads| {
///     for group in ProcessGroup::local_world(3)? {
///         threads.spawn(move || {
///             let mut gradient = [group.rank() as f32, 1.0];
///             group.all_reduce(&mut gradient, ReduceOp::Sum).unwrap();
///             assert_eq!(gradient, [3.0, 3.0]);
///         });
///     }
///     Ok::<_, drumline::Error>(())
/// })?;
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone)]
pub struct ProcessGroup {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    member: Membership,
    config: Config,
    /// Until the group is destroyed. This process may host the store for the others.
    family: Mutex<Option<Arc<Family>>>,
    lane: Mutex<Lane>,
    /// Threads that wait for the lane, to make a blocking call.
    wanted: AtomicUsize,
    /// What was submitted and is not in the lane yet, so that nobody who submits waits for the
    /// operation that runs.
    inbox: Mutex<Inbox>,
    /// Whether sends or receives are in the inbox.
    has_mail: AtomicBool,
    /// Ends the sleep of whoever drives the lane.
    waker: Waker,
    readiness: Arc<OwnedFd>,
    /// Whether peers of other hosts have come that nobody has looked at.
    has_callers: AtomicBool,
    aborted: Arc<AtomicBool>,
    arena: Option<Arena>,
    recorder: Recorder,
}

impl ProcessGroup {
    /// The name of the group: `world` for the whole job.
    pub fn name(&self) -> &str {
        &self.inner.member.name
    }

    /// This process's number in the group: `0..world_size`.
    pub fn rank(&self) -> Rank {
        self.inner.member.rank
    }

    /// How many ranks the group has.
    pub fn world_size(&self) -> usize {
        self.inner.member.world_size
    }

    /// The settings that the group was made with, and what start-up has added to them.
    ///
    /// ```
    /// assert!(drumline::ProcessGroup::alone().config().shared_memory);
    /// ```
    pub fn config(&self) -> &Config {
        &self.inner.config
    }

    /// Time that operations of the group have taken on this rank, waiting for others included.
    pub fn communication_time(&self) -> Duration {
        self.inner.drive().busy()
    }

    /// What records the operations of the group.
    pub(crate) fn recorder(&self) -> &Recorder {
        &self.inner.recorder
    }

    /// Whether ranks of this host share memory with this one.
    pub fn shares_memory(&self) -> bool {
        self.inner.arena.is_some()
    }

    /// Breaks the group off, from any thread and at any time: the operation that runs, those
    /// that wait for their turn and all later ones fail on this rank at once, and on the other
    /// ranks with this rank's name.
    ///
    /// ```
    /// use drumline::{Cause, Error, ProcessGroup};
    ///
    /// let group = ProcessGroup::alone();
    /// group.abort();
    /// assert!(matches!(group.barrier(), Err(Error::Collective(_) | Error::Poisoned { .. })));
    /// ```
    pub fn abort(&self) {
        self.inner.abort();
    }

    /// Closes the group after all ranks have called this, so that no rank is left waiting for
    /// one that has gone. Operations that are under way end first. Dropping the last handle
    /// leaves without waiting.
    ///
    /// # Errors
    ///
    /// [`Error::Collective`](crate::Error::Collective) when a peer fails or never comes, or when
    /// it made a call that no other rank took part in.
    pub fn destroy(self) -> Result<()> {
        let inner = &self.inner;
        let started = Instant::now();
        let open = inner.recorder.phase("destroy");
        let mut lane = inner.drive();
        loop {
            match inner.turn(&mut lane, Instant::now()) {
                Progress::Done => break,
                Progress::Moved => {}
                Progress::Stuck => lane.sleep(None),
            }
        }
        lane.close()?;
        let until = started + inner.config.timeout;
        while !lane.closed(started, Instant::now())? {
            lane.sleep_until(until, Instant::now());
        }
        drop(lane);
        let family = inner.family.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(family) = family {
            family.leave(inner.config.timeout.saturating_sub(started.elapsed()));
        }
        drop(open);
        inner.recorder.flush();
        Ok(())
    }
}

impl Inner {
    fn family(&self) -> Option<Arc<Family>> {
        self.family.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessGroup")
            .field("name", &self.name())
            .field("rank", &self.rank())
            .field("world_size", &self.world_size())
            .finish_non_exhaustive()
    }
}
