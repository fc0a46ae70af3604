//! Tries all interleavings of submitting, driving, helping and aborting with loom. Needs a build of its own:
//!
//! ```sh
//! RUSTFLAGS="--cfg loom" cargo test -p drumline-loom --release --target-dir target/loom
//! ```
#![cfg(loom)]
#![allow(clippy::unwrap_used)]

#[allow(dead_code, unreachable_pub, reason = "it is a module of another crate")]
#[path = "../../drumline-engine/src/handoff.rs"]
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

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use handoff::{Aside, Drivable, Driver, Handoff, Surroundings, Turn};
use loom::{
    sync::{
        Condvar, Mutex,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread::{self, JoinHandle},
};

/// A lane that notes what its drivers bring to it.
#[derive(Default)]
struct Lane {
    jobs: Vec<u32>,
    points: Vec<u32>,
    errands: Vec<u32>,
    /// Whether an errand was carried out.
    has_answered: Arc<AtomicBool>,
    /// Whether a call has begun, whose thread alone goes on with it.
    has_begun: bool,
    /// Whether an operation is under way that waits for a peer.
    is_busy: bool,
    is_aborted: bool,
}

impl Drivable for Lane {
    type Job = u32;
    type Point = u32;
    type Errand = u32;

    fn submit(&mut self, job: u32) {
        self.jobs.push(job);
    }

    fn post(&mut self, point: u32) {
        self.points.push(point);
    }

    fn carry_out(&mut self, errand: u32) {
        self.errands.push(errand);
        self.has_answered.store(true, SeqCst);
    }

    fn is_busy(&self) -> bool {
        self.is_busy
    }

    fn wake_up(&mut self) {}

    fn on_panic(&mut self) {}
}

/// Stands for an eventfd and the `poll` that sleeps on it.
#[derive(Default)]
struct Bell {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    is_rung: bool,
    has_ended: bool,
}

impl Bell {
    fn ring(&self) {
        self.state.lock().unwrap().is_rung = true;
        self.changed.notify_all();
    }

    /// No thread will ring any more.
    fn end(&self) {
        self.state.lock().unwrap().has_ended = true;
        self.changed.notify_all();
    }

    fn drain(&self) -> bool {
        std::mem::take(&mut self.state.lock().unwrap().is_rung)
    }

    /// Sleeps until the bell has rung, and silences it. If no thread rings, loom reports a deadlock.
    /// `false`: no ring is left and none will come.
    fn wait(&self) -> bool {
        let mut state = self.state.lock().unwrap();
        while !state.is_rung && !state.has_ended {
            state = self.changed.wait(state).unwrap();
        }
        std::mem::take(&mut state.is_rung)
    }
}

#[derive(Default)]
struct Bells {
    /// The lane's waker.
    waker: Bell,
    /// Calls the progress thread.
    arrivals: Bell,
}

impl Surroundings for Arc<Bells> {
    fn wake(&self) {
        self.waker.ring();
    }

    fn serve(&self) {
        self.arrivals.ring();
    }
}

struct Group {
    handoff: Handoff<Lane, Arc<Bells>>,
    aborted: Arc<AtomicBool>,
    bells: Arc<Bells>,
}

impl Group {
    fn new(lane: Lane) -> Arc<Group> {
        let (aborted, bells) = (Arc::new(AtomicBool::new(false)), Arc::new(Bells::default()));
        let handoff = Handoff::new(lane, aborted.clone(), bells.clone());
        Arc::new(Group { handoff, aborted, bells })
    }

    /// A driver's look at its notes.
    fn turn(&self, lane: &mut Lane) {
        self.handoff.take_mail(lane);
        lane.is_aborted |= self.aborted.load(SeqCst);
    }

    fn drive(&self) -> Driver<'_, Lane, Arc<Bells>> {
        // loom's clock stands still.
        let never = Instant::now() + Duration::from_secs(3600);
        let wait = || self.handoff.wait(never, |_| false);
        self.handoff.try_drive().map_or_else(wait, Ok).unwrap()
    }

    /// A blocking call.
    fn call(&self) {
        let mut lane = self.drive();
        assert!(!lane.has_begun, "two calls at a time");
        self.turn(&mut lane);
    }

    /// A blocking call that runs foreign code as it waits.
    fn call_and_run(&self, foreign: impl FnOnce(&Group)) {
        let mut lane = self.drive();
        lane.has_begun = true;
        let thread = std::thread::current().id();
        let aside = Aside { thread, call: String::new(), has_begun: true };
        let mut lane = self.handoff.outside(lane, aside, || foreign(self));
        lane.has_begun = false;
        self.turn(&mut lane);
    }

    fn abort(&self) {
        if let Some(mut lane) = self.handoff.abort() {
            self.turn(&mut lane);
        }
    }

    /// What the progress thread does when it was called. It lets go of a lane that another thread
    /// drives.
    fn visit(&self) {
        if let Some(mut visit) = self.handoff.visit() {
            self.bells.waker.drain();
            let (lane, is_aside) = visit.lane();
            assert_eq!(lane.has_begun, is_aside);
            match is_aside {
                true => self.handoff.take_points(lane),
                false => self.handoff.take_mail(lane),
            }
            lane.is_aborted |= self.aborted.load(SeqCst);
        }
    }

    /// The progress thread, until [`Group::end`].
    fn progress_thread(&self) {
        while self.bells.arrivals.wait() {
            self.visit();
        }
    }

    fn spawn(self: &Arc<Self>, run: fn(&Group)) -> JoinHandle<()> {
        let group = self.clone();
        thread::spawn(move || run(&group))
    }

    /// Waits for `threads`, ends the progress thread after the last visit to which they have called
    /// it, and returns the lane.
    fn end(self: Arc<Self>, threads: Vec<JoinHandle<()>>, progress: JoinHandle<()>) -> Lane {
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        self.bells.arrivals.end();
        progress.join().unwrap();
        let mut group = Arc::into_inner(self).unwrap();
        assert!(!group.handoff.has_callers(), "callers stand before the door");
        std::mem::take(group.handoff.lane_mut())
    }
}

