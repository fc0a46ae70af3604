//! The handle of a group, and what it shares with calls that are under way.

use std::{
    collections::BTreeSet,
    fmt,
    sync::{Arc, PoisonError, Weak},
    time::{Duration, Instant},
};

use drumline_engine::{
    call::Call, deadline::after, lane::Job, membership::Membership, operation::Operation,
    transport::Point, usage::Usage,
};
use drumline_schedule::step::Rank;
use drumline_shm::Arena;

use crate::{
    Config, Error, Result, algorithms::Explanation, interrupt, start_up::Origin, trace::GroupTrace,
};

use super::{
    drive::Driven,
    family::{Family, FamilyCell},
    foreign::Foreign,
};

/// A group of ranks, and the calls that they make together.
///
/// Every rank makes the same collective calls in the same order. The handle can be cloned and sent to other
/// threads. All clones are one group, and their collectives run one after another. Sends and receives
/// ([`send`](ProcessGroup::send)) run beside them.
///
/// A blocking call (`all_reduce`) runs on the caller's thread and returns when this rank's part is done. An
/// asynchronous one (`all_reduce_async`) takes its buffer by value and returns a [`Work`](crate::Work) at once.
///
/// When a call fails, the group is poisoned: the peers learn why, and every later call on any rank fails with
/// the text of the first failure. Connect a new group to go on.
///
/// ```
/// # use drumline_group as drumline;
/// use drumline::{ProcessGroup, ReduceOp};
///
/// let group = ProcessGroup::init_or_alone()?; // one of the ranks of the job
/// let mut gradient = [group.rank() as f32, 1.0];
/// group.all_reduce(&mut gradient, ReduceOp::Sum)?;
/// assert_eq!(gradient[1], group.world_size() as f32);
/// group.destroy()?;
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone)]
pub struct ProcessGroup {
    pub(super) inner: Arc<Inner>,
    /// The time limit of calls on this handle, if it is not that of the group.
    pub(super) timeout: Option<Duration>,
}

pub(crate) struct Inner {
    pub(super) member: Membership,
    pub(super) config: Config,
    /// Set until the group is destroyed. This process may host the store for the others.
    pub(super) family: FamilyCell,
    pub(super) carrier: Carrier,
    pub(super) arena: Option<Arena>,
    pub(super) recorder: GroupTrace,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // The progress thread may hold the lane a little longer, and does not panic. So the lane must be told.
        if std::thread::panicking() {
            match &self.carrier {
                Carrier::Lane(lane) => lane.forsake(),
                Carrier::Backend(backend) => backend.forsake(),
            }
        }
    }
}

/// What carries the group's calls.
pub(super) enum Carrier {
    Lane(Arc<Driven>),
    Backend(Arc<Foreign>),
}

impl ProcessGroup {
    pub(super) fn whole(inner: Arc<Inner>) -> ProcessGroup {
        ProcessGroup { inner, timeout: None }
    }

    /// The name of the group: `world` for the whole job.
    pub fn name(&self) -> &str {
        &self.inner.member.name
    }

    /// This process's number in the group: `0..world_size`.
    pub fn rank(&self) -> Rank {
        self.inner.member.rank
    }

    /// The number of ranks in the group.
    pub fn world_size(&self) -> usize {
        self.inner.member.world_size
    }

    /// The settings with which the group was made, and what start-up has added to them.
    pub fn config(&self) -> &Config {
        &self.inner.config
    }

    /// The same group, with another time limit for calls made on this handle.
    ///
    /// A time limit of zero has already passed. Clones of the handle have its limit, too. Clones made before
    /// keep their own.
    #[must_use]
    pub fn within(&self, timeout: Duration) -> ProcessGroup {
        ProcessGroup { timeout: Some(timeout), ..self.clone() }
    }

    /// What the calls of this rank have taken, and whether one has failed.
    pub(super) fn usage(&self) -> &Usage {
        match &self.inner.carrier {
            Carrier::Lane(lane) => lane.usage(),
            Carrier::Backend(backend) => backend.usage(),
        }
    }

    /// What start-up of a group asks that is made from this one. Nothing if this one has failed before: then the
    /// program knows.
    pub(super) fn origin(&self) -> Option<Arc<dyn Origin>> {
        let known = || self.inner.family().map_or_else(BTreeSet::new, |it| it.seen.ended());
        let parent = || Arc::new(Parent { group: self.clone(), known: known() });
        (!self.usage().has_failed()).then(|| parent() as Arc<dyn Origin>)
    }

    /// Which algorithm a call would take, and why.
    pub(crate) fn explain_call(&self, call: &Call, registered: bool) -> Result<Explanation> {
        match &self.inner.carrier {
            Carrier::Lane(lane) => lane.explain(call, registered),
            Carrier::Backend(_) => Ok(Explanation {
                algorithm: self.inner.config.backend.clone().unwrap_or_default(),
                why: "this backend carries the group, and chooses for itself".to_owned(),
                candidates: Vec::new(),
            }),
        }
    }

