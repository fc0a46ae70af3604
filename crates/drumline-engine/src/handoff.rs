//! Hands a lane from one driver to the next, so that no work and no wake-up is lost.
//!
//! One thread at a time drives a lane: the progress thread, a blocking call, or a thread that waits
//! for a `Work` and helps. Any other thread leaves a note for the driver: mail in the
//! inbox, the flag of an abort, or the flag of callers.
//!
//! ```text
//! the thread that leaves a note            the driver that leaves the lane
//! mail or flag                             unlock the lane
//! read-modify-write on `has_mail`          read-modify-write on `has_mail`
//! wake the driver                          mail, flags, unfinished work?
//! the progress thread tries the lock           yes: the progress thread tries the lock
//! ```
//!
//! One of the two read-modify-writes comes first. If it is the one of the note, the driver sees the note. If
//! it is the one of the driver, the progress thread finds the lane unlocked, or locked by a later driver, to
//! which the same argument applies.
//!
//! A driver that sleeps is woken for every note. It must forget a wake-up before it looks for
//! notes, never between the look and the next sleep.
//!
//! A thread that wants the lane for a call of its own counts itself in `wanted` in place of a note, and sleeps until a
//! driver leaves: the same argument shows that the driver sees the count, or the thread finds the lane unlocked.
//!
//! A thread that waits for an errand does the same: the driver carries it out, or the thread itself does.
//!
//! A driver that runs foreign code (the handlers of signals) first sets the lane aside: it unlocks the lane and keeps
//! the right to go on. Meanwhile others may bring the sends and receives of the lane on, and leave notes, but make no
//! call.
//!
//! `drumline-loom` tries all interleavings of the functions in this file.

#![allow(missing_debug_implementations, reason = "what is locked cannot be shown")]

#[cfg(loom)]
use crate::lane_mutex::{Mutex as LaneMutex, MutexGuard as LaneGuard};
#[cfg(loom)]
use loom::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
};
#[cfg(not(loom))]
use std::sync::{
    Condvar, Mutex as LaneMutex, Mutex, MutexGuard as LaneGuard, MutexGuard,
    atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
};
use std::{
    ops::{Deref, DerefMut},
    sync::{Arc, PoisonError, TryLockError},
    thread::ThreadId,
    time::Instant,
};

/// What the hand-off needs of a lane.
pub trait Drivable {
    /// A call in the background.
    type Job;
    /// A send or receive.
    type Point;
    /// What takes the lane a moment.
    type Errand;

    /// Takes a call in.
    fn submit(&mut self, job: Self::Job);
    /// Takes a send or receive in.
    fn post(&mut self, point: Self::Point);
    /// Carries an errand out.
    fn carry_out(&mut self, errand: Self::Errand);
    /// Whether any call is not complete.
    fn is_busy(&self) -> bool;
    /// Tells the lane that it has a new driver. The driver before may have prepared to sleep.
    fn wake_up(&mut self);
    /// Tells the lane that its driver has panicked.
    fn on_panic(&mut self);
}

/// The parties that learn of a note besides the driver.
pub trait Surroundings {
    /// Ends the sleep of the driver, now or the next time that it falls asleep.
    fn wake(&self);
    /// Makes the progress thread [visit](Handoff::visit) the lane.
    fn serve(&self);
}

/// A lane, and the notes for its driver.
pub struct Handoff<L: Drivable, S> {
    lane: LaneMutex<Held<L>>,
    /// The number of threads that wait for the lane to make a blocking call.
    wanted: AtomicUsize,
    /// Where they sleep.
    waiting: Mutex<()>,
    freed: Condvar,
    /// Calls for the lane. A submitter leaves them here and need not wait for the running call.
    inbox: Mutex<Inbox<L>>,
    /// Whether the inbox has mail. Every change is a read-modify-write.
    has_mail: AtomicBool,
    /// Whether peers of other hosts have called and no thread has accepted them.
    has_callers: AtomicBool,
    aborted: Arc<AtomicBool>,
    surroundings: S,
}

struct Inbox<L: Drivable> {
    jobs: Vec<L::Job>,
    points: Vec<L::Point>,
    errands: Vec<L::Errand>,
}

struct Held<L> {
    lane: L,
    aside: Option<Aside>,
}

/// Why a lane is set aside.
#[derive(Clone, Debug)]
pub struct Aside {
    /// The thread that runs foreign code.
    pub thread: ThreadId,
    /// The call that it will go on with.
    pub call: String,
    /// Whether that call has begun, so that no other can run.
    pub has_begun: bool,
}

/// The right to drive a lane.
pub struct Driver<'a, L: Drivable, S: Surroundings> {
    // The fields are dropped in this order: a driver looks for notes after it has unlocked the lane.
    held: LaneGuard<'a, Held<L>>,
    leaving: Leaving<'a, L, S>,
}

