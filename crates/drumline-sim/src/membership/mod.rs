//! Whole histories of the hosts of a job: launchers that meet in a store, on the real state machines.
//!
//! Launchers come, leave, crash and are cut off from the store. The launcher of a machine, each keeper and the workers stop
//! for a while, and are killed, apart from each other. Requests are late or lost, or their
//! answers are. Workers fail, by themselves or because of a peer. After a while the faults stop. One number, the seed,
//! decides everything.
//!
//! After every event these facts are checked:
//!
//! - Two worlds never run at once. Workers run from their start until they end, or until somebody kills them.
//! - A plan follows from the one before: ranks are 0 to size - 1 without a gap, hosts that stay keep their order,
//!   and nothing follows the end.
//! - A host that is taken out, or that the ranks of the others go on without, has no workers. Losses, joins and leaves cost no restart, and no job has more restarts
//!   than it may.
//! - A job that is finished has workers that all succeeded, and one that failed has a worker that did.
//!
//! At the end of every history all launchers must have ended, no workers may run, and those that heard the end of the job with one code.

mod checks;
mod clock;
mod draw;
mod history;
mod launcher;
mod network;
mod store;
mod turns;
mod workers;

use fastrand::Rng;

use crate::summary::{RunSummary, caught};

/// Runs the history of a seed and checks it. With `trace`, prints what happens to stderr.
///
/// # Errors
///
/// The first check that fails.
pub fn run(seed: u64, trace: bool) -> Result<RunSummary, String> {
    run_with(draw::KEEPERS, seed, trace)
}

/// The same, if only the first of the keepers act.
fn run_with(keepers: usize, seed: u64, trace: bool) -> Result<RunSummary, String> {
    caught(|| {
        let ended = history(keepers, seed, trace)?;
        let fault = !ended.scenario.faults.is_empty();
        Ok(RunSummary { fault, events: ended.events, virtual_ns: ended.now })
    })
}

fn history(keepers: usize, seed: u64, trace: bool) -> Result<history::History, String> {
    let mut rng = Rng::with_seed(seed ^ 0x6d65_6d62_6572);
    let scenario = draw::Scenario { keepers, ..draw::draw(&mut rng) };
    history::History::new(rng, scenario, trace).run()
}

#[cfg(test)]
mod tests {
    use drumline_launch::membership::{Phase, Verdict};

    use super::*;

    #[test]
    fn with_fewer_keepers_two_worlds_run_at_once_sooner_or_later() {
        for keepers in 0..draw::KEEPERS {
            let problem = |seed| run_with(keepers, seed, false).err();
            let is_caught = |problem: String| {
                problem.contains("run at once") || problem.contains("while its workers run")
            };
            assert!((0..4_000).filter_map(problem).any(is_caught), "{keepers} keepers suffice");
        }
    }

    #[test]
    fn jobs_end_well_without_hosts_that_they_have_lost() {
        let has = |seed: &u64| {
            let plan = history(draw::KEEPERS, *seed, false).unwrap().store.plan;
            plan.is_some_and(|it| it.phase == Phase::Over(Verdict::Finished) && !it.lost.is_empty())
        };
        assert!((0..300).filter(has).count() > 5);
    }
}
