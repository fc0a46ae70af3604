//! Drives a group's lane. The driver is a blocking call, a thread that waits for a
//! [`Work`](crate::Work), or the progress thread. [`drumline_engine::handoff`] passes the lane between them.

use std::{
    ops::DerefMut,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
        mpsc::{TryRecvError, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use drumline_engine::{
    Cause, CollectiveError,
    call::Call,
    deadline::after,
    executor::{Now, Progress, Spin},
    handoff::{Aside, Driver, Handoff, Surroundings, Turn},
    lane::{Job, Lane},
    membership::Membership,
    operation::Operation,
    transport::Point,
    usage::Usage,
};
use drumline_schedule::{price::Prices, step::Rank};

use super::family::FamilyCell;
use crate::{
    Error, Result,
    algorithms::Explanation,
    interrupt,
    progress_thread::{self, Advance, Served},
    transport::Waker,
    work::Later,
};

/// The longest time that a failed rank waits for connections on which it can tell why, and for streams to
/// take that message. A host that answers takes a few milliseconds.
const SENT_WITHIN: Duration = Duration::from_millis(200);

/// How often the progress thread looks after sends and receives beside a collective that is set aside. What arrives for
/// that collective stays in its stream, so the stream cannot wake it.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// The least time for which a thread waits for another one to leave the lane. The progress thread needs it for moments.
const PATIENCE_MIN: Duration = Duration::from_secs(1);

/// How long a handler of a signal that destroys a group waits for the lane before it breaks calls of other threads off.
const MOMENT: Duration = Duration::from_millis(50);

/// A group's lane, which the threads that need it drive in turns.
pub(crate) struct Driven {
    /// Keeps the store alive, which this process may host for other ranks.
    family: FamilyCell,
    handoff: Handoff<Lane, Outside>,
    usage: Arc<Usage>,
    member: Membership,
    /// The time limit of the group.
    timeout: Duration,
    /// The thread and the call that other threads wait for.
    holder: Mutex<String>,
    /// Readable when the lane can go on.
    readiness: Arc<OwnedFd>,
    has_sent_reason: AtomicBool,
    /// Whether a panic has dropped the last handle of the group.
    without_goodbye: AtomicBool,
    /// Whether all ranks have said goodbye.
    is_over: AtomicBool,
}

/// The waker of a lane, and the way from the lane to the progress thread.
pub(super) struct Outside {
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
        (member, timeout): (Membership, Duration),
    ) -> Arc<Driven> {
        Arc::new_cyclic(|group| Driven {
            family,
            usage: lane.usage().clone(),
            member,
            timeout,
            holder: Mutex::default(),
            handoff: Handoff::new(lane, aborted, Outside { waker, group: group.clone() }),
            readiness,
            has_sent_reason: AtomicBool::new(false),
            without_goodbye: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
        })
    }

    /// Lets the progress thread accept peers of other hosts from now on. `door` is readable when a peer calls.
    pub(super) fn let_callers_in(self: &Arc<Self>, door: Arc<OwnedFd>) -> Result<()> {
        let group: Weak<Driven> = Arc::downgrade(self);
        progress_thread::get()?.guard(group, door);
        Ok(())
    }

    /// Notes that a panic has dropped the last handle of the group. The peers will see this rank as dead.
    pub(super) fn forsake(&self) {
        self.without_goodbye.store(true, Ordering::SeqCst);
    }

    /// The answer of the lane, or of the thread that drives it between two turns. It waits for no call.
    ///
    /// # Errors
    ///
    /// That thread does not answer within the time limit of the group.
    pub(super) fn ask<R: Send + 'static>(
        &self,
        question: impl FnOnce(&mut Lane) -> R + Send + 'static,
    ) -> Result<R> {
        if let Some(mut lane) = self.handoff.reach() {
            return Ok(question(&mut lane));
        }
        let (sender, answers) = sync_channel(1);
        let errand = Box::new(move |lane: &mut Lane| drop(sender.send(question(lane))));
        let mut answer = None;
        self.handoff.await_errand(errand, after(Instant::now(), self.timeout), || {
            let found = answers.try_recv();
            let is_over = !matches!(found, Err(TryRecvError::Empty));
            answer = found.ok();
            is_over
        });
        answer.ok_or_else(|| {
            let problem = format!(
                "the thread that drives group {:?} is stuck in an operator or a buffer of the program",
                self.member.name
            );
            Error::argument("ask", problem)
        })
    }

    /// Chooses algorithms over links by `prices` from now on.
    pub(super) fn set_prices(&self, prices: Prices) -> Result<()> {
        self.ask(move |lane| lane.set_prices(prices))
    }

    /// Which algorithm a call would take, and why.
    pub(super) fn explain(&self, call: &Call, registered: bool) -> Result<Explanation> {
        let call = call.clone();
        self.ask(move |lane| lane.explain(&call, registered))?
    }

    pub(super) fn submit(&self, job: Job) {
        match progress_thread::get() {
            Ok(_) => self.handoff.submit(job),
            Err(error) => job.end(Err(error)),
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
    pub(super) fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        let _wakers = Later::begin();
        let mut lane = self.drive(operation.call().collective.name())?;
        self.handoff.take_mail(&mut lane);
        while lane.has_jobs() {
            let now = Now::lazy(Instant::now);
            self.prepare_turn(&mut lane, &now);
            // Receives may wait long after the last job has ended. Only jobs come before this call.
            if lane.progress(now.get(), Spin::Yes) == Progress::Stuck && lane.has_jobs() {
                let call = operation.call().collective.name();
                lane = self.sleep_interruptibly(lane, |_| call.to_owned(), false);
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
                    let operation = &*operation;
                    lane = self.sleep_interruptibly(lane, |lane| lane.name_of(operation), true);
                }
                Ok(Progress::Stuck | Progress::Moved) => {}
                Err(error) => break Err(error),
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
        self.tell_of_loss(lane);
        if lane.has_unsent() && !self.has_sent_reason.swap(true, Ordering::SeqCst) {
            Driven::wait_until_sent(lane);
        }
    }

    /// If this rank has noticed the end of another one, tells those that make groups.
    #[inline]
    fn tell_of_loss(&self, lane: &Lane) {
        if let Some(lost) = lane.has_lost() {
            let family = self.family.lock().unwrap_or_else(PoisonError::into_inner);
            family.iter().for_each(|family| family.tell_of(lost));
        }
    }

    #[inline(never)]
    fn wait_until_sent(lane: &mut Lane) {
        let until = Instant::now() + SENT_WITHIN;
        while lane.has_unsent() && Instant::now() < until {
            lane.sleep_until(until, Instant::now());
        }
    }

    /// Sleeps in the call named `call`. The program may interrupt it; its code runs while the lane is set aside.
    fn sleep_interruptibly<'a>(
        &'a self,
        mut lane: Driver<'a, Lane, Outside>,
        call: impl Fn(&Lane) -> String,
        has_begun: bool,
    ) -> Driver<'a, Lane, Outside> {
        self.sleep(&mut lane, interrupt::look_again_at(), &call);
        if !interrupt::is_due() {
            return lane;
        }
        let aside = Aside { thread: thread::current().id(), call: call(&lane), has_begun };
        self.handoff.outside(lane, aside, || {
            if interrupt::is_wanted() {
                self.handoff.raise_abort();
            }
        })
    }

    /// Sleeps, and tells threads that wait for the lane which call they wait for.
    fn sleep(&self, lane: &mut Lane, limit: Option<Instant>, call: impl Fn(&Lane) -> String) {
        if self.handoff.is_wanted() {
            let thread = thread::current();
            let name = thread.name().unwrap_or("without a name");
            *self.holder.lock().unwrap_or_else(PoisonError::into_inner) =
                format!("thread {name:?} is in {}", call(lane));
        }
        lane.sleep(Instant::now(), limit);
    }

    /// Waits until other threads have left the lane. The program may interrupt that.
    ///
    /// # Errors
    ///
    /// This thread itself is in a call, and the program's handler makes another one. Or for as long as the time limit
    /// of the group no call has ended: then the group fails.
    #[cold]
    fn wait(&self, attempted: &'static str) -> Result<Driver<'_, Lane, Outside>> {
        let (mut since, mut ended) = (Instant::now(), self.usage.collectives_ended());
        let (started, patience) = (since, self.timeout.max(PATIENCE_MIN));
        let is_own = |aside: &Aside| interrupt::is_this(aside.thread);
        loop {
            let limit = after(since, patience);
            let until = interrupt::look_again_at().map_or(limit, |at| at.min(limit));
            let aside = match self.handoff.wait(until, is_own) {
                Ok(lane) => return Ok(lane),
                Err(aside) => aside,
            };
            if let Some(Aside { call, .. }) = aside.as_ref().filter(|aside| is_own(aside)) {
                return Err(interrupt::inside(attempted, call, &self.member.name));
            }
            let ended_now = self.usage.collectives_ended();
            if ended_now != std::mem::replace(&mut ended, ended_now) {
                since = Instant::now();
            }
            let is_late = Instant::now() >= after(since, patience);
            let is_aborted = interrupt::is_wanted();
            if is_aborted || is_late {
                let holder = match aside {
                    Some(Aside { call, .. }) => format!("a handler interrupts {call}"),
                    None => self.holder.lock().unwrap_or_else(PoisonError::into_inner).clone(),
                };
                let holder = if holder.is_empty() { "another thread has it" } else { &holder };
                let waiting_for = vec![self.member.rank];
                let cause =
                    if is_aborted { Cause::Aborted } else { Cause::Timeout { waiting_for } };
                let call = format!("{attempted}, which waited because {holder} on this rank");
                return Err(self.break_off(call, started, cause));
            }
        }
    }

    /// Fails the group at once, whichever thread drives it.
    pub(super) fn break_off(&self, call: String, started: Instant, cause: Cause) -> Error {
        let running = || self.usage.collectives_ended();
        let sequence = self.handoff.reach().map_or_else(running, |lane| lane.sequence());
        let elapsed = started.elapsed();
        let failure = Arc::new(CollectiveError::new(&self.member, sequence, call, elapsed, cause));
        self.fail_with(&failure);
        failure.error()
    }

    /// The lane, once its driver has left it, to begin `attempted`.
    #[inline]
    pub(super) fn drive(&self, attempted: &'static str) -> Result<Driver<'_, Lane, Outside>> {
        self.handoff.try_drive().map_or_else(|| self.wait(attempted), Ok)
    }

    /// Why this thread cannot wait for a collective of the background: it is in a handler of a signal, and must first
    /// go on with a call of its own.
    pub(crate) fn hindrance(&self) -> Option<Error> {
        let is_own = |aside: &Aside| interrupt::is_this(aside.thread);
        let wait = || self.handoff.wait(Instant::now() + MOMENT, is_own).err().flatten();
        let aside = interrupt::is_handling().then(wait).flatten()?;
        let hinders = is_own(&aside) && aside.has_begun;
        hinders.then(|| interrupt::inside("wait", &aside.call, &self.member.name))
    }

    /// The lane, unless another thread drives it.
    pub(super) fn try_lane(&self) -> Option<impl DerefMut<Target = Lane>> {
        self.handoff.try_drive()
    }

    /// Connects to all peers, all of which do the same, at most until `deadline`.
    pub(super) fn meet_all(&self, deadline: Instant) {
        let Ok(mut lane) = self.drive("meet_all") else { return };
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
        let turn = |lane: &mut Lane| {
            self.handoff.take_points(lane);
            match turn(lane) {
                Progress::Done => {
                    self.say_why(lane);
                    Turn::Over
                }
                Progress::Moved => Turn::Moved,
                Progress::Stuck if limit.is_some_and(|limit| Instant::now() >= limit) => Turn::Over,
                Progress::Stuck => Turn::Stuck,
            }
        };
        let limit = limit.into_iter().chain(interrupt::look_again_at()).min();
        let has_helped = self.handoff.help(turn, |lane| {
            lane.sleep(Instant::now(), limit);
            limit.is_none_or(|limit| Instant::now() < limit)
        });
        // No call is borrowed from this thread, so others may drive the lane meanwhile.
        if interrupt::is_due() && interrupt::is_wanted() {
            self.abort();
        }
        has_helped
    }

    /// Poisons the group for a failure that this rank has found elsewhere, and tells the peers. If another thread
    /// drives the lane, that thread does it.
    pub(super) fn fail_with(&self, failure: &Arc<CollectiveError>) {
        let failure = failure.clone();
        match self.handoff.reach() {
            Some(mut lane) => {
                lane.fail_with(failure);
                self.say_why(&mut lane);
            }
            // Who goes on after this, and perhaps ends, may count on it that the peers hear.
            None => {
                let has_failed = Arc::new(AtomicBool::new(false));
                let told = has_failed.clone();
                let errand = Box::new(move |lane: &mut Lane| {
                    lane.fail_with(failure);
                    told.store(true, Ordering::SeqCst);
                });
                let limit = Instant::now() + MOMENT;
                self.handoff.await_errand(errand, limit, || has_failed.load(Ordering::SeqCst));
            }
        }
    }

    /// Fails if the group has failed, also if no call is under way. See [`Lane::check`].
    pub(super) fn check(&self, attempted: &'static str, began: Instant) -> Result<()> {
        let Some(mut lane) = self.handoff.try_drive() else { return Ok(()) };
        let checked = lane.check(attempted, began, Instant::now());
        self.say_why(&mut lane);
        checked
    }

    /// Fails because `peer` has ended, as another rank has told, unless it had left the group before.
    pub(super) fn lose(&self, peer: Rank, attempted: &'static str, began: Instant) -> Result<()> {
        if self.try_lane().is_some_and(|lane| lane.left(peer).is_some()) {
            return Ok(());
        }
        Err(self.break_off(attempted.to_owned(), began, Cause::PeerExited { peer }))
    }

    /// Whether all ranks have said goodbye.
    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    /// Whether all these peers have said goodbye, or one has failed.
    pub(super) fn have_left(&self, peers: &[Rank]) -> bool {
        let Some(mut lane) = self.handoff.try_drive() else { return false };
        lane.hear(Instant::now()).is_err() || peers.iter().all(|peer| lane.left(*peer).is_some())
    }

    /// Tells the peers that this rank leaves, unless it has failed or left.
    pub(super) fn take_leave(&self) {
        if !self.without_goodbye.load(Ordering::SeqCst)
            && let Err(error) = self.drive("leave").and_then(|mut lane| lane.close())
        {
            tracing::debug!(%error, "no goodbye is due");
        }
    }

    /// Closes the lane once all ranks have called this, or leaves without them. Calls that are under way end first; but
    /// a handler of a signal breaks them off. Returns whether it has left with the other ranks, or at least waited for
    /// them.
    pub(super) fn close(&self, started: Instant, leave_at: Option<Instant>) -> Result<bool> {
        let _wakers = Later::begin();
        let break_off = || {
            self.break_off("destroy".to_owned(), started, Cause::Aborted);
            Ok(false)
        };
        let mut lane = if interrupt::is_handling() {
            let lane = self.handoff.wait(Instant::now() + MOMENT, |_| true).ok();
            // A lane that is busy is dropped here, so that it can be broken off.
            let Some(lane) = lane.filter(|lane| !lane.is_busy()) else { return break_off() };
            lane
        } else {
            self.drive("destroy")?
        };
        loop {
            match self.turn(&mut lane, Instant::now()) {
                Progress::Done => break,
                Progress::Moved => {}
                Progress::Stuck if leave_at.is_some_and(|until| Instant::now() >= until) => {
                    drop(lane);
                    return break_off();
                }
                Progress::Stuck => self.sleep(&mut lane, leave_at, |_| "destroy".to_owned()),
            }
        }
        lane.close()?;
        loop {
            self.handoff.take_points(&mut lane);
            match lane.closed(started, Instant::now()) {
                Ok(true) => {
                    self.is_over.store(true, Ordering::SeqCst);
                    return Ok(true);
                }
                Ok(false) => {}
                Err(error) => {
                    self.say_why(&mut lane);
                    return Err(error);
                }
            }
            if leave_at.is_some_and(|until| Instant::now() >= until) {
                tracing::debug!("left a group that other ranks have not closed yet");
                return Ok(true);
            }
            self.sleep(&mut lane, leave_at, |_| "destroy".to_owned());
        }
    }

    /// What the calls of this rank have taken, and whether one has failed.
    pub(super) fn usage(&self) -> &Usage {
        &self.usage
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
        self.handoff.help(turn, |lane| {
            lane.sleep(Instant::now(), deadline);
            true
        })
    }

    /// See [`ProcessGroup::abort`](super::ProcessGroup::abort).
    pub(super) fn abort(&self) {
        let _wakers = Later::begin();
        if let Some(mut lane) = self.handoff.abort() {
            match lane.has_begun() {
                true => lane.obey(),
                false => drop(self.turn(&mut lane, Instant::now())),
            }
            self.say_why(&mut lane);
        }
    }
}

impl Served for Driven {
    fn advance(&self) -> Advance {
        let _wakers = Later::begin();
        let Some(mut visit) = self.handoff.visit() else { return Advance::Taken };
        let (lane, is_aside) = visit.lane();
        let now = Instant::now();
        lane.look(now);
        if is_aside {
            lane.obey();
            self.handoff.take_points(lane);
            return match lane.progress_points(now) {
                Progress::Done => Advance::Taken,
                Progress::Moved => Advance::Moved,
                Progress::Stuck => Advance::Stuck(now + LOOK_EVERY, None),
            };
        }
        self.handoff.take_mail(lane);
        let progress = lane.progress(now, Spin::No);
        self.tell_of_loss(lane);
        match progress {
            Progress::Done => Advance::Idle(lane.look_again_at()),
            Progress::Moved => Advance::Moved,
            Progress::Stuck => match lane.prepare_sleep(now) {
                Some(until) => Advance::Stuck(until, Some(self.readiness.clone())),
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

    use crate::{Config, ReduceOp};

    #[test]
    fn any_duration_is_a_valid_patience() {
        std::thread::scope(|threads| {
            for group in crate::rendezvous::local_world_with(2, &Config::default()).unwrap() {
                threads.spawn(move || {
                    let work = group.all_reduce_async(vec![1.0_f32], ReduceOp::Sum).unwrap();
                    assert_eq!(work.wait_timeout(Duration::MAX).unwrap().unwrap(), [2.0]);
                    group.leave(Duration::MAX).unwrap();
                });
            }
        });
    }
}
