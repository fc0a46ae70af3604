//! Drives a group's lane. The driver is a blocking call, a thread that waits for a
//! [`Work`](crate::Work), or the progress thread. [`handoff`] passes the lane between them.

mod handoff;

use std::{
    ops::DerefMut,
    os::fd::OwnedFd,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use drumline_engine::{
    Cause, CollectiveError,
    any_call::{AnyCall, Job},
    call::Call,
    executor::{Now, Progress, Spin},
    lane::Lane,
    transport::Point,
    usage::Usage,
};
use drumline_schedule::{price::Prices, step::Rank};

use super::family::FamilyCell;
use crate::{
    Explanation, Result, interrupt,
    progress_thread::{self, Advance, Served},
    transport::Waker,
    work::Later,
};
use handoff::{Drivable, Handoff, Surroundings, Turn};

/// The longest time that a failed rank waits for connections on which it can tell why, and for streams to
/// take that message. A host that answers takes a few milliseconds.
const SENT_WITHIN: Duration = Duration::from_millis(200);

/// What [`Driven::close`] does when other ranks have not closed the group in time.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Patience {
    /// It fails.
    Required,
    /// It leaves without those ranks.
    Enough,
}

/// A group's lane, which the threads that need it drive in turns.
pub(crate) struct Driven {
    /// Keeps the store alive, which this process may host for other ranks.
    _family: FamilyCell,
    handoff: Handoff<Lane, Outside>,
    /// Readable when the lane can go on.
    readiness: Arc<OwnedFd>,
    has_sent_reason: AtomicBool,
    /// Whether a panic has dropped the last handle of the group.
    without_goodbye: AtomicBool,
    /// Whether all ranks have said goodbye.
    is_over: AtomicBool,
}

impl Drivable for Lane {
    type Job = Box<dyn Job>;
    type Point = Point;

    fn submit(&mut self, job: Box<dyn Job>) {
        self.submit(job);
    }

    fn post(&mut self, point: Point) {
        self.post(point);
    }

    fn is_busy(&self) -> bool {
        self.is_busy()
    }

    fn wake_up(&mut self) {
        self.wake_up();
    }

    fn on_panic(&mut self) {
        self.on_panic("a call", "its message stands in the output of this rank");
    }
}

/// The waker of a lane, and the way from the lane to the progress thread.
struct Outside {
    waker: Waker,
    group: Weak<Driven>,
}

impl Surroundings for Outside {
    fn wake(&self) {
        self.waker.wake();
    }

    fn serve(&self) {
        let Some(group) = self.group.upgrade() else { return };
        match progress_thread::get() {
            Ok(thread) => thread.serve(group),
            // Without a thread nothing was submitted, because to submit starts it. So this is an abort.
            Err(error) => tracing::error!(%error, "peers may not hear of an abort"),
        }
    }
}

impl Drop for Driven {
    fn drop(&mut self) {
        let is_forsaken = *self.without_goodbye.get_mut();
        if is_forsaken {
            self.handoff.lane_mut().forsake();
        }
        if is_forsaken || self.handoff.lane_mut().has_failed() {
            ONE_HAS_FAILED.store(true, Ordering::SeqCst);
        }
    }
}

/// Whether a lane of this process had failed when it was dropped, or was dropped in a panic.
static ONE_HAS_FAILED: AtomicBool = AtomicBool::new(false);

impl Driven {
    /// Whether a lane that is gone had failed, or went in a panic.
    pub(super) fn one_has_failed() -> bool {
        ONE_HAS_FAILED.load(Ordering::SeqCst)
    }

    /// Wraps a lane. `aborted` is the flag at which the lane looks.
    pub(super) fn new(
        lane: Lane,
        (waker, readiness): (Waker, Arc<OwnedFd>),
        aborted: Arc<AtomicBool>,
        family: FamilyCell,
    ) -> Arc<Driven> {
        Arc::new_cyclic(|group| Driven {
            _family: family,
            handoff: Handoff::new(lane, aborted, Outside { waker, group: group.clone() }),
            readiness,
            has_sent_reason: AtomicBool::new(false),
            without_goodbye: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
        })
    }

    /// Lets the progress thread accept peers of other hosts from now on. `door` is readable when a peer
    /// calls.
    pub(super) fn let_callers_in(self: &Arc<Self>, door: Arc<OwnedFd>) -> Result<()> {
        let group: Weak<Driven> = Arc::downgrade(self);
        progress_thread::get()?.guard(group, door);
        Ok(())
    }

    /// Notes that a panic has dropped the last handle of the group. The peers will see this rank as dead.
    pub(super) fn forsake(&self) {
        self.without_goodbye.store(true, Ordering::SeqCst);
    }

    /// Chooses algorithms over links by `prices` from now on.
    pub(super) fn set_prices(&self, prices: Prices) {
        self.handoff.drive().set_prices(prices);
    }

