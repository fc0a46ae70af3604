//! The thread on which asynchronous operations go on: one per process, for all groups.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
    time::{Duration, Instant},
};

use drumline_engine::{Error, Result};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{Pid, getpid},
};

use crate::{
    group::Driven,
    transport::{Lingering, Waker},
};

/// The progress thread, as others see it.
///
/// The thread keeps a group, and so keeps it alive, until its operations have ended, even if all
/// handles are dropped. It lets go of a group that somebody else drives at the moment (a blocking
/// call, or a thread that waits for a `Work`): whoever drives it calls [`Engine::serve`] in the
/// end if there is more to do.
pub(crate) struct Engine {
    waker: Waker,
    /// Groups that have something to do, for the thread to take over.
    arrivals: Mutex<Vec<Arc<Driven>>>,
    /// New groups with peers on other hosts, which may come at any time.
    doors: Mutex<Vec<Door>>,
    /// Groups that were dropped just now.
    lingering: Mutex<Vec<Lingering>>,
}

/// Where peers of other hosts come in, while nobody may be driving their group.
struct Door {
    /// The thread does not keep such a group alive.
    group: Weak<Driven>,
    /// Readable when somebody comes.
    bell: Arc<OwnedFd>,
    look_again_at: Option<Instant>,
}

/// The engine of this process. A fork of a process that has one starts its own: the thread of the
/// other is not there. (Nor may it need a lock, which another thread may have held at the fork.)
///
/// # Errors
///
/// When its thread cannot be started.
pub(crate) fn get() -> Result<&'static Engine> {
    static FIRST: OnceLock<Box<Generation>> = OnceLock::new();
    let process = getpid();
    let mut generation = FIRST.get_or_init(|| Generation::of(process));
    while generation.process != process {
        generation = generation.next.get_or_init(|| Generation::of(process));
    }
    generation.engine.clone()
}

/// The engine of a process; `next` is that of its fork.
struct Generation {
    process: Pid,
    engine: Result<&'static Engine>,
    next: OnceLock<Box<Generation>>,
}

impl Generation {
    fn of(process: Pid) -> Box<Generation> {
        Box::new(Generation { process, engine: Engine::start(), next: OnceLock::new() })
    }
}

fn not_started(source: io::Error) -> Error {
    let what = "cannot start the progress thread".to_owned();
    Error::Io { what, source: Arc::new(source) }
}

/// How far a group has come.
pub(crate) enum Advance {
    /// Nothing is left to do, but to look again at this time.
    Idle(Option<Instant>),
    /// Somebody else drives it.
    Taken,
    /// Nothing can be done before this time, unless this descriptor becomes readable.
    Stuck(Instant, Arc<OwnedFd>),
    /// There is more to do.
    Moved,
}