/// All interleavings of three threads would take hours. Those with up to three preemptions take
/// seconds.
fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

#[test]
fn work_left_in_the_inbox_is_taken() {
    check(|| {
        let group = Group::new(Lane::default());
        let progress = group.spawn(Group::progress_thread);
        let submitting = group.spawn(|group| {
            group.handoff.submit(1);
            group.handoff.post(2);
        });
        group.call();
        let lane = group.end(vec![submitting], progress);
        assert_eq!((lane.jobs, lane.points), (vec![1], vec![2]));
    });
}

/// A driver that runs an operation takes the messages and leaves the jobs for later.
#[test]
fn jobs_behind_messages_are_taken() {
    check(|| {
        let group = Group::new(Lane::default());
        let progress = group.spawn(Group::progress_thread);
        let submitting = group.spawn(|group| {
            group.handoff.submit(1);
            group.handoff.post(2);
        });
        group.handoff.take_points(&mut group.drive());
        let lane = group.end(vec![submitting], progress);
        assert_eq!((lane.jobs, lane.points), (vec![1], vec![2]));
    });
}

#[test]
fn an_abort_reaches_the_lane() {
    check(|| {
        let group = Group::new(Lane::default());
        let progress = group.spawn(Group::progress_thread);
        let aborting = group.spawn(Group::abort);
        group.call();
        assert!(group.end(vec![aborting], progress).is_aborted);
    });
}

#[test]
fn an_abort_reaches_a_driver_that_takes_mail() {
    check(|| {
        let group = Group::new(Lane::default());
        let progress = group.spawn(Group::progress_thread);
        group.handoff.submit(1);
        let aborting = group.spawn(Group::abort);
        group.call();
        let lane = group.end(vec![aborting], progress);
        assert!(lane.is_aborted && lane.jobs == [1]);
    });
}

/// The progress thread visits a lane and finds nothing to do.
#[test]
fn an_abort_during_a_visit_reaches_the_lane() {
    check(|| {
        let group = Group::new(Lane::default());
        group.bells.arrivals.ring();
        let progress = group.spawn(Group::progress_thread);
        group.abort();
        assert!(group.end(Vec::new(), progress).is_aborted);
    });
}

