//! Hands a lane from one driver to the next, so that no work and no wake-up is lost.
//!
//! One thread at a time drives a lane: the progress thread, a blocking call, or a thread that waits
//! for a [`Work`](crate::Work) and helps. Any other thread leaves a note for the driver: mail in the
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
//! `drumline-loom` tries all interleavings of the functions in this file.

#[cfg(loom)]
use crate::lane_mutex::{Mutex as LaneMutex, MutexGuard as LaneGuard};
#[cfg(loom)]
use loom::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
};
#[cfg(not(loom))]
use std::sync::{
    Mutex as LaneMutex, Mutex, MutexGuard as LaneGuard, MutexGuard,
    atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
};
use std::{
    ops::{Deref, DerefMut},
    sync::{Arc, PoisonError, TryLockError},
};

/// What the hand-off needs of a lane.
pub(crate) trait Drivable {
    type Job;
    type Point;

    fn submit(&mut self, job: Self::Job);
    fn post(&mut self, point: Self::Point);
    /// Whether any call is not complete.
    fn is_busy(&self) -> bool;
    /// Tells the lane that it has a new driver. The driver before may have prepared to sleep.
    fn wake_up(&mut self);
    /// Tells the lane that its driver has panicked.
    fn on_panic(&mut self);
}

/// The parties that learn of a note besides the driver.
pub(crate) trait Surroundings {
    /// Ends the sleep of the driver, now or the next time that it falls asleep.
    fn wake(&self);
    /// Makes the progress thread [visit](Handoff::visit) the lane.
    fn serve(&self);
}

/// A lane, and the notes for its driver.
pub(crate) struct Handoff<L: Drivable, S> {
    lane: LaneMutex<L>,
    /// The number of threads that wait for the lane to make a blocking call.
    wanted: AtomicUsize,
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
}

/// The right to drive a lane.
pub(crate) struct Driver<'a, L: Drivable, S: Surroundings> {
    // The fields are dropped in this order: a driver looks for notes after it has unlocked the lane.
    lane: LaneGuard<'a, L>,
    leaving: Leaving<'a, L, S>,
}

struct Leaving<'a, L: Drivable, S: Surroundings> {
    handoff: &'a Handoff<L, S>,
    is_busy: bool,
}

impl<L: Drivable, S: Surroundings> Deref for Driver<'_, L, S> {
    type Target = L;

    fn deref(&self) -> &L {
        &self.lane
    }
}

impl<L: Drivable, S: Surroundings> DerefMut for Driver<'_, L, S> {
    fn deref_mut(&mut self) -> &mut L {
        &mut self.lane
    }
}

impl<L: Drivable, S: Surroundings> Drop for Driver<'_, L, S> {
    fn drop(&mut self) {
        // After a panic the progress thread fails all calls that are not complete.
        self.leaving.is_busy = self.lane.is_busy() || std::thread::panicking();
    }
}

impl<L: Drivable, S: Surroundings> Drop for Leaving<'_, L, S> {
    fn drop(&mut self) {
        if self.is_busy || self.handoff.has_notes() {
            self.handoff.surroundings.serve();
        }
    }
}

/// The result of a turn of a helping thread.
pub(crate) enum Turn {
    /// The call for which the thread waits has ended.
    Over,
    /// No call is left.
    Idle,
    Moved,
    /// Nothing can be done before a peer or another thread does something.
    Stuck,
}

impl<L: Drivable, S: Surroundings> Handoff<L, S> {
    /// `aborted` is the flag at which the lane looks.
    pub(crate) fn new(lane: L, aborted: Arc<AtomicBool>, surroundings: S) -> Handoff<L, S> {
        Handoff {
            lane: LaneMutex::new(lane),
            wanted: AtomicUsize::new(0),
            inbox: Mutex::new(Inbox { jobs: Vec::new(), points: Vec::new() }),
            has_mail: AtomicBool::new(false),
            has_callers: AtomicBool::new(false),
            aborted,
            surroundings,
        }
    }

    pub(crate) fn lane_mut(&mut self) -> &mut L {
        self.lane.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the lane, to make a blocking call.
    #[inline]
    pub(crate) fn drive(&self) -> Driver<'_, L, S> {
        self.try_drive().unwrap_or_else(|| self.wait_for_lane())
    }

