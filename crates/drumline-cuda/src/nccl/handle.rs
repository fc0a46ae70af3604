//! A communicator's handle: no thread uses it after another has given it back.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{PoisonError, RwLock, TryLockError};
use std::time::{Duration, Instant};

use crate::nccl::patience::Patience;
use crate::table::Handle;

/// Keeps a handle while it is used.
#[derive(Debug)]
pub(crate) struct Keeper {
    /// Null when it was given back.
    handle: AtomicPtr<c_void>,
    is_closed: AtomicBool,
    /// Held for reading by whoever is in a call with the handle.
    calls: RwLock<()>,
}

/// So long an abort waits for calls of other threads. They do not wait for other ranks, so they end at once, unless
/// NCCL itself hangs: when a stream that never moves has no more room, for example.
const PATIENCE: Duration = Duration::from_secs(1);

impl Keeper {
    pub(crate) fn new(handle: Handle) -> Keeper {
        Keeper {
            handle: AtomicPtr::new(handle),
            is_closed: AtomicBool::new(false),
            calls: RwLock::new(()),
        }
    }

    /// Calls with the handle. `None`: it is closed or given back.
    pub(crate) fn using<R>(&self, call: impl FnOnce(Handle) -> R) -> Option<R> {
        let _inside = self.calls.read().unwrap_or_else(PoisonError::into_inner);
        let handle = self.handle.load(Ordering::Acquire);
        (!handle.is_null() && !self.is_closed()).then(|| call(handle))
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// Refuses calls from now on, and gives the handle to the first who asks for it. Calls that are under way have ended
    /// then, or hang: what is done with the handle has to free them.
    pub(crate) fn close(&self) -> Option<Handle> {
        self.is_closed.store(true, Ordering::Release);
        let (until, mut patience) = (Instant::now() + PATIENCE, Patience::default());
        let _alone = loop {
            match self.calls.try_write() {
                Ok(alone) => break Some(alone),
                Err(TryLockError::Poisoned(alone)) => break Some(alone.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() > until => break None,
                Err(TryLockError::WouldBlock) => patience.pause(),
            }
        };
        let handle = self.handle.swap(null_mut(), Ordering::AcqRel);
        (!handle.is_null()).then_some(handle)
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::without_provenance_mut;
    use std::sync::Barrier;

    use super::*;

    const HANDLE: usize = 64;

    #[test]
    fn one_thread_gives_it_back_and_nobody_uses_it_then() {
        let keeper = Keeper::new(without_provenance_mut(HANDLE));
        let taken: usize = std::thread::scope(|threads| {
            let all: Vec<_> =
                (0..4).map(|_| threads.spawn(|| usize::from(keeper.close().is_some()))).collect();
            all.into_iter().map(|it| it.join().unwrap()).sum()
        });
        assert_eq!((taken, keeper.using(|_| ())), (1, None));
    }

    #[test]
    fn a_call_that_ends_is_waited_for() {
        let keeper = Keeper::new(without_provenance_mut(HANDLE));
        let (is_inside, has_ended) = (Barrier::new(2), AtomicBool::new(false));
        std::thread::scope(|threads| {
            threads.spawn(|| {
                keeper.using(|_| {
                    is_inside.wait();
                    while !keeper.is_closed() {
                        std::thread::yield_now();
                    }
                    has_ended.store(true, Ordering::Release);
                })
            });
            is_inside.wait();
            assert!(keeper.close().is_some() && has_ended.load(Ordering::Acquire));
        });
    }

    #[test]
    fn a_call_that_hangs_is_not() {
        let keeper = Keeper::new(without_provenance_mut(HANDLE));
        let (is_inside, is_aborted) = (Barrier::new(2), Barrier::new(2));
        std::thread::scope(|threads| {
            threads.spawn(|| {
                keeper.using(|_| {
                    is_inside.wait();
                    is_aborted.wait();
                })
            });
            is_inside.wait();
            assert_eq!(keeper.close().map(<*mut c_void>::addr), Some(HANDLE));
            is_aborted.wait();
        });
    }
}
