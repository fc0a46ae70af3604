//! Near or far: how long a word takes from one core to another.
//!
//! Cores that share a cache hand a word over several times as fast as other cores. On a virtual machine
//! two cores may change from one state to the other within a second. Figures of different states cannot
//! be compared, so every figure shows the hand-over time of its minutes.

use std::{
    hint, iter,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use drumline::{ProcessGroup, Result};
use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// Round trips of one sample, and the number of samples.
const TURNS: u64 = 50;
const SAMPLES: usize = 41;

/// The probe gives up after this time.
const LIMIT: Duration = Duration::from_millis(50);

/// How long 8 bytes take from the core of rank 0 to the core of rank 1, in nanoseconds. Rank 0 measures
/// while the other ranks wait. `None` on other ranks, and if the two ranks are on different hosts.
pub(super) fn hand_over(group: &ProcessGroup, hosts: &[u64]) -> Result<Option<f64>> {
    let mut cores = vec![0_u64; group.world_size()];
    group.all_gather(&[sched_getcpu() as u64], &mut cores)?;
    let is_here = hosts.len() > 1 && hosts[0] == hosts[1];
    let found = match (group.rank(), cores.get(..2)) {
        (0, Some(&[mine, other])) if is_here => between(mine as usize, other as usize),
        _ => None,
    };
    group.barrier()?;
    Ok(found)
}

/// The median of many samples between the cores `mine` and `other`. If they are the same core, another
/// usable core takes the place of `other`; `None` without such a core.
fn between(mine: usize, other: usize) -> Option<f64> {
    let allowed = sched_getaffinity(None).ok()?;
    let mut others = iter::once(other).chain(0..CpuSet::MAX_CPU);
    let other = others.find(|&core| core != mine && allowed.is_set(core))?;
    let word = AtomicU64::new(0);
    let start = Instant::now();
    let late = || start.elapsed() > LIMIT;
    thread::scope(|threads| {
        threads.spawn(|| {
            pin(other);
            for turn in 0..TURNS * SAMPLES as u64 {
                if !wait(&word, 2 * turn + 1, &late) {
                    return;
                }
                word.store(2 * turn + 2, Ordering::Release);
            }
        });
        let timing = threads.spawn(|| {
            pin(mine);
            let mut samples = Vec::with_capacity(SAMPLES);
            for sample in 0..SAMPLES as u64 {
                let start = Instant::now();
                for turn in sample * TURNS..(sample + 1) * TURNS {
                    word.store(2 * turn + 1, Ordering::Release);
                    if !wait(&word, 2 * turn + 2, &late) {
                        return samples;
                    }
                }
                samples.push(start.elapsed().as_secs_f64() * 1e9 / (2 * TURNS) as f64);
            }
            samples
        });
        let mut samples = timing.join().ok()?;
        samples.sort_by(f64::total_cmp);
        samples.get(samples.len() / 2).copied()
    })
}

/// Binds this thread to a core. If that fails, the figure is for the cores that the threads are on.
fn pin(core: usize) {
    let mut cores = CpuSet::new();
    cores.set(core);
    let _ = sched_setaffinity(None, &cores);
}

/// Waits for `value`. Returns whether it came in time.
fn wait(word: &AtomicU64, value: u64, late: &impl Fn() -> bool) -> bool {
    let mut spins = 0_u32;
    while word.load(Ordering::Acquire) != value {
        hint::spin_loop();
        spins += 1;
        if spins.is_multiple_of(1 << 14) && late() {
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_handed_over_where_there_are_two_cores() {
        let cores = sched_getaffinity(None).unwrap().count();
        let found = between(sched_getcpu(), sched_getcpu());
        if cores < 2 {
            assert_eq!(found, None);
        } else if let Some(ns) = found {
            assert!(ns > 0.0, "{ns}");
        }
    }
}
