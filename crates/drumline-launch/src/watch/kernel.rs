//! Threads that wait in the kernel and cannot be interrupted (state D): `TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT`.
//!
//! A thread is in this state for a moment whenever it reads a disk. One that stays there waits for a disk, a network
//! file system or a device that does not answer. Signals do not reach it, SIGKILL not always.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::process::{Pid, Signal};

use super::{
    finding::Finding,
    guard::{Guard, LOOK_FOR, Ward},
};
use crate::{
    processes::{self, Process},
    waits,
};

/// The longest time between two looks.
const LOOK_EVERY_MAX: Duration = Duration::from_secs(5);

/// The shortest.
const LOOK_EVERY_MIN: Duration = Duration::from_millis(20);

/// Looks at all threads of the workers' processes from time to time.
#[derive(Debug)]
pub(crate) struct KernelGuard {
    limit: Duration,
    every: Duration,
    due: Duration,
    waits: Waits,
}

/// A wait of a thread. The kernel counts how often a thread stops to run, so the next wait has another number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Wait {
    thread: i32,
    number: u64,
}

/// Since when threads wait.
#[derive(Debug, Default)]
struct Waits(BTreeMap<Wait, Duration>);

impl KernelGuard {
    pub(crate) fn new(limit: Duration) -> KernelGuard {
        let every = (limit / 4).clamp(LOOK_EVERY_MIN, LOOK_EVERY_MAX);
        KernelGuard { limit, every, due: every, waits: Waits::default() }
    }
}

impl Guard for KernelGuard {
    fn due(&self) -> Option<Duration> {
        Some(self.due)
    }

    fn look(&mut self, now: Duration, wards: &[Ward]) -> Option<Finding> {
        if now < self.due {
            return None;
        }
        self.due = now + self.every;
        let table = processes::all();
        let living = wards.iter().enumerate().filter(|(_, ward)| ward.lives());
        let seen: Vec<(usize, Wait)> = living
            .flat_map(|(worker, ward)| {
                threads(ward.pid, &table)
                    .into_iter()
                    .filter_map(wait_of)
                    .map(move |it| (worker, it))
            })
            .collect();
        let wait = self.waits.see(now, seen.iter().map(|(_, wait)| *wait), self.limit)?;
        let (worker, _) = *seen.iter().find(|(_, it)| *it == wait)?;
        let (ward, limit) = (&wards[worker], self.limit);
        let places = waits::within(LOOK_FOR, vec![(ward.rank, ward.pid)]);
        Some(Finding {
            worker,
            signal: Signal::KILL,
            how: format!(
                "its thread {} has waited in the kernel for {limit:?}, where it cannot be interrupted \
                 (TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT)",
                wait.thread
            ),
            details: places.into_iter().flat_map(|(_, lines)| lines).collect(),
            is_final: true,
        })
    }
}

impl Waits {
    /// Sees the waits of all threads. Returns one that has lasted for `limit`.
    fn see(
        &mut self,
        now: Duration,
        seen: impl Iterator<Item = Wait>,
        limit: Duration,
    ) -> Option<Wait> {
        let known = std::mem::take(&mut self.0);
        self.0 = seen.map(|wait| (wait, known.get(&wait).copied().unwrap_or(now))).collect();
        let (wait, since) = self.0.iter().min_by_key(|(_, since)| **since)?;
        (now.saturating_sub(*since) >= limit).then_some(*wait)
    }
}

/// The directories of all threads of this process and of those below it.
fn threads(pid: Pid, table: &[Process]) -> Vec<(Pid, PathBuf)> {
    let below = processes::below(pid, table);
    let pids = [pid].into_iter().chain(below.iter().map(|process| process.pid));
    let threads = pids.flat_map(|pid| {
        let tasks = Path::new("/proc").join(pid.to_string()).join("task");
        let ids = processes::numbers_in(&tasks);
        ids.into_iter().map(move |id| (id, tasks.join(id.to_string())))
    });
    threads.collect()
}

/// The wait of a thread that cannot be interrupted. `None`: it runs, or waits in another way.
fn wait_of((id, directory): (Pid, PathBuf)) -> Option<Wait> {
    Process::read_from(&directory, id).filter(|thread| thread.state == 'D')?;
    let status = fs::read_to_string(directory.join("status")).ok()?;
    Some(Wait { thread: id.as_raw_pid(), number: switches(&status)? })
}

/// How often a thread has stopped to run, from the text of `/proc/PID/task/TID/status`. `None`: it is not in state D
/// any more.
fn switches(status: &str) -> Option<u64> {
    let value = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let count = |name| value(name)?.parse::<u64>().ok();
    value("State:").filter(|state| state.starts_with('D'))?;
    Some(count("voluntary_ctxt_switches:")? + count("nonvoluntary_ctxt_switches:")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_long_wait_counts() {
        let wait = |thread, number| Wait { thread, number };
        let at = Duration::from_secs;
        let mut waits = Waits::default();
        let mut see =
            |now, seen: &[Wait]| waits.see(at(now), seen.iter().copied(), Duration::from_secs(10));
        // Thread 1 reads a disk, again and again; thread 2 hangs from second 3 on.
        assert_eq!(see(0, &[wait(1, 5)]), None);
        assert_eq!(see(3, &[wait(1, 6), wait(2, 1)]), None);
        assert_eq!(see(12, &[wait(1, 7), wait(2, 1)]), None);
        assert_eq!(see(13, &[wait(1, 8), wait(2, 1)]), Some(wait(2, 1)));
        assert_eq!(see(14, &[wait(1, 8)]), None);
        assert_eq!(see(30, &[wait(2, 1)]), None, "it ran in between");
    }

    #[test]
    fn a_wait_has_a_number() {
        let text = |state| {
            format!(
                "Name:\tx\nState:\t{state}\nvoluntary_ctxt_switches:\t7\nnonvoluntary_ctxt_switches:\t2\n"
            )
        };
        assert_eq!(switches(&text("D (disk sleep)")), Some(9));
        assert_eq!(switches(&text("S (sleeping)")), None);
        assert_eq!(switches(""), None);
    }
}
