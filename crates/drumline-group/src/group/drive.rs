//! Who drives a group's lane: a blocking call, a thread that waits for a [`Work`](crate::Work), or
//! the engine, one at a time.
//!
//! Three rules keep anything from being forgotten:
//!
//! - Whoever leaves the lane looks for unfinished work *after* unlocking it, and gives it to the
//!   engine ([`Driver`]). So whoever finds the lane locked may leave its work in the inbox.
//! - A wake-up is taken back (by a sleep or by [`Lane::look`]) *before* the inbox, the flag of an
//!   abort and the threads that want the lane are looked at, never between that and a sleep.
//! - A thread that only helps goes when another one wants the lane for a blocking call.

use std::{
    ops::{Deref, DerefMut},
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use drumline_engine::{
    any_call::{AnyCall, Job},
    call::Call,
    executor::{Now, Progress, Spin},
    lane::Lane,
    transport::Point,
};
use drumline_schedule::price::Prices;

use super::{Patience, family::FamilyCell};
use crate::{
    Explanation, Result,
    engine::{self, Advance, Engine},
    interrupt,
    transport::Waker,
};

/// How long a rank that has failed waits for connections to be made, at most. Those to hosts that
/// answer take a few milliseconds.
const WORD_WITHIN: Duration = Duration::from_millis(200);

/// What was submitted and is not in the lane yet.
#[derive(Default)]
struct Inbox {
    jobs: Vec<Box<dyn Job>>,
    points: Vec<Point>,
}

/// A group's lane, which whoever needs it drives.
pub(crate) struct Driven {
    /// The store that this process may host for the others stays for as long as operations do.
    _family: FamilyCell,
    lane: Mutex<Lane>,
    /// Threads that wait for the lane, to make a blocking call.
    wanted: AtomicUsize,
    /// What was submitted and is not in the lane yet, so that nobody who submits waits for the
    /// operation that runs.
    inbox: Mutex<Inbox>,
    /// Whether anything is in the inbox.
    has_mail: AtomicBool,
    /// Ends the sleep of whoever drives the lane.
    waker: Waker,
    readiness: Arc<OwnedFd>,
    /// Whether peers of other hosts have come that nobody has looked at.
    has_callers: AtomicBool,
    aborted: Arc<AtomicBool>,
    has_said_why: AtomicBool,
    /// Whether a panic has taken the last handle of the group.
    forsaken: AtomicBool,
}

/// A locked lane. When it is unlocked, what is unfinished goes to the engine.
struct Driver<'a> {
    // Dropped in this order.
    lane: MutexGuard<'a, Lane>,
    rest: Rest<'a>,
}

struct Rest<'a> {
    group: &'a Arc<Driven>,
    busy: bool,
}

impl Drop for Driven {
    fn drop(&mut self) {
        if *self.forsaken.get_mut() {
            self.lane.get_mut().unwrap_or_else(PoisonError::into_inner).forsake();
        }
    }
}

impl Deref for Driver<'_> {
    type Target = Lane;

    fn deref(&self) -> &Lane {
        &self.lane
    }
}

impl DerefMut for Driver<'_> {
    fn deref_mut(&mut self) -> &mut Lane {
        &mut self.lane
    }
}

impl Drop for Driver<'_> {
    fn drop(&mut self) {
        // After a panic the engine tells everybody who waits.
        self.rest.busy = self.lane.is_busy() || std::thread::panicking();
    }
}

impl Drop for Rest<'_> {
    fn drop(&mut self) {
        if !self.busy && !self.group.has_news() {
            return;
        }
        match engine::get() {
            Ok(engine) => engine.serve(self.group),
            // There was none before: nothing was submitted but an abort.
            Err(error) => tracing::error!(%error, "peers may not hear of an abort"),
        }
    }
}