    /// Which algorithm a call would take, and why.
    pub(super) fn explain(&self, call: &Call, registered: bool) -> Result<Explanation> {
        Ok(self.handoff.drive().explain(call, registered)?)
    }

    pub(super) fn submit(&self, job: Box<dyn Job>) {
        match progress_thread::get() {
            Ok(_) => self.handoff.submit(job),
            Err(error) => job.complete(Err(error)),
        }
    }

    pub(super) fn post(&self, point: Point) {
        match progress_thread::get() {
            Ok(_) => self.handoff.post(point),
            Err(error) => point.complete(Err(error)),
        }
    }

    /// Brings all submitted calls as far as possible.
    fn turn(&self, lane: &mut Lane, now: Instant) -> Progress {
        if lane.has_points() {
            lane.look(now);
        }
        self.handoff.take_mail(lane);
        lane.progress(now, Spin::Yes)
    }

    /// Carries out a call on the caller's thread, after all calls that were made before.
    pub(super) fn run(&self, operation: &mut dyn AnyCall) -> Result<()> {
        let _wakers = Later::begin();
        let mut lane = self.handoff.drive();
        self.handoff.take_mail(&mut lane);
        while lane.has_jobs() {
            let now = Now::lazy(Instant::now);
            self.prepare_turn(&mut lane, &now);
            // Receives may wait long after the last job has ended. Only jobs come before this call.
            if lane.progress(now.get(), Spin::Yes) == Progress::Stuck && lane.has_jobs() {
                self.sleep_interruptibly(&mut lane, None);
            }
        }
        let result = loop {
            let now = Now::lazy(Instant::now);
            self.prepare_turn(&mut lane, &now);
            let points = match lane.has_points() {
                true => lane.progress_points(now.get()),
                false => Progress::Done,
            };
            match lane.step(operation, &now, Spin::Yes) {
                Ok(Progress::Done) => break Ok(()),
                Ok(Progress::Stuck) if points != Progress::Moved => {
                    self.sleep_interruptibly(&mut lane, None);
                }
                Ok(Progress::Stuck | Progress::Moved) => {}
                Err(error) => break Err(error.into()),
            }
        };
        self.say_why(&mut lane);
        result
    }

    /// Prepares a turn of a blocking call: takes in sends and receives that were posted meanwhile.
    #[inline]
    fn prepare_turn(&self, lane: &mut Lane, now: &Now) {
        if lane.has_points() {
            lane.look(now.get());
        }
        self.handoff.take_points(lane);
    }

    /// Tells the peers why this rank has failed. It also tells peers that are just being connected and peers
    /// whose streams take no bytes now. If this rank exits before that, they blame the exit instead.
    fn say_why(&self, lane: &mut Lane) {
        if lane.has_unsent() && !self.has_sent_reason.swap(true, Ordering::SeqCst) {
            Driven::wait_until_sent(lane);
        }
    }

    #[inline(never)]
    fn wait_until_sent(lane: &mut Lane) {
        let until = Instant::now() + SENT_WITHIN;
        while lane.has_unsent() && Instant::now() < until {
            lane.sleep_until(until, Instant::now());
        }
    }

    fn sleep_interruptibly(&self, lane: &mut Lane, limit: Option<Instant>) {
        let limit = limit.into_iter().chain(interrupt::look_again_at()).min();
        lane.sleep(Instant::now(), limit);
        if interrupt::is_wanted() {
            self.handoff.raise_abort();
        }
    }

    /// The lane, once its driver has left it.
    pub(super) fn lane(&self) -> impl DerefMut<Target = Lane> {
        self.handoff.drive()
    }

    /// The lane, unless another thread drives it.
    pub(super) fn try_lane(&self) -> Option<impl DerefMut<Target = Lane>> {
        self.handoff.try_drive()
    }

    /// Connects to all peers, all of which do the same, at most until `deadline`.
    pub(super) fn meet_all(&self, deadline: Instant) {
        let mut lane = self.handoff.drive();
        let mut now = Instant::now();
        while !lane.meet_all(now) && now < deadline {
            lane.sleep_until(deadline, now);
            now = Instant::now();
        }
    }

    /// Drives the lane by `turn` on the caller's thread until that is done, or until `limit`. `false`: another
    /// thread drives the lane or wants to.
    pub(super) fn drive_until(
        &self,
        limit: Option<Instant>,
        mut turn: impl FnMut(&mut Lane) -> Progress,
    ) -> bool {
        let turn = |lane: &mut Lane| match turn(lane) {
            Progress::Done => {
                self.say_why(lane);
                Turn::Over
            }
            Progress::Moved => Turn::Moved,
            Progress::Stuck if limit.is_some_and(|limit| Instant::now() >= limit) => Turn::Over,
            Progress::Stuck => Turn::Stuck,
        };
        self.handoff.help(turn, |lane| self.sleep_interruptibly(lane, limit))
    }

    /// Tells the peers that this rank has failed.
    pub(super) fn fail_with(&self, failure: &Arc<CollectiveError>) {
        let mut lane = self.handoff.drive();
        lane.fail_with(failure.clone());
        self.say_why(&mut lane);
    }

