//! Tries all interleavings of submitting, driving, helping and aborting with loom. Needs a build of its own:
//!
//! ```sh
//! RUSTFLAGS="--cfg loom" cargo test -p drumline-group-loom --release --target-dir target/loom
//! ```
#![cfg(loom)]
#![allow(clippy::unwrap_used)]
#![allow(dead_code, reason = "only the crate uses some parts of the module")]

#[path = "../../src/group/drive/handoff.rs"]
mod handoff;

/// As std's: a `try_lock` that fails orders nothing. (loom's own `try_lock` waits for a lock that is taken.)
mod lane_mutex {
    use std::{
        ops::{Deref, DerefMut},
        sync::{LockResult, PoisonError, TryLockError, TryLockResult},
    };

    use loom::{
        sync::{
            Mutex as LoomMutex, MutexGuard as LoomGuard,
            atomic::{
                AtomicBool,
                Ordering::{Acquire, Relaxed, Release},
            },
        },
        thread,
    };

    pub(crate) struct Mutex<T> {
        is_locked: AtomicBool,
        /// Taken while `is_locked`, so no thread ever waits for it.
        data: LoomMutex<T>,
    }

    pub(crate) struct MutexGuard<'a, T> {
        mutex: &'a Mutex<T>,
        data: Option<LoomGuard<'a, T>>,
    }

    impl<T> Mutex<T> {
        pub(crate) fn new(data: T) -> Mutex<T> {
            Mutex { is_locked: AtomicBool::new(false), data: LoomMutex::new(data) }
        }

        pub(crate) fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
            loop {
                match self.try_lock() {
                    Ok(guard) => return Ok(guard),
                    Err(_) => thread::yield_now(),
                }
            }
        }

        pub(crate) fn try_lock(&self) -> TryLockResult<MutexGuard<'_, T>> {
            match self.is_locked.compare_exchange(false, true, Acquire, Relaxed) {
                Ok(_) => Ok(MutexGuard { mutex: self, data: Some(self.data.lock().unwrap()) }),
                Err(_) => Err(TryLockError::WouldBlock),
            }
        }

        pub(crate) fn get_mut(&mut self) -> Result<&mut T, PoisonError<&mut T>> {
            Ok(self.data.get_mut().unwrap())
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            self.data.as_ref().unwrap()
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.data.as_mut().unwrap()
        }
    }

    impl<T> Drop for MutexGuard<'_, T> {
        fn drop(&mut self) {
            // A test that fails is over: loom is not there any more.
            if std::thread::panicking() {
                return;
            }
            self.data = None;
            self.mutex.is_locked.store(false, Release);
        }
    }
}

use handoff::{Drivable, Handoff, Surroundings, Turn};
use loom::sync::{
    Condvar, Mutex,
    atomic::{AtomicBool, Ordering::SeqCst},
};
use loom::thread;
use std::sync::Arc;

/// A lane whose jobs end as soon as it is driven.
#[derive(Default)]
struct TestLane {
    waiting: usize,
    done: usize,
    has_aborted: bool,
    is_over: bool,
}

impl Drivable for TestLane {
    type Job = ();
    type Point = ();

    fn submit(&mut self, (): ()) {
        self.waiting += 1;
    }

    fn post(&mut self, (): ()) {
        self.waiting += 1;
    }

    fn is_busy(&self) -> bool {
        self.waiting > 0
    }

    fn wake_up(&mut self) {}

    fn on_panic(&mut self) {}
}

/// A sleep that others end. If no thread ever ends it, loom reports a deadlock.
struct Bell {
    has_rung: Mutex<bool>,
    rung: Condvar,
}

impl Bell {
    fn new() -> Bell {
        Bell { has_rung: Mutex::new(false), rung: Condvar::new() }
    }

    fn ring(&self) {
        *self.has_rung.lock().unwrap() = true;
        self.rung.notify_one();
    }

    fn sleep(&self) {
        let mut has_rung = self.has_rung.lock().unwrap();
        while !*has_rung {
            has_rung = self.rung.wait(has_rung).unwrap();
        }
        *has_rung = false;
    }
}