impl Driven {
    /// `aborted` is the flag that the lane looks at.
    pub(super) fn new(
        lane: Lane,
        (waker, readiness): (Waker, Arc<OwnedFd>),
        aborted: Arc<AtomicBool>,
        family: FamilyCell,
    ) -> Arc<Driven> {
        Arc::new(Driven {
            _family: family,
            lane: Mutex::new(lane),
            wanted: AtomicUsize::new(0),
            inbox: Mutex::default(),
            has_mail: AtomicBool::new(false),
            waker,
            readiness,
            has_callers: AtomicBool::new(false),
            aborted,
            has_said_why: AtomicBool::new(false),
            forsaken: AtomicBool::new(false),
        })
    }

    /// A panic has taken the last handle of the group: its peers shall see this rank as dead.
    pub(super) fn forsake(&self) {
        self.forsaken.store(true, Ordering::SeqCst);
    }

    /// Algorithms over links are chosen by `prices` from now on.
    pub(super) fn set_prices(self: &Arc<Self>, prices: Prices) {
        self.drive().set_prices(prices);
    }

    /// Which algorithm a call would take, and why.
    pub(super) fn explain(self: &Arc<Self>, call: &Call, registered: bool) -> Result<Explanation> {
        Ok(self.drive().explain(call, registered)?)
    }