impl Engine {
    fn start() -> Result<&'static Engine> {
        // It lives as long as the process, like its thread.
        let engine: &'static Engine = Box::leak(Box::new(Engine {
            waker: Waker::new().map_err(not_started)?,
            arrivals: Mutex::default(),
            doors: Mutex::default(),
            lingering: Mutex::default(),
        }));
        std::thread::Builder::new()
            .name("drumline-engine".to_owned())
            .spawn(|| engine.run())
            .map_err(not_started)?;
        Ok(engine)
    }

    /// Sees to it that what `group` has to do goes on.
    pub(crate) fn serve(&self, group: &Arc<Driven>) {
        self.arrivals().push(group.clone());
        self.waker.wake();
    }

    /// Sees to it that peers on other hosts are let in, whatever the threads of this process do.
    /// `bell` is readable when somebody comes.
    pub(crate) fn guard(&self, group: &Arc<Driven>, bell: Arc<OwnedFd>) {
        let door = Door { group: Arc::downgrade(group), bell, look_again_at: None };
        self.new_doors().push(door);
        self.waker.wake();
    }

    /// Lets peers that call a group in vain hear why, for a while.
    pub(crate) fn linger(&self, group: Lingering) {
        self.lingering().push(group);
        self.waker.wake();
    }

    /// Gives up the ports of groups that were dropped.
    pub(crate) fn end_lingering(&self) {
        self.lingering().clear();
    }

    fn lingering(&self) -> MutexGuard<'_, Vec<Lingering>> {
        self.lingering.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn new_doors(&self) -> MutexGuard<'_, Vec<Door>> {
        self.doors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn arrivals(&self) -> MutexGuard<'_, Vec<Arc<Driven>>> {
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells those who have called a group that was dropped; when and on what to go on.
    fn tell_why(&self) -> Vec<(Instant, Arc<OwnedFd>)> {
        let (mut lingering, now) = (self.lingering(), Instant::now());
        lingering.retain_mut(|group| group.progress(now));
        lingering.iter().map(Lingering::news).collect()
    }

    fn run(&self) -> ! {
        let mut groups: Vec<Arc<Driven>> = Vec::new();
        let mut doors: Vec<Door> = Vec::new();
        loop {
            // What arrives after this wakes the thread again.
            self.waker.drain();
            doors.append(&mut self.new_doors());
            doors.retain(|door| door.group.strong_count() > 0);
            let guarded = doors.iter().filter_map(|door| door.group.upgrade());
            let callers: Vec<_> = guarded.filter(|group| group.has_callers()).collect();
            for group in self.arrivals().drain(..).chain(callers) {
                if !groups.iter().any(|known| Arc::ptr_eq(known, &group)) {
                    groups.push(group);
                }
            }
            let mut sleepers = self.tell_why();
            let mut moved = false;
            groups.retain(|group| match advance(group) {
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
    fn is_of(&self, group: &Arc<Driven>) -> bool {
        std::ptr::eq(self.group.as_ptr(), Arc::as_ptr(group))
    }
}

/// A panic (a bug, or one in code of the caller's) ends its group and not this thread: the next
/// one who looks at the group finds it poisoned.
fn advance(group: &Arc<Driven>) -> Advance {
    catch_unwind(AssertUnwindSafe(|| group.advance())).unwrap_or(Advance::Moved)
}

/// Sleeps until one of the groups can go on, or another one or a caller arrives.
fn sleep(waker: &Waker, sleepers: &[(Instant, Arc<OwnedFd>)], doors: &mut [Door]) {
    // Where callers wait for whoever drives their group, the bell rings until that thread looks.
    let is_silent = |door: &&mut Door| door.group.upgrade().is_some_and(|it| !it.has_callers());
    let mut doors: Vec<&mut Door> = doors.iter_mut().filter(is_silent).collect();
    let mut interests = vec![PollFd::from_borrowed_fd(waker.as_fd(), PollFlags::IN)];
    let bells = doors.iter().map(|door| door.bell.clone()).collect::<Vec<_>>();
    for descriptor in bells.iter().chain(sleepers.iter().map(|(_, readiness)| readiness)) {
        interests.push(PollFd::from_borrowed_fd(descriptor.as_fd(), PollFlags::IN));
    }
    let again = doors.iter().filter_map(|door| door.look_again_at);
    let until = sleepers.iter().map(|(until, _)| *until).chain(again).min();
    // A day at a time keeps the conversion from overflowing.
    let left = until.map_or(Duration::from_secs(86_400), |until| {
        until.saturating_duration_since(Instant::now()).min(Duration::from_secs(86_400))
    });
    let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
    match poll(&mut interests, Some(&timeout)) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => tracing::error!(%error, "the progress thread cannot wait"),
    }
    let now = Instant::now();
    for (door, interest) in doors.iter_mut().zip(&interests[1..]) {
        if !interest.revents().is_empty() || door.look_again_at.is_some_and(|at| now >= at) {
            door.look_again_at = None;
            door.group.upgrade().iter().for_each(|group| group.on_callers());
        }
    }
}
