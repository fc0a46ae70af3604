//! Ranks that begin a step and then no other: `--step-timeout`.

use std::time::Duration;

use drumline::{
    steps::keys,
    store::{Store, tcp::TcpStore},
};
use rustix::process::Signal;

use super::{
    finding::Finding,
    guard::{Guard, LOOK_FOR, Ward},
};
use crate::{Result, groups::Groups, monitor::Monitor, waits};

/// The longest time between two looks.
const LOOK_EVERY_MAX: Duration = Duration::from_secs(1);

/// The shortest.
const LOOK_EVERY_MIN: Duration = Duration::from_millis(20);

/// Hears of the steps through the store of the world.
#[derive(Debug)]
pub(crate) struct StepGuard {
    store: Box<dyn Store>,
    /// The key with the last step of each worker.
    keys: Vec<String>,
    /// `None`: the steps are only told to the monitor.
    limit: Option<Duration>,
    monitor: Monitor,
    every: Duration,
    due: Duration,
    /// What each worker has begun. `None`: it has told no step.
    begun: Vec<Option<Begun>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Begun {
    step: u64,
    at: Duration,
}

impl StepGuard {
    /// Asks the workers, which start after this, to tell their steps.
    pub(crate) fn before(
        workers: usize,
        limit: Option<Duration>,
        monitor: &Monitor,
        store: &TcpStore,
    ) -> Result<StepGuard> {
        let store = store.try_clone()?;
        let every = limit.map_or(LOOK_EVERY_MAX, |limit| limit / 10);
        let every = every.clamp(LOOK_EVERY_MIN, LOOK_EVERY_MAX);
        let keys: Vec<String> = (0..workers).map(|n| format!("{}{n}", keys::LAST)).collect();
        // All keys exist, so one request reads them, and it never waits.
        let empty: Vec<(&str, &[u8])> = keys.iter().map(|key| (key.as_str(), &[][..])).collect();
        store.multi_set(&empty)?;
        store.set(keys::EVERY, every.as_millis().to_string().as_bytes())?;
        let begun = vec![None; workers];
        let monitor = monitor.clone();
        Ok(StepGuard { store, keys, limit, monitor, every, due: every, begun })
    }

    /// The last step of each worker. `None` while the launcher holds the workers, which tell nothing then.
    fn told(&self) -> Option<Vec<Option<u64>>> {
        if self.store.check(&[keys::ASK]).unwrap_or(true) {
            return None;
        }
        let keys: Vec<&str> = self.keys.iter().map(String::as_str).collect();
        let number = |text: Vec<u8>| std::str::from_utf8(&text).ok()?.parse().ok();
        Some(self.store.multi_get(&keys).ok()?.into_iter().map(number).collect())
    }
}

impl Guard for StepGuard {
    fn due(&self) -> Option<Duration> {
        Some(self.due)
    }

    fn look(&mut self, now: Duration, wards: &[Ward]) -> Option<Finding> {
        if now < self.due {
            return None;
        }
        self.due = now + self.every;
        let Some(steps) = self.told() else {
            self.begun.fill(None);
            return None;
        };
        self.monitor.tell_steps(&steps);
        let limit = self.limit?;
        hear(&mut self.begun, now, &steps);
        let lives = |worker: usize| wards.get(worker).is_some_and(Ward::lives);
        let worker = overdue(&self.begun, now, limit, lives)?;
        let Begun { step, .. } = self.begun[worker]?;
        // Several ranks that hang in one step mostly wait for each other: who does not is seen in its threads.
        let alike = wards.iter().zip(&self.begun).enumerate().filter(|(other, (ward, begun))| {
            *other != worker && begun.is_some_and(|it| it.step == step) && ward.lives()
        });
        let alike = alike.map(|(_, (ward, _))| ward);
        let asked: Vec<_> =
            wards.get(worker).into_iter().chain(alike).map(|it| (it.rank, it.pid)).collect();
        let details = [format!("the last steps that ranks began: {}", shown(&self.begun, wards))];
        let places = waits::within(LOOK_FOR, asked).into_iter().flat_map(|(rank, lines)| {
            lines.into_iter().map(move |line| format!("rank {rank}: {line}"))
        });
        Some(Finding {
            worker,
            signal: Signal::KILL,
            how: format!("it began step {step} and no other within {limit:?} (--step-timeout)"),
            details: details.into_iter().chain(places).collect(),
        })
    }
}

/// Notes the last steps that the workers have told.
fn hear(begun: &mut [Option<Begun>], now: Duration, steps: &[Option<u64>]) {
    for (begun, told) in begun.iter_mut().zip(steps) {
        match *told {
            Some(step) if begun.is_none_or(|it| it.step != step) => {
                *begun = Some(Begun { step, at: now });
            }
            _ => {}
        }
    }
}

/// Of the living workers that have begun no step for `limit`: the one that is most behind.
fn overdue(
    begun: &[Option<Begun>],
    now: Duration,
    limit: Duration,
    lives: impl Fn(usize) -> bool,
) -> Option<usize> {
    let begun = begun.iter().enumerate().filter_map(|(worker, begun)| Some((worker, (*begun)?)));
    let late = begun.filter(|(worker, it)| now.saturating_sub(it.at) >= limit && lives(*worker));
    late.min_by_key(|(_, it)| (it.step, it.at)).map(|(worker, _)| worker)
}

/// `1 (17); 0, 2-3 (18)`.
fn shown(begun: &[Option<Begun>], wards: &[Ward]) -> Groups {
    let told =
        wards.iter().zip(begun).filter_map(|(ward, it)| Some((it.as_ref()?.step, ward.rank)));
    let mut told: Vec<(u64, usize)> = told.collect();
    told.sort_unstable();
    let mut groups = Groups::default();
    told.into_iter().for_each(|(step, rank)| groups.add(rank, step.to_string()));
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    const LIMIT: Duration = Duration::from_secs(10);

    #[test]
    fn the_rank_that_is_most_behind_hangs() {
        let mut begun = vec![None; 4];
        hear(&mut begun, at(1), &[Some(4), Some(4), Some(4), None]);
        hear(&mut begun, at(2), &[Some(5), Some(4), Some(5), None]);
        assert_eq!(overdue(&begun, at(10), LIMIT, |_| true), None);
        assert_eq!(overdue(&begun, at(11), LIMIT, |_| true), Some(1));
        assert_eq!(overdue(&begun, at(12), LIMIT, |_| true), Some(1));
        assert_eq!(overdue(&begun, at(12), LIMIT, |worker| worker != 1), Some(0));
    }

    #[test]
    fn who_goes_on_or_has_begun_no_step_does_not_hang() {
        let mut begun = vec![None; 2];
        for second in 0..100 {
            hear(&mut begun, at(second), &[Some(second / 9), None]);
            assert_eq!(overdue(&begun, at(second), LIMIT, |_| true), None, "{second}");
        }
        assert_eq!(overdue(&begun, at(108), LIMIT, |_| true), None);
        assert_eq!(overdue(&begun, at(109), LIMIT, |_| true), Some(0));
        assert_eq!(overdue(&begun, at(109), LIMIT, |_| false), None);
    }
}