    /// Aborts the group, from any thread and at any time. The running call, calls that wait for their turn, and all
    /// later calls fail at once on this rank. On the other ranks they fail with an error that names this rank.
    pub fn abort(&self) {
        match &self.inner.carrier {
            Carrier::Lane(lane) => lane.abort(),
            Carrier::Backend(backend) => backend.abort(),
        }
    }

    /// Closes the group once all ranks have called this, so that no rank waits for a rank that has gone.
    /// Calls that are under way end first. Dropping the last handle instead leaves without waiting. A handler of a
    /// signal that interrupts a wait of this library ([`interruptible`](crate::backend::interruptible)) cannot wait for
    /// calls that are under way: it breaks them off, as [`ProcessGroup::abort`] does, and succeeds. For ranks that do
    /// not call this it waits half a second.
    ///
    /// # Errors
    ///
    /// [`Collective`](crate::ErrorKind::Collective) when a peer fails or never comes, or when a peer has
    /// made a call that no other rank has made.
    pub fn destroy(self) -> Result<()> {
        self.close(None)
    }

    /// Like [`destroy`](ProcessGroup::destroy), but waits at most `patience` for ranks that have not called
    /// it. Then it leaves without them, as if the last handle had been dropped, and breaks off calls that are under
    /// way.
    ///
    /// # Errors
    ///
    /// As for [`ProcessGroup::destroy`], when a rank has failed or made another call.
    pub fn leave(self, patience: Duration) -> Result<()> {
        self.close(Some(patience))
    }

    fn close(self, patience: Option<Duration>) -> Result<()> {
        let inner = &self.inner;
        let started = Instant::now();
        let open = inner.recorder.phase("destroy");
        // A handler has little time for other ranks, which may wait for the call that it interrupts.
        let patience = match interrupt::is_handling() {
            true => Some(patience.unwrap_or(inner.config.timeout).min(Duration::from_millis(500))),
            false => patience,
        };
        let may_ask = !interrupt::is_handling() && !self.usage().has_failed();
        if let Some(family) = inner.family().filter(|_| may_ask) {
            family.forget(&inner.member);
        }
        let in_good_order = match &inner.carrier {
            Carrier::Lane(lane) => lane.close(started, patience.map(|it| after(started, it)))?,
            Carrier::Backend(backend) => backend.close(started, patience)?,
        };
        let limit = patience.unwrap_or(inner.config.timeout);
        let timeout = if in_good_order { limit } else { Duration::ZERO };
        let family = inner.family.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(family) = family {
            family.leave(timeout.saturating_sub(started.elapsed()));
        }
        drop(open);
        inner.recorder.flush();
        Ok(())
    }
}

impl Inner {
    pub(super) fn family(&self) -> Option<Arc<Family>> {
        self.family.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The driver that a waiting thread may help. Empty for a foreign backend, whose calls have threads of their own.
    pub(crate) fn driven(&self) -> Weak<Driven> {
        match &self.carrier {
            Carrier::Lane(lane) => Arc::downgrade(lane),
            Carrier::Backend(_) => Weak::new(),
        }
    }

    /// Carries out a call on the caller's thread, after all calls that were made before.
    pub(super) fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        match &self.carrier {
            Carrier::Lane(lane) => lane.run(operation),
            Carrier::Backend(backend) => Ok(backend.run(operation)?),
        }
    }

    /// Carries out a call in the background, after all calls that were made before.
    pub(super) fn submit(&self, job: Job) {
        match &self.carrier {
            Carrier::Lane(lane) => lane.submit(job),
            Carrier::Backend(backend) => backend.submit(job),
        }
    }

    /// Sends or receives in the background.
    pub(super) fn post(&self, point: Point) {
        match &self.carrier {
            Carrier::Lane(lane) => lane.post(point),
            Carrier::Backend(backend) => backend.post(point),
        }
    }
}

/// A group from which another one is made.
#[derive(Debug)]
struct Parent {
    group: ProcessGroup,
    /// The ranks, by their numbers in the job, whose ends the program knows from other groups: it may go on without
    /// them.
    known: BTreeSet<Rank>,
}

impl Parent {
    fn find_failure(&self, began: Instant) -> Result<()> {
        let lane = match &self.group.inner.carrier {
            Carrier::Lane(lane) => lane,
            Carrier::Backend(backend) => return backend.check("new_group", began),
        };
        lane.check("new_group", began)?;
        // This rank may have no connection to a rank that has ended.
        let lost = self.group.inner.family().map_or_else(Vec::new, |family| family.lost());
        let new = lost.into_iter().filter(|rank| !self.known.contains(rank));
        let peers = new.filter_map(|rank| self.group.group_rank(rank));
        // Who has lost this very rank may have lost the connection alone.
        let mut peers = peers.filter(|peer| *peer != self.group.rank());
        peers.try_for_each(|peer| lane.lose(peer, "new_group", began))
    }
}

impl Origin for Parent {
    fn check(&self, began: Instant) -> Result<()> {
        let failure = self.find_failure(began);
        let is_known = |error: &Error| error.culprit().is_some_and(|it| self.known.contains(&it));
        failure.or_else(|error| if is_known(&error) { Ok(()) } else { Err(error) })
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