    /// Poisons the group for a cause that this rank has found elsewhere, and tells the peers.
    pub(super) fn fail_because(&self, operation: &str, cause: Cause) {
        let mut lane = self.handoff.drive();
        lane.fail_because(operation, cause);
        self.say_why(&mut lane);
    }

    /// Whether all ranks have said goodbye.
    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    /// Whether all these peers have said goodbye, or one has failed.
    pub(super) fn have_left(&self, peers: &[Rank]) -> bool {
        let mut lane = self.handoff.drive();
        lane.hear(Instant::now()).is_err() || peers.iter().all(|peer| lane.has_left(*peer))
    }

    /// Tells the peers that this rank leaves, unless it has failed or left.
    pub(super) fn take_leave(&self) {
        if !self.without_goodbye.load(Ordering::SeqCst)
            && let Err(error) = self.handoff.drive().close()
        {
            tracing::debug!(%error, "no goodbye is due");
        }
    }

    /// Closes the lane once all ranks have called this. Calls that are under way end first.
    pub(super) fn close(
        &self,
        started: Instant,
        timeout: Duration,
        patience: Patience,
    ) -> Result<()> {
        let _wakers = Later::begin();
        let mut lane = self.handoff.drive();
        loop {
            match self.turn(&mut lane, Instant::now()) {
                Progress::Done => break,
                Progress::Moved => {}
                Progress::Stuck => lane.sleep(Instant::now(), None),
            }
        }
        lane.close()?;
        let leave_at = match patience {
            Patience::Required => None,
            // A time beyond the range of the clock never comes.
            Patience::Enough => started.checked_add(timeout),
        };
        loop {
            match lane.closed(started, Instant::now()) {
                Ok(true) => {
                    self.is_over.store(true, Ordering::SeqCst);
                    return Ok(());
                }
                Ok(false) => {}
                Err(error) => {
                    self.say_why(&mut lane);
                    return Err(error.into());
                }
            }
            if leave_at.is_some_and(|until| Instant::now() >= until) {
                tracing::debug!("left a group that other ranks have not closed yet");
                return Ok(());
            }
            lane.sleep(Instant::now(), leave_at);
        }
    }

    /// What the calls of this rank have taken, and whether one has failed.
    pub(super) fn usage(&self) -> (Usage, bool) {
        let lane = self.handoff.drive();
        (lane.usage().clone(), lane.has_failed())
    }

    /// Drives the lane on the caller's thread until `done` or `deadline`. `false`: another thread drives the
    /// lane or wants to, or no call is left.
    pub(crate) fn help(&self, deadline: Option<Instant>, done: &dyn Fn() -> bool) -> bool {
        let turn = |lane: &mut Lane| {
            let now = Instant::now();
            let progress = self.turn(lane, now);
            if done() || deadline.is_some_and(|deadline| now >= deadline) {
                self.say_why(lane);
                return Turn::Over;
            }
            match progress {
                Progress::Done => Turn::Idle,
                Progress::Moved => Turn::Moved,
                Progress::Stuck => Turn::Stuck,
            }
        };
        let _wakers = Later::begin();
        self.handoff.help(turn, |lane| lane.sleep(Instant::now(), deadline))
    }

    /// See [`ProcessGroup::abort`](super::ProcessGroup::abort).
    pub(super) fn abort(&self) {
        let _wakers = Later::begin();
        if let Some(mut lane) = self.handoff.abort() {
            self.turn(&mut lane, Instant::now());
            self.say_why(&mut lane);
        }
    }
}

impl Served for Driven {
    fn advance(&self) -> Advance {
        let _wakers = Later::begin();
        let Some(mut lane) = self.handoff.visit() else { return Advance::Taken };
        let now = Instant::now();
        lane.look(now);
        self.handoff.take_mail(&mut lane);
        match lane.progress(now, Spin::No) {
            Progress::Done => Advance::Idle(lane.look_again_at()),
            Progress::Moved => Advance::Moved,
            Progress::Stuck => match lane.prepare_sleep(now) {
                Some(until) => Advance::Stuck(until, self.readiness.clone()),
                None => Advance::Moved,
            },
        }
    }

    fn has_callers(&self) -> bool {
        self.handoff.has_callers()
    }

    fn on_callers(&self) {
        self.handoff.on_callers();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::{Config, ProcessGroup, ReduceOp};

    #[test]
    fn any_duration_is_a_valid_patience() {
        std::thread::scope(|threads| {
            for group in ProcessGroup::local_world_with(2, &Config::default()).unwrap() {
                threads.spawn(move || {
                    let work = group.all_reduce_async(vec![1.0_f32], ReduceOp::Sum);
                    assert_eq!(work.wait_timeout(Duration::MAX).unwrap().unwrap(), [2.0]);
                    group.leave(Duration::MAX).unwrap();
                });
            }
        });
    }
}