    /// Waits for the lane, to make a blocking call.
    #[inline]
    fn drive(self: &Arc<Self>) -> Driver<'_> {
        if let Some(driver) = self.try_drive() {
            return driver;
        }
        self.driver(self.wait_for_lane())
    }

    /// Waits for the lane, which somebody else drives.
    #[cold]
    fn wait_for_lane(&self) -> MutexGuard<'_, Lane> {
        self.wanted.fetch_add(1, Ordering::SeqCst);
        self.waker.wake();
        let lane = self.lane.lock().unwrap_or_else(|lane| self.recover(lane));
        self.wanted.fetch_sub(1, Ordering::SeqCst);
        lane
    }

    #[inline]
    fn try_drive(self: &Arc<Self>) -> Option<Driver<'_>> {
        match self.lane.try_lock() {
            Ok(lane) => Some(self.driver(lane)),
            Err(TryLockError::WouldBlock) => None,
            Err(TryLockError::Poisoned(lane)) => Some(self.driver(self.recover(lane))),
        }
    }

    #[inline]
    fn driver<'a>(self: &'a Arc<Self>, mut lane: MutexGuard<'a, Lane>) -> Driver<'a> {
        lane.wake_up();
        Driver { lane, rest: Rest { group: self, busy: false } }
    }

    #[cold]
    fn recover<'a>(&self, poisoned: PoisonError<MutexGuard<'a, Lane>>) -> MutexGuard<'a, Lane> {
        self.lane.clear_poison();
        let mut lane = poisoned.into_inner();
        lane.on_panic("a call", "its message stands in the output of this rank");
        lane
    }

    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// To be called after the lane was unlocked. Whoever finds it locked has told its news before:
    /// all of them exchange one word, in which one comes after the other.
    fn has_news(&self) -> bool {
        let has_mail =
            self.has_mail.compare_exchange(false, false, Ordering::SeqCst, Ordering::SeqCst);
        has_mail.is_err() || self.aborted.load(Ordering::SeqCst) || self.has_callers()
    }

    /// Peers of other hosts have come: whoever drives the lane lets them in, or, if nobody does,
    /// the engine.
    pub(crate) fn on_callers(&self) {
        self.has_callers.store(true, Ordering::SeqCst);
        self.tell_leavers();
    }

    /// Orders what was told before with [`Driven::has_news`]: either that finds it, or whoever
    /// tells it finds the lane unlocked.
    fn tell_leavers(&self) {
        self.has_mail.fetch_or(false, Ordering::SeqCst);
    }

    /// Whether peers of other hosts have come that nobody has looked at.
    pub(crate) fn has_callers(&self) -> bool {
        self.has_callers.load(Ordering::SeqCst)
    }

    pub(super) fn submit(self: &Arc<Self>, job: Box<dyn Job>) {
        let engine = match engine::get() {
            Ok(engine) => engine,
            Err(error) => return job.complete(Err(error.clone())),
        };
        let mut inbox = self.inbox();
        inbox.jobs.push(job);
        let first = inbox.jobs.len() == 1;
        self.has_mail.swap(true, Ordering::SeqCst);
        drop(inbox);
        self.announce(engine, first);
    }

    pub(super) fn post(self: &Arc<Self>, point: Point) {
        let engine = match engine::get() {
            Ok(engine) => engine,
            Err(error) => return point.complete(Err(error.clone())),
        };
        let mut inbox = self.inbox();
        inbox.points.push(point);
        let first = inbox.points.len() == 1;
        self.has_mail.swap(true, Ordering::SeqCst);
        drop(inbox);
        self.announce(engine, first);
    }

    /// Tells whoever drives the lane, and the engine if nobody does. What lies behind others of
    /// its kind in the inbox is found together with them.
    fn announce(self: &Arc<Self>, engine: &Engine, first: bool) {
        if first {
            self.waker.wake();
            engine.serve(self);
        }
    }

    fn has_mail(&self) -> bool {
        self.has_mail.load(Ordering::SeqCst)
    }

    fn empty_inbox(&self, lane: &mut Lane) {
        if self.has_mail() {
            self.take_all(lane);
        }
    }

    #[inline(never)]
    fn take_all(&self, lane: &mut Lane) {
        let mut inbox = self.inbox();
        self.has_mail.store(false, Ordering::SeqCst);
        let Inbox { jobs, points } = std::mem::take(&mut *inbox);
        drop(inbox);
        jobs.into_iter().for_each(|job| lane.submit(job));
        points.into_iter().for_each(|point| lane.post(point));
    }

    /// Sends and receives do not wait for the operation that runs.
    #[inline(never)]
    fn take_points(&self, lane: &mut Lane) {
        let mut inbox = self.inbox();
        self.has_mail.store(!inbox.jobs.is_empty(), Ordering::SeqCst);
        let points = std::mem::take(&mut inbox.points);
        drop(inbox);
        points.into_iter().for_each(|point| lane.post(point));
    }

    /// Brings everything on that was submitted.
    fn turn(&self, lane: &mut Lane, now: Instant) -> Progress {
        if lane.has_points() {
            lane.look(now);
        }
        self.empty_inbox(lane);
        lane.progress(now, Spin::Yes)
    }

    /// Runs an operation on the caller's thread, after those that were called before.
    pub(super) fn run(self: &Arc<Self>, operation: &mut dyn AnyCall) -> Result<()> {
        let mut lane = self.drive();
        self.empty_inbox(&mut lane);
        while lane.has_jobs() {
            let progress = self.beside(&mut lane, &Now::lazy(Instant::now), |lane, now| {
                lane.progress(now.get(), Spin::Yes)
            });
            // Receives may be stuck for long after the last job has ended.
            if progress == Progress::Stuck && lane.has_jobs() {
                self.sleep_interruptibly(&mut lane);
            }
        }
        let mut result = Ok(Progress::Moved);
        loop {
            let progress = self.beside(&mut lane, &Now::lazy(Instant::now), |lane, now| {
                let points = match lane.has_points() {
                    true => lane.progress_points(now.get()),
                    false => Progress::Done,
                };
                result = lane.step(operation, now, Spin::Yes);
                match (&result, points) {
                    (Ok(Progress::Stuck), Progress::Moved) => Progress::Moved,
                    (Ok(progress), _) => *progress,
                    (Err(_), _) => Progress::Done,
                }
            });
            match progress {
                Progress::Done => break,
                Progress::Moved => {}
                Progress::Stuck => self.sleep_interruptibly(&mut lane),
            }
        }
        self.say_why(&mut lane);
        Ok(result.map(drop)?)
    }

    /// Peers that are just being connected hear why this rank has failed: it may be about to exit,
    /// and they would blame it for that.
    fn say_why(&self, lane: &mut Lane) {
        if lane.owes_word() && !self.has_said_why.swap(true, Ordering::SeqCst) {
            Driven::wait_for_word(lane);
        }
    }

    #[inline(never)]
    fn wait_for_word(lane: &mut Lane) {
        let until = Instant::now() + WORD_WITHIN;
        while lane.owes_word() && Instant::now() < until {
            lane.sleep_until(until, Instant::now());
        }
    }

    fn sleep_interruptibly(&self, lane: &mut Lane) {
        lane.sleep(Instant::now(), interrupt::look_again_at());
        if interrupt::is_wanted() {
            self.aborted.store(true, Ordering::SeqCst);
        }
    }

    /// One turn of a blocking call: sends and receives that were posted meanwhile come along.
    fn beside(
        &self,
        lane: &mut Lane,
        now: &Now,
        turn: impl FnOnce(&mut Lane, &Now) -> Progress,
    ) -> Progress {
        if lane.has_points() {
            lane.look(now.get());
        }
        if self.has_mail() {
            self.take_points(lane);
        }
        turn(lane, now)
    }

    /// Closes the lane after all ranks have called this. What is under way ends first.
    pub(super) fn close(
        self: &Arc<Self>,
        started: Instant,
        timeout: Duration,
        patience: Patience,
    ) -> Result<()> {
        let mut lane = self.drive();
        loop {
            match self.turn(&mut lane, Instant::now()) {
                Progress::Done => break,
                Progress::Moved => {}
                Progress::Stuck => lane.sleep(Instant::now(), None),
            }
        }
        lane.close()?;
        let enough = (patience == Patience::Enough).then_some(started + timeout);
        loop {
            match lane.closed(started, Instant::now()) {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) => {
                    self.say_why(&mut lane);
                    return Err(error.into());
                }
            }
            if enough.is_some_and(|until| Instant::now() >= until) {
                tracing::debug!("left a group that other ranks have not closed yet");
                return Ok(());
            }
            lane.sleep(Instant::now(), enough);
        }
    }

    /// Time in operations.
    pub(super) fn busy(self: &Arc<Self>) -> Duration {
        self.drive().busy()
    }

    /// Drives the lane on the caller's thread until `done` or `deadline`. `false`: somebody else
    /// drives it, or wants to.
    pub(crate) fn help(
        self: &Arc<Self>,
        deadline: Option<Instant>,
        done: &dyn Fn() -> bool,
    ) -> bool {
        let Some(mut lane) = self.try_drive() else { return false };
        loop {
            let now = Instant::now();
            let progress = self.turn(&mut lane, now);
            if done() || deadline.is_some_and(|deadline| now >= deadline) {
                self.say_why(&mut lane);
                return true;
            }
            if self.wanted.load(Ordering::SeqCst) > 0 || progress == Progress::Done {
                return false;
            }
            if progress == Progress::Stuck {
                lane.sleep(Instant::now(), deadline);
            }
        }
    }

    /// Brings the lane on, for the engine.
    pub(crate) fn advance(self: &Arc<Self>) -> Advance {
        // Unlike a driver the engine keeps what is unfinished.
        let mut lane = match self.lane.try_lock() {
            Ok(lane) => lane,
            Err(TryLockError::WouldBlock) => return Advance::Taken,
            Err(TryLockError::Poisoned(lane)) => self.recover(lane),
        };
        let now = Instant::now();
        lane.wake_up();
        self.has_callers.store(false, Ordering::SeqCst);
        lane.look(now);
        self.empty_inbox(&mut lane);
        match lane.progress(now, Spin::No) {
            Progress::Done => Advance::Idle(lane.look_again_at()),
            Progress::Moved => Advance::Moved,
            Progress::Stuck => match lane.prepare_sleep(now) {
                Some(until) => Advance::Stuck(until, self.readiness.clone()),
                None => Advance::Moved,
            },
        }
    }

    /// See [`ProcessGroup::abort`](super::ProcessGroup::abort).
    pub(super) fn abort(self: &Arc<Self>) {
        self.aborted.store(true, Ordering::SeqCst);
        self.tell_leavers();
        self.waker.wake();
        // If nobody drives it, the peers hear of it from here.
        if let Some(mut lane) = self.try_drive() {
            self.turn(&mut lane, Instant::now());
            self.say_why(&mut lane);
        }
    }
}
