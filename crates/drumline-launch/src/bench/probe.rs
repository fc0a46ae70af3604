//! Near or far: how long a word takes from one core to another.
//!
//! Cores that share a cache hand a word over several times as fast as cores that do not, and on a
//! virtual machine that may change from one second to the next. Figures of different states say
//! nothing about each other, so every figure has this one beside it.

use std::{
    hint, iter,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use drumline::{ProcessGroup, Result};
use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// Ways there and back in one sample, and samples.
const TURNS: u64 = 50;
const SAMPLES: usize = 41;

/// The others are asleep by then.
const LIMIT: Duration = Duration::from_millis(50);

/// How long 8 bytes take from the core of rank 0 to that of rank 1, in nanoseconds, as rank 0 has
/// found out while the others sleep; `None` on other ranks, and where these two are on several
/// hosts or one core.
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

/// The median of many samples between two cores: those, or others if these are one.
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

/// Where this fails, the figure is that of wherever the threads are.
fn pin(core: usize) {
    let mut cores = CpuSet::new();
    cores.set(core);
    let _ = sched_setaffinity(None, &cores);
}

/// Whether the word came in time.
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
