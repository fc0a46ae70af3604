//! The thread on which asynchronous operations go on: one per process, for all groups.

use std::{
    os::fd::{AsFd, OwnedFd},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};

use crate::{Error, Result, group::Driven, transport::Waker};

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
}

/// The engine of this process.
///
/// # Errors
///
/// When its thread cannot be started.
pub(crate) fn get() -> Result<&'static Engine> {
    static ENGINE: OnceLock<Result<&'static Engine>> = OnceLock::new();
    ENGINE.get_or_init(Engine::start).clone()
}

/// How far a group has come.
pub(crate) enum Advance {
    /// Nothing is left to do.
    Idle,
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
        let engine: &'static Engine =
            Box::leak(Box::new(Engine { waker: Waker::new()?, arrivals: Mutex::default() }));
        std::thread::Builder::new()
            .name("drumline-engine".to_owned())
            .spawn(|| engine.run())
            .map_err(|source| Error::io("cannot start the progress thread", source))?;
        Ok(engine)
    }

    /// Sees to it that what `group` has to do goes on.
    pub(crate) fn serve(&self, group: &Arc<Driven>) {
        self.arrivals().push(group.clone());
        self.waker.wake();
    }

    fn arrivals(&self) -> MutexGuard<'_, Vec<Arc<Driven>>> {
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) -> ! {
        let mut groups: Vec<Arc<Driven>> = Vec::new();
        loop {
            // What arrives after this wakes the thread again.
            self.waker.drain();
            for group in self.arrivals().drain(..) {
                if !groups.iter().any(|known| Arc::ptr_eq(known, &group)) {
                    groups.push(group);
                }
            }
            let mut sleepers = Vec::new();
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
                Advance::Taken | Advance::Idle => false,
            });
            if !moved {
                sleep(&self.waker, &sleepers);
            }
        }
    }
}

/// A panic (a bug, or one in code of the caller's) ends its group and not this thread: the next
/// one who looks at the group finds it poisoned.
fn advance(group: &Arc<Driven>) -> Advance {
    catch_unwind(AssertUnwindSafe(|| group.advance())).unwrap_or(Advance::Moved)
}

/// Sleeps until one of the groups can go on, or another one arrives.
fn sleep(waker: &Waker, sleepers: &[(Instant, Arc<OwnedFd>)]) {
    let mut interests = vec![PollFd::from_borrowed_fd(waker.as_fd(), PollFlags::IN)];
    for (_, readiness) in sleepers {
        interests.push(PollFd::from_borrowed_fd(readiness.as_fd(), PollFlags::IN));
    }
    let until = sleepers.iter().map(|(until, _)| *until).min();
    // A day at a time keeps the conversion from overflowing.
    let left = until.map_or(Duration::from_secs(86_400), |until| {
        until.saturating_duration_since(Instant::now()).min(Duration::from_secs(86_400))
    });
    let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
    match poll(&mut interests, Some(&timeout)) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => tracing::error!(%error, "the progress thread cannot wait"),
    }
}
