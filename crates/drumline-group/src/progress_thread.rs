//! The progress thread, one for each process. It drives the asynchronous calls of all groups.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Instant,
};

use drumline_engine::{Error, Result};
use drumline_shm::{PerProcess, named};
use drumline_store::net::poll::{self, Deadline};
use rustix::event::{PollFd, PollFlags};

use crate::{transport::Waker, work::Later};

/// A group's lane, as the progress thread sees it.
pub(crate) trait Served: Send + Sync {
    /// Brings the calls of the lane as far as possible without waiting.
    fn advance(&self) -> Advance;
    /// Whether peers of other hosts have called and no thread has accepted them.
    fn has_callers(&self) -> bool;
    /// Notes that peers of other hosts have called. The driver of the lane accepts them.
    fn on_callers(&self);
}

/// What [`Served::advance`] has achieved.
pub(crate) enum Advance {
    /// No call is left, but the progress thread must look at the lane again at this time.
    Idle(Option<Instant>),
    /// Another thread drives the lane.
    Taken,
    /// Nothing can be done before this time, unless this descriptor becomes readable.
    Stuck(Instant, Option<Arc<OwnedFd>>),
    /// More can be done at once.
    Moved,
}

/// What is left of a group that this rank has dropped. For a while it tells callers why the group has gone.
pub(crate) trait Linger: Send {
    /// Answers the peers that have called. `false`: the time is over.
    fn progress(&mut self, now: Instant) -> bool;
    /// The latest time for the next [`Linger::progress`], and a descriptor that is readable if it is needed earlier.
    fn news(&self) -> (Instant, Arc<OwnedFd>);
}

/// The progress thread, as other threads see it.
///
/// The thread keeps a group alive until the group's calls have ended, even if all handles are dropped. It
/// lets go of a group that another thread drives (a blocking call, or a thread that waits for a `Work`). That
/// thread calls [`ProgressThread::serve`] when it leaves calls behind.
pub(crate) struct ProgressThread {
    waker: Waker,
    /// Groups that the thread must take over because they have calls.
    arrivals: Mutex<Vec<Arc<dyn Served>>>,
    /// New groups with peers on other hosts. These may call at any time.
    doors: Mutex<Vec<Door>>,
    /// Groups that this process has dropped and that still answer callers.
    lingering: Mutex<Vec<Box<dyn Linger>>>,
}

/// How peers of other hosts reach a group that perhaps no thread drives.
struct Door {
    /// Weak: the progress thread does not keep this group alive.
    group: Weak<dyn Served>,
    /// Readable when a peer calls.
    bell: Arc<OwnedFd>,
    look_again_at: Option<Instant>,
}

/// The progress thread of this process. A forked process starts one of its own.
///
/// # Errors
///
/// [`Io`](crate::ErrorKind::Io) when the thread cannot be started.
pub(crate) fn get() -> Result<&'static ProgressThread> {
    static THREAD: PerProcess<Result<&'static ProgressThread>> = PerProcess::new();
    THREAD.get(ProgressThread::start).clone()
}

fn not_started(error: io::Error) -> Error {
    let what = "cannot start the progress thread".to_owned();
    Error::io(what, error)
}