struct Leaving<'a, L: Drivable, S: Surroundings> {
    handoff: &'a Handoff<L, S>,
    is_busy: bool,
    /// Whether no thread that waits for the lane may have it yet.
    is_kept: bool,
}

impl<L: Drivable, S: Surroundings> Deref for Driver<'_, L, S> {
    type Target = L;

    fn deref(&self) -> &L {
        &self.held.lane
    }
}

impl<L: Drivable, S: Surroundings> DerefMut for Driver<'_, L, S> {
    fn deref_mut(&mut self) -> &mut L {
        &mut self.held.lane
    }
}

impl<L: Drivable, S: Surroundings> Driver<'_, L, S> {
    /// Whether a call that has begun is set aside.
    pub fn has_begun(&self) -> bool {
        self.held.aside.as_ref().is_some_and(|aside| aside.has_begun)
    }
}

impl<L: Drivable, S: Surroundings> Drop for Driver<'_, L, S> {
    fn drop(&mut self) {
        // After a panic the progress thread fails all calls that are not complete.
        self.leaving.is_busy |= self.held.lane.is_busy() || std::thread::panicking();
        self.leaving.is_kept = self.held.aside.is_some();
    }
}

impl<L: Drivable, S: Surroundings> Drop for Leaving<'_, L, S> {
    fn drop(&mut self) {
        if self.handoff.has_notes() || self.is_busy {
            self.handoff.surroundings.serve();
        }
        if !self.is_kept {
            self.handoff.tell_waiting();
        }
    }
}

/// The lane in the hands of the progress thread.
pub struct Visit<'a, L: Drivable, S: Surroundings> {
    held: Option<LaneGuard<'a, Held<L>>>,
    handoff: &'a Handoff<L, S>,
}

impl<L: Drivable, S: Surroundings> Visit<'_, L, S> {
    /// The lane, and whether a call that has begun is set aside.
    pub fn lane(&mut self) -> (&mut L, bool) {
        let Some(held) = self.held.as_deref_mut() else { unreachable!("only drop takes it") };
        let is_aside = held.aside.as_ref().is_some_and(|aside| aside.has_begun);
        (&mut held.lane, is_aside)
    }
}

impl<L: Drivable, S: Surroundings> Drop for Visit<'_, L, S> {
    fn drop(&mut self) {
        drop(self.held.take());
        self.handoff.tell_leavers();
        self.handoff.tell_waiting();
    }
}

/// Takes a lane up again that was set aside. It is dropped only if the foreign code panics.
struct Return<'a, L: Drivable, S: Surroundings>(&'a Handoff<L, S>);

impl<'a, L: Drivable, S: Surroundings> Return<'a, L, S> {
    fn take_up(&self) -> Driver<'a, L, S> {
        // Other threads lock a lane that is set aside only for moments.
        let mut held = self.0.lane.lock().unwrap_or_else(|held| self.0.recover(held));
        held.aside = None;
        self.0.driver(held)
    }
}

impl<L: Drivable, S: Surroundings> Drop for Return<'_, L, S> {
    fn drop(&mut self) {
        self.take_up().held.lane.on_panic();
    }
}

/// How often a thread tries to get the lane before it sleeps: another may have it for a moment only.
const TRIES: u32 = if cfg!(loom) { 1 } else { 100 };

/// The result of a turn of a helping thread.
pub enum Turn {
    /// The call for which the thread waits has ended.
    Over,
    /// No call is left.
    Idle,
    /// More can be done at once.
    Moved,
    /// Nothing can be done before a peer or another thread does something.
    Stuck,
}

impl<L: Drivable, S: Surroundings> Handoff<L, S> {
    /// `aborted` is the flag at which the lane looks.
    pub fn new(lane: L, aborted: Arc<AtomicBool>, surroundings: S) -> Handoff<L, S> {
        Handoff {
            lane: LaneMutex::new(Held { lane, aside: None }),
            wanted: AtomicUsize::new(0),
            waiting: Mutex::new(()),
            freed: Condvar::new(),
            inbox: Mutex::new(Inbox { jobs: vec![], points: vec![], errands: vec![] }),
            has_mail: AtomicBool::new(false),
            has_callers: AtomicBool::new(false),
            aborted,
            surroundings,
        }
    }

    /// The lane, which no other thread knows any more.
    pub fn lane_mut(&mut self) -> &mut L {
        &mut self.lane.get_mut().unwrap_or_else(PoisonError::into_inner).lane
    }