#[test]
fn callers_are_let_in() {
    check(|| {
        let group = Group::new(Lane::default());
        let progress = group.spawn(|group| {
            group.handoff.on_callers();
            group.visit();
            group.progress_thread();
        });
        group.call();
        group.end(Vec::new(), progress);
    });
}

#[test]
fn a_helper_that_sleeps_takes_new_work() {
    check(|| {
        let group = Group::new(Lane::default());
        let progress = group.spawn(Group::progress_thread);
        let submitting = group.spawn(|group| group.handoff.submit(1));
        let turn = |lane: &mut Lane| {
            group.turn(lane);
            if lane.jobs.is_empty() { Turn::Stuck } else { Turn::Over }
        };
        group.handoff.help(turn, |_| group.bells.waker.wait());
        assert_eq!(group.end(vec![submitting], progress).jobs, [1]);
    });
}

#[test]
fn a_helper_makes_room_for_a_blocking_call() {
    check(|| {
        let group = Group::new(Lane { is_busy: true, ..Lane::default() });
        let progress = group.spawn(Group::progress_thread);
        let calling = group.spawn(|group| {
            group.drive().is_busy = false;
        });
        let mut has_moved = false;
        let turn = |lane: &mut Lane| match lane.is_busy {
            true if std::mem::replace(&mut has_moved, true) => Turn::Stuck,
            true => Turn::Moved,
            false => Turn::Idle,
        };
        assert!(!group.handoff.help(turn, |_| group.bells.waker.wait()));
        group.end(vec![calling], progress);
    });
}

/// The thread that waits for an errand may be the progress thread, so nobody else serves the lane.
#[test]
fn an_errand_waits_for_no_other_thread() {
    check(|| {
        let has_answered = Arc::new(AtomicBool::new(false));
        let group = Group::new(Lane { has_answered: has_answered.clone(), ..Lane::default() });
        let calling = group.spawn(Group::call);
        let never = Instant::now() + Duration::from_secs(3600);
        group.handoff.await_errand(1, never, || has_answered.load(SeqCst));
        assert!(has_answered.load(SeqCst));
        calling.join().unwrap();
    });
}

/// Each waits for the lane while another has it, and no driver leaves without telling them.
#[test]
fn calls_take_turns() {
    check(|| {
        let group = Group::new(Lane::default());
        group.bells.arrivals.ring();
        let progress = group.spawn(Group::progress_thread);
        let calling = group.spawn(Group::call);
        group.call();
        group.end(vec![calling], progress);
    });
}

/// A call waits until one that is set aside has ended.
#[test]
fn no_call_runs_beside_one_that_is_set_aside() {
    check(|| {
        let group = Group::new(Lane::default());
        let progress = group.spawn(Group::progress_thread);
        let calling = group.spawn(Group::call);
        group.call_and_run(|_| {});
        group.end(vec![calling], progress);
    });
}

/// Foreign code leaves notes, and waits for what the progress thread does with them.
#[test]
fn notes_reach_a_lane_that_is_set_aside() {
    check(|| {
        let group = Group::new(Lane::default());
        let progress = group.spawn(Group::progress_thread);
        group.call_and_run(|group| {
            group.handoff.post(1);
            group.handoff.send(2);
            group.handoff.submit(3);
            while group.handoff.reach().is_none_or(|lane| lane.points.is_empty()) {
                thread::yield_now();
            }
        });
        let lane = group.end(Vec::new(), progress);
        assert_eq!((lane.points, lane.errands, lane.jobs), (vec![1], vec![2], vec![3]));
    });
}

#[test]
fn an_abort_reaches_a_lane_that_is_set_aside() {
    check(|| {
        let group = Group::new(Lane::default());
        let progress = group.spawn(Group::progress_thread);
        let aborting = group.spawn(Group::abort);
        group.call_and_run(|_| {});
        assert!(group.end(vec![aborting], progress).is_aborted);
    });
}

/// The progress thread goes on with what a driver leaves unfinished.
#[test]
fn unfinished_work_goes_to_the_progress_thread() {
    check(|| {
        let group = Group::new(Lane::default());
        let calling = group.spawn(|group| group.drive().is_busy = true);
        group.call();
        calling.join().unwrap();
        assert!(group.bells.arrivals.drain());
    });
}
