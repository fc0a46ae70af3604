//! What tests of several crates share: worlds of threads over every kind of connection, ranks that are processes, hosts,
//! etcd, and the MPIs of this machine. What a test relies on panics if it is not so.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod carrier;
pub mod etcd;
pub mod installed;
mod least;
pub mod log;
pub mod network;
pub mod tacit;

use std::{
    env,
    process::Command,
    sync::{Condvar, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use drumline_group::{CollectiveError, Config, Error, ProcessGroup};
use rustix::time::{ClockId, clock_gettime};

pub use self::{carrier::carried_by, least::Least};

/// Far longer than any test needs: it only tells a hang from slowness.
pub const HANG: Duration = Duration::from_secs(120);

/// This test program again, to run the test with this name alone: a process of a test.
pub fn itself(test: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--include-ignored", "--test-threads=1"]);
    command
}

/// Waits until `condition` holds.
///
/// # Panics
///
/// If that takes longer than [`HANG`]: it says `what`.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < HANG, "waited in vain: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Microseconds on a clock that all processes of the host share.
pub fn now_us() -> i64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec * 1_000_000 + now.tv_nsec / 1_000
}

/// Runs `rank` on a thread for every rank of a world, and returns what they return.
pub fn world_with<R: Send>(
    world_size: usize,
    config: &Config,
    rank: impl Fn(ProcessGroup) -> R + Sync,
) -> Vec<R> {
    on_threads(drumline_group::rendezvous::local_world_with(world_size, config).unwrap(), rank)
}

/// Runs `rank` on a thread for each of `ranks`.
pub fn on_threads<T: Send, R: Send>(ranks: Vec<T>, rank: impl Fn(T) -> R + Sync) -> Vec<R> {
    thread::scope(|threads| {
        let rank = &rank;
        let running: Vec<_> = ranks.into_iter().map(|it| threads.spawn(move || rank(it))).collect();
        running.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Over shared memory, over Unix sockets alone, over TCP.
pub fn everywhere(test: impl Fn(&Config)) {
    everywhere_with(&Config::default(), test);
}

/// [`everywhere`], but with other settings.
pub fn everywhere_with(config: &Config, test: impl Fn(&Config)) {
    for (shared_memory, unix_sockets) in [(true, true), (false, true), (false, false)] {
        // What a failing test shows of its setting.
        println!("shared memory: {shared_memory}, Unix sockets: {unix_sockets}");
        test(&config.clone().shared_memory(shared_memory).unix_sockets(unix_sockets));
    }
}

/// The canonical tree, as it is defined.
pub fn tree<T: Copy>(values: &[T], combine: &impl Fn(T, T) -> T) -> T {
    match values {
        [value] => *value,
        _ => {
            let half = 1 << (values.len() - 1).ilog2();
            combine(tree(&values[..half], combine), tree(&values[half..], combine))
        }
    }
}

/// The sum of `values` by [`tree`].
pub fn tree_sum(values: &[f32]) -> f32 {
    tree(values, &|left, right| left + right)
}

/// The failure behind an error, whether this call or another one failed.
pub fn failure(error: impl Into<Error>) -> CollectiveError {
    let error = error.into();
    error.detail::<CollectiveError>().unwrap_or_else(|| panic!("no failed call: {error}")).clone()
}

/// A barrier of the threads of a test. Those of the standard library wait for ever for a thread that has panicked.
#[derive(Debug)]
pub struct Barrier {
    threads: usize,
    /// How many have come to this meeting, and how many meetings there were.
    come: Mutex<(usize, u64)>,
    over: Condvar,
}

impl Barrier {
    /// For so many threads.
    pub fn new(threads: usize) -> Barrier {
        Barrier { threads, come: Mutex::default(), over: Condvar::new() }
    }

    /// Waits until all threads have come.
    ///
    /// # Panics
    ///
    /// If one has not come within [`HANG`].
    #[track_caller]
    pub fn wait(&self) {
        let mut come = self.come.lock().unwrap_or_else(PoisonError::into_inner);
        come.0 += 1;
        if come.0 == self.threads {
            *come = (0, come.1 + 1);
            self.over.notify_all();
            return;
        }
        let meeting = come.1;
        let wait = self.over.wait_timeout_while(come, HANG, |come| come.1 == meeting);
        let waited = wait.unwrap_or_else(PoisonError::into_inner).1;
        assert!(!waited.timed_out(), "another thread of this test has not come");
    }
}