    /// Waits for the lane, to make a blocking call, at most until `limit`. Also returns, without the lane, when
    /// `is_own` says that the caller itself has set it aside.
    ///
    /// # Errors
    ///
    /// Why the lane is set aside, if it is.
    #[cold]
    pub fn wait(
        &self,
        limit: Instant,
        is_own: impl Fn(&Aside) -> bool,
    ) -> Result<Driver<'_, L, S>, Option<Aside>> {
        self.wanted.fetch_add(1, SeqCst);
        self.surroundings.wake();
        self.tell_leavers();
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let mut tries = 0;
        let lane = loop {
            let aside = match self.reach() {
                Some(driver) if driver.held.aside.is_none() => break Ok(driver),
                Some(driver) => driver.held.aside.clone(),
                None => None,
            };
            let left = limit.saturating_duration_since(Instant::now());
            if left.is_zero() || aside.as_ref().is_some_and(&is_own) {
                break Err(aside);
            }
            tries += 1;
            if tries < TRIES && aside.is_none() {
                std::hint::spin_loop();
                continue;
            }
            tries = 0;
            let woken = self.freed.wait_timeout(waiting, left);
            waiting = woken.unwrap_or_else(PoisonError::into_inner).0;
        };
        drop(waiting);
        self.wanted.fetch_sub(1, SeqCst);
        lane
    }

    /// Whether another thread waits for the lane.
    pub fn is_wanted(&self) -> bool {
        self.wanted.load(SeqCst) > 0
    }

    /// Wakes the threads that wait for the lane, or for errands. Call this after the lane is unlocked, and after a
    /// read-modify-write on `has_mail`; or after errands.
    fn tell_waiting(&self) {
        if self.is_wanted() {
            drop(self.waiting.lock());
            self.freed.notify_all();
        }
    }

    /// The lane, to make a call. `None`: another thread drives it, or has set it aside.
    #[inline]
    pub fn try_drive(&self) -> Option<Driver<'_, L, S>> {
        self.reach().filter(|driver| driver.held.aside.is_none())
    }

    /// The lane, for what takes a moment, also if it is set aside. `None`: another thread drives it.
    #[inline]
    pub fn reach(&self) -> Option<Driver<'_, L, S>> {
        self.try_lock().map(|lane| self.driver(lane))
    }

    /// Runs foreign code, which may call this group or wait for threads that do. Meanwhile the lane is set aside.
    pub fn outside<'a>(
        &'a self,
        mut driver: Driver<'a, L, S>,
        aside: Aside,
        foreign: impl FnOnce(),
    ) -> Driver<'a, L, S> {
        driver.held.aside = Some(aside);
        drop(driver);
        let returning = Return(self);
        foreign();
        let driver = returning.take_up();
        std::mem::forget(returning);
        driver
    }

    #[inline]
    fn try_lock(&self) -> Option<LaneGuard<'_, Held<L>>> {
        match self.lane.try_lock() {
            Ok(lane) => Some(lane),
            Err(TryLockError::WouldBlock) => None,
            Err(TryLockError::Poisoned(lane)) => Some(self.recover(lane)),
        }
    }

    #[inline]
    fn driver<'a>(&'a self, mut held: LaneGuard<'a, Held<L>>) -> Driver<'a, L, S> {
        held.lane.wake_up();
        Driver { held, leaving: Leaving { handoff: self, is_busy: false, is_kept: false } }
    }

    #[cold]
    fn recover<'a>(&self, poisoned: PoisonError<LaneGuard<'a, Held<L>>>) -> LaneGuard<'a, Held<L>> {
        #[cfg(not(loom))]
        self.lane.clear_poison();
        let mut held = poisoned.into_inner();
        held.lane.on_panic();
        held
    }

    /// Locks the lane for the progress thread, unless another thread drives it. A driver leaves incomplete
    /// calls to the progress thread. The progress thread must come back for them itself.
    pub fn visit(&self) -> Option<Visit<'_, L, S>> {
        let mut held = self.try_lock()?;
        held.lane.wake_up();
        self.has_callers.store(false, SeqCst);
        Some(Visit { held: Some(held), handoff: self })
    }

    /// Drives the lane by `turn` and `sleep`. `false`: another thread drives the lane or wants to for a
    /// blocking call, or no call is left, or `sleep` ends the help.
    pub fn help(
        &self,
        mut turn: impl FnMut(&mut L) -> Turn,
        mut sleep: impl FnMut(&mut L) -> bool,
    ) -> bool {
        let Some(mut lane) = self.try_drive() else { return false };
        loop {
            match turn(&mut lane) {
                Turn::Over => return true,
                Turn::Idle => return false,
                Turn::Moved | Turn::Stuck if self.is_wanted() => return false,
                Turn::Moved => {}
                Turn::Stuck if sleep(&mut lane) => {}
                Turn::Stuck => return false,
            }
        }
    }

    /// Leaves a call for the driver.
    pub fn submit(&self, job: L::Job) {
        self.leave_mail(job, |inbox| &mut inbox.jobs);
    }

    /// Leaves a send or receive for the driver.
    pub fn post(&self, point: L::Point) {
        self.leave_mail(point, |inbox| &mut inbox.points);
    }

    /// Has the driver carry out an errand between two turns.
    pub fn send(&self, errand: L::Errand) {
        self.leave_mail(errand, |inbox| &mut inbox.errands);
    }

    /// Has an errand carried out, and waits until `is_done`, at most until `limit`. The thread that waits may be the
    /// progress thread. So it looks itself after the errand if the driver has left.
    #[cold]
    pub fn await_errand(
        &self,
        errand: L::Errand,
        limit: Instant,
        mut is_done: impl FnMut() -> bool,
    ) {
        self.wanted.fetch_add(1, SeqCst);
        self.send(errand);
        loop {
            let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            let left = limit.saturating_duration_since(Instant::now());
            if is_done() || left.is_zero() {
                break;
            }
            match self.reach() {
                Some(mut driver) => {
                    // A driver that leaves locks it.
                    drop(waiting);
                    self.take_points(&mut driver);
                }
                None => drop(self.freed.wait_timeout(waiting, left)),
            }
        }
        self.wanted.fetch_sub(1, SeqCst);
    }

    fn leave_mail<M>(&self, item: M, kind: fn(&mut Inbox<L>) -> &mut Vec<M>) {
        let mut inbox = self.inbox();
        let items = kind(&mut inbox);
        items.push(item);
        let is_first = items.len() == 1;
        self.has_mail.swap(true, SeqCst);
        drop(inbox);
        // The driver takes later mail together with the first.
        if is_first {
            self.surroundings.wake();
            self.surroundings.serve();
        }
    }

    fn inbox(&self) -> MutexGuard<'_, Inbox<L>> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves the mail from the inbox to the lane.
    #[inline]
    pub fn take_mail(&self, lane: &mut L) {
        if self.has_mail.load(SeqCst) {
            self.take_points_and(true, lane);
        }
    }

    /// Moves sends and receives from the inbox to the lane, and carries errands out. Unlike jobs, they do not wait
    /// for the running call.
    #[inline]
    pub fn take_points(&self, lane: &mut L) {
        if self.has_mail.load(SeqCst) {
            self.take_points_and(false, lane);
        }
    }

    #[inline(never)]
    fn take_points_and(&self, jobs_too: bool, lane: &mut L) {
        let mut inbox = self.inbox();
        let jobs = if jobs_too { std::mem::take(&mut inbox.jobs) } else { Vec::new() };
        let points = std::mem::take(&mut inbox.points);
        let errands = std::mem::take(&mut inbox.errands);
        self.has_mail.swap(!inbox.jobs.is_empty(), SeqCst);
        drop(inbox);
        jobs.into_iter().for_each(|job| lane.submit(job));
        points.into_iter().for_each(|point| lane.post(point));
        if !errands.is_empty() {
            errands.into_iter().for_each(|errand| lane.carry_out(errand));
            self.tell_waiting();
        }
    }

    /// Raises the flag of an abort. Only the driver calls this, and sees the flag in its next turn.
    pub fn raise_abort(&self) {
        self.aborted.store(true, SeqCst);
    }

    /// Raises the flag of an abort and wakes the driver. `Some`: there was no driver, and the caller may
    /// act for it for a moment.
    pub fn abort(&self) -> Option<Driver<'_, L, S>> {
        self.raise_abort();
        self.tell_leavers();
        self.surroundings.wake();
        let driver = self.reach();
        if driver.is_none() {
            // When the progress thread unlocks the lane, it does not look for notes.
            self.surroundings.serve();
        }
        driver
    }

    /// Raises the flag of callers. Only the progress thread calls this, and visits the lane afterwards.
    pub fn on_callers(&self) {
        self.has_callers.store(true, SeqCst);
        self.tell_leavers();
    }

    /// Whether the flag of callers is up.
    pub fn has_callers(&self) -> bool {
        self.has_callers.load(SeqCst)
    }

    /// Read-modify-write on `has_mail`: either the leaving driver sees our flag, or we see the lane
    /// unlocked.
    fn tell_leavers(&self) {
        self.has_mail.fetch_or(false, SeqCst);
    }

    /// Whether there are notes for a driver. Call this after the lane is unlocked.
    fn has_notes(&self) -> bool {
        let has_mail = self.has_mail.compare_exchange(false, false, SeqCst, SeqCst);
        has_mail.is_err() || self.aborted.load(SeqCst) || self.has_callers()
    }
}