impl ProgressThread {
    fn start() -> Result<&'static ProgressThread> {
        // Both live as long as the process.
        let this: &'static ProgressThread = Box::leak(Box::new(ProgressThread {
            waker: Waker::new().map_err(not_started)?,
            arrivals: Mutex::default(),
            doors: Mutex::default(),
            lingering: Mutex::default(),
        }));
        std::thread::Builder::new()
            .name("drumline-progress".to_owned())
            .spawn(|| this.run())
            .map_err(named("clone3"))
            .map_err(not_started)?;
        Ok(this)
    }

    /// Drives `group` until it is idle or another thread drives it.
    pub(crate) fn serve(&self, group: Arc<dyn Served>) {
        lock(&self.arrivals).push(group);
        self.waker.wake();
    }

    /// Lets peers of other hosts into `group` even while no thread of this process is in a call. `bell` is
    /// readable when a peer calls.
    pub(crate) fn guard(&self, group: Weak<dyn Served>, bell: Arc<OwnedFd>) {
        lock(&self.doors).push(Door { group, bell, look_again_at: None });
        self.waker.wake();
    }

    /// Lets `group` answer its callers until its time is over.
    pub(crate) fn linger(&self, group: Box<dyn Linger>) {
        lock(&self.lingering).push(group);
        self.waker.wake();
    }

    /// Drops the groups that answer callers, which closes their ports.
    pub(crate) fn end_lingering(&self) {
        lock(&self.lingering).clear();
    }

    /// Lets dropped groups answer callers. Returns when each must go on, and the descriptor that may be
    /// readable earlier.
    fn answer_callers(&self) -> Vec<(Instant, Option<Arc<OwnedFd>>)> {
        let (mut lingering, now) = (lock(&self.lingering), Instant::now());
        lingering.retain_mut(|group| group.progress(now));
        lingering
            .iter()
            .map(|group| group.news())
            .map(|(until, bell)| (until, Some(bell)))
            .collect()
    }

    fn run(&self) -> ! {
        Later::on_a_thread_that_serves();
        let mut groups: Vec<Arc<dyn Served>> = Vec::new();
        let mut doors: Vec<Door> = Vec::new();
        loop {
            // Arrivals after this wake the thread again.
            self.waker.drain();
            doors.append(&mut lock(&self.doors));
            doors.retain(|door| door.group.strong_count() > 0);
            let guarded = doors.iter().filter_map(|door| door.group.upgrade());
            let called: Vec<_> = guarded.filter(|group| group.has_callers()).collect();
            for group in lock(&self.arrivals).drain(..).chain(called) {
                if !groups.iter().any(|known| Arc::ptr_eq(known, &group)) {
                    groups.push(group);
                }
            }
            let mut sleepers = self.answer_callers();
            let mut moved = false;
            groups.retain(|group| match advance(&**group) {
                Advance::Moved => {
                    moved = true;
                    true
                }
                Advance::Stuck(until, readiness) => {
                    sleepers.push((until, readiness));
                    true
                }
                Advance::Idle(look_again_at) => {
                    let mut doors = doors.iter_mut();
                    if let Some(door) = doors.find(|door| door.is_of(group)) {
                        door.look_again_at = look_again_at;
                    }
                    false
                }
                Advance::Taken => false,
            });
            if !moved {
                sleep(&self.waker, &sleepers, &mut doors);
            }
        }
    }
}

impl Door {
    fn is_of(&self, group: &Arc<dyn Served>) -> bool {
        std::ptr::addr_eq(self.group.as_ptr(), Arc::as_ptr(group))
    }
}

/// Advances `group`. A panic (a bug, or a panic in the caller's code) ends this group and not the thread: the
/// next driver finds the lane's lock poisoned.
fn advance(group: &dyn Served) -> Advance {
    catch_unwind(AssertUnwindSafe(|| group.advance())).unwrap_or(Advance::Moved)
}

/// Sleeps until a group can go on or arrives, or a peer calls.
fn sleep(waker: &Waker, sleepers: &[(Instant, Option<Arc<OwnedFd>>)], doors: &mut [Door]) {
    // A door with callers is left out, because its bell stays readable until the driver lets them in.
    let is_silent = |door: &&mut Door| door.group.upgrade().is_some_and(|it| !it.has_callers());
    let mut doors: Vec<&mut Door> = doors.iter_mut().filter(is_silent).collect();
    let bells = doors.iter().map(|door| door.bell.clone()).collect::<Vec<_>>();
    let readable = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
    let mut interests = vec![readable(waker.as_fd())];
    interests.extend(bells.iter().map(|bell| readable(bell.as_fd())));
    let readiness = sleepers.iter().filter_map(|(_, readiness)| readiness.as_ref());
    interests.extend(readiness.map(|readiness| readable(readiness.as_fd())));
    let again = doors.iter().filter_map(|door| door.look_again_at);
    let until = sleepers.iter().map(|(until, _)| *until).chain(again).min();
    if let Err(error) = poll::wait(&mut interests, Deadline::from(until)) {
        tracing::error!(%error, "the progress thread cannot wait");
    }
    let now = Instant::now();
    for (door, interest) in doors.iter_mut().zip(&interests[1..]) {
        if !interest.revents().is_empty() || door.look_again_at.is_some_and(|at| now >= at) {
            door.look_again_at = None;
            door.group.upgrade().iter().for_each(|group| group.on_callers());
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