    #[cold]
    fn wait_for_lane(&self) -> Driver<'_, L, S> {
        self.wanted.fetch_add(1, SeqCst);
        self.surroundings.wake();
        let lane = self.lane.lock().unwrap_or_else(|lane| self.recover(lane));
        self.wanted.fetch_sub(1, SeqCst);
        self.driver(lane)
    }

    /// `None`: another thread drives the lane.
    #[inline]
    pub(crate) fn try_drive(&self) -> Option<Driver<'_, L, S>> {
        self.try_lock().map(|lane| self.driver(lane))
    }

    #[inline]
    fn try_lock(&self) -> Option<LaneGuard<'_, L>> {
        match self.lane.try_lock() {
            Ok(lane) => Some(lane),
            Err(TryLockError::WouldBlock) => None,
            Err(TryLockError::Poisoned(lane)) => Some(self.recover(lane)),
        }
    }

    #[inline]
    fn driver<'a>(&'a self, mut lane: LaneGuard<'a, L>) -> Driver<'a, L, S> {
        lane.wake_up();
        Driver { lane, leaving: Leaving { handoff: self, is_busy: false } }
    }

    #[cold]
    fn recover<'a>(&self, poisoned: PoisonError<LaneGuard<'a, L>>) -> LaneGuard<'a, L> {
        #[cfg(not(loom))]
        self.lane.clear_poison();
        let mut lane = poisoned.into_inner();
        lane.on_panic();
        lane
    }

    /// Locks the lane for the progress thread, unless another thread drives it. A driver leaves incomplete
    /// calls to the progress thread. The progress thread must come back for them itself.
    pub(crate) fn visit(&self) -> Option<LaneGuard<'_, L>> {
        let mut lane = self.try_lock()?;
        lane.wake_up();
        self.has_callers.store(false, SeqCst);
        Some(lane)
    }

    /// Drives the lane by `turn` and `sleep`. `false`: another thread drives the lane or wants to for a
    /// blocking call, or no call is left.
    pub(crate) fn help(
        &self,
        mut turn: impl FnMut(&mut L) -> Turn,
        mut sleep: impl FnMut(&mut L),
    ) -> bool {
        let Some(mut lane) = self.try_drive() else { return false };
        loop {
            match turn(&mut lane) {
                Turn::Over => return true,
                Turn::Idle => return false,
                Turn::Moved | Turn::Stuck if self.wanted.load(SeqCst) > 0 => return false,
                Turn::Moved => {}
                Turn::Stuck => sleep(&mut lane),
            }
        }
    }

    pub(crate) fn submit(&self, job: L::Job) {
        self.leave_mail(job, |inbox| &mut inbox.jobs);
    }

    pub(crate) fn post(&self, point: L::Point) {
        self.leave_mail(point, |inbox| &mut inbox.points);
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
    pub(crate) fn take_mail(&self, lane: &mut L) {
        if self.has_mail.load(SeqCst) {
            self.take_points_and(true, lane);
        }
    }

    /// Moves sends and receives from the inbox to the lane. Unlike jobs, they do not wait for the running
    /// call.
    #[inline]
    pub(crate) fn take_points(&self, lane: &mut L) {
        if self.has_mail.load(SeqCst) {
            self.take_points_and(false, lane);
        }
    }

    #[inline(never)]
    fn take_points_and(&self, jobs_too: bool, lane: &mut L) {
        let mut inbox = self.inbox();
        let jobs = if jobs_too { std::mem::take(&mut inbox.jobs) } else { Vec::new() };
        let points = std::mem::take(&mut inbox.points);
        self.has_mail.swap(!inbox.jobs.is_empty(), SeqCst);
        drop(inbox);
        jobs.into_iter().for_each(|job| lane.submit(job));
        points.into_iter().for_each(|point| lane.post(point));
    }

    /// Raises the flag of an abort. Only the driver calls this, and sees the flag in its next turn.
    pub(crate) fn raise_abort(&self) {
        self.aborted.store(true, SeqCst);
    }

    /// Raises the flag of an abort and wakes the driver. `Some`: there was no driver, and the caller may
    /// drive.
    pub(crate) fn abort(&self) -> Option<Driver<'_, L, S>> {
        self.raise_abort();
        self.tell_leavers();
        self.surroundings.wake();
        let driver = self.try_drive();
        if driver.is_none() {
            // When the progress thread unlocks the lane, it does not look for notes.
            self.surroundings.serve();
        }
        driver
    }

    /// Raises the flag of callers. Only the progress thread calls this, and visits the lane afterwards.
    pub(crate) fn on_callers(&self) {
        self.has_callers.store(true, SeqCst);
        self.tell_leavers();
    }

    pub(crate) fn has_callers(&self) -> bool {
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