#[derive(Clone)]
struct Bells {
    driver: Arc<Bell>,
    progress_thread: Arc<Bell>,
}

impl Surroundings for Bells {
    fn wake(&self) {
        self.driver.ring();
    }

    fn serve(&self) {
        self.progress_thread.ring();
    }
}

struct Group {
    handoff: Handoff<TestLane, Bells>,
    bells: Bells,
    aborted: Arc<AtomicBool>,
}

impl Group {
    fn new() -> Arc<Group> {
        let bells = Bells { driver: Arc::new(Bell::new()), progress_thread: Arc::new(Bell::new()) };
        let aborted = Arc::new(AtomicBool::new(false));
        let handoff = Handoff::new(TestLane::default(), aborted.clone(), bells.clone());
        Arc::new(Group { handoff, bells, aborted })
    }

    /// One turn of any driver.
    fn turn(&self, lane: &mut TestLane) {
        self.handoff.take_mail(lane);
        lane.done += std::mem::take(&mut lane.waiting);
        lane.has_aborted |= self.aborted.load(SeqCst);
    }

    /// The progress thread, until `is_over`.
    fn serve_until(&self, is_over: impl Fn(&TestLane) -> bool) {
        loop {
            self.bells.progress_thread.sleep();
            let Some(mut lane) = self.handoff.visit() else { continue };
            self.turn(&mut lane);
            if is_over(&lane) {
                return;
            }
        }
    }
}

/// A blocking call takes the mail that it finds at its beginning, and leaves. Whatever the moment of the
/// submission, some thread carries the job out.
#[test]
fn work_that_meets_a_leaving_driver_is_taken() {
    loom::model(|| {
        let group = Group::new();
        let caller = group.clone();
        let call = thread::spawn(move || {
            let mut lane = caller.handoff.drive();
            caller.turn(&mut lane);
            let done = lane.done;
            drop(lane);
            if done > 0 {
                // The progress thread of this test ends when it has seen that.
                caller.bells.progress_thread.ring();
            }
        });
        let submitter = group.clone();
        let submit = thread::spawn(move || submitter.handoff.submit(()));
        group.serve_until(|lane| lane.done == 1);
        call.join().unwrap();
        submit.join().unwrap();
    });
}

/// An abort reaches the lane, also where its flag is raised while a driver leaves.
#[test]
fn an_abort_that_meets_a_leaving_driver_is_seen() {
    // All interleavings take minutes. Three threads with three preemptions each take seconds.
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let group = Group::new();
        let caller = group.clone();
        let call = thread::spawn(move || drop(caller.handoff.drive()));
        let aborter = group.clone();
        let abort = thread::spawn(move || {
            if let Some(mut lane) = aborter.handoff.abort() {
                aborter.turn(&mut lane);
                drop(lane);
                aborter.bells.progress_thread.ring();
            }
        });
        group.serve_until(|lane| lane.has_aborted);
        call.join().unwrap();
        abort.join().unwrap();
    });
}

/// A thread that helps while it waits gives way to a blocking call.
#[test]
fn a_helper_gives_way_to_a_blocking_call() {
    loom::model(|| {
        let group = Group::new();
        let helper = group.clone();
        let help = thread::spawn(move || {
            let turn = |lane: &mut TestLane| match lane.is_over {
                true => Turn::Over,
                false => Turn::Stuck,
            };
            helper.handoff.help(turn, |_| helper.bells.driver.sleep());
        });
        group.handoff.drive().is_over = true;
        help.join().unwrap();
    });
}

/// Peers that call a group while a driver leaves are let in.
#[test]
fn callers_that_meet_a_leaving_driver_are_let_in() {
    loom::model(|| {
        let group = Group::new();
        let caller = group.clone();
        let call = thread::spawn(move || drop(caller.handoff.drive()));
        // The progress thread hears of peers, and visits; a driver serves it if it could not.
        group.handoff.on_callers();
        while group.handoff.visit().is_none() {
            group.bells.progress_thread.sleep();
        }
        assert!(!group.handoff.has_callers());
        call.join().unwrap();
    });
}
