//! The start-up of a job, before it runs: the clients of its store, and its faults.

use fastrand::Rng;

use super::{
    bystanders,
    script::{Script, moment},
};
use crate::{
    scenario::Scenario,
    time::{MS, Nanos, SECOND},
};

/// The start-up of a job.
#[derive(Debug)]
pub(super) struct StartUpScenario {
    /// The script of each client. The ranks come first.
    pub(super) scripts: Vec<Script>,
    pub(super) ranks: usize,
    /// A fault that keeps the job from beginning, and when it strikes.
    pub(super) fault: Option<(Nanos, StartUpFault)>,
    /// When connections break, and the clients that have them.
    pub(super) cuts: Vec<(Nanos, usize)>,
    /// When the store's process is stopped, and for how long.
    pub(super) store_stops: Option<(Nanos, Nanos)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StartUpFault {
    StoreCrash,
    /// The network cuts off the store's host. Keep-alives notice it after this time.
    StoreSilent(Nanos),
    RankCrash(usize),
    RankCut(usize),
}

impl StartUpScenario {
    /// The start-up of `job` without other clients and without faults.
    pub(super) fn undisturbed(rng: &mut Rng, job: &Scenario) -> StartUpScenario {
        let ranks = job.world_size;
        let scripts = (0..ranks).map(|rank| Script::of_rank(rng, job, rank)).collect();
        StartUpScenario { scripts, ranks, fault: None, cuts: Vec::new(), store_stops: None }
    }

    /// Draws the start-up of `job`. One in eight has a fault that keeps the job from beginning.
    pub(super) fn new(rng: &mut Rng, job: &Scenario) -> StartUpScenario {
        let ranks = match job.world_size {
            // Every rank hears of every rank, so many ranks take long to simulate.
            7..=16 if rng.u8(0..4) > 0 => 0,
            17.. if rng.u8(0..16) > 0 => 0,
            ranks => ranks,
        };
        let mut scripts: Vec<_> = (0..ranks).map(|rank| Script::of_rank(rng, job, rank)).collect();
        let mut cuts = Vec::new();
        for number in 0..rng.usize(0..=3) {
            if rng.u8(0..5) == 0 {
                cuts.push((moment(rng), scripts.len()));
            }
            scripts.push(bystanders::user(rng, number, job));
        }
        if rng.u8(0..4) == 0 {
            scripts.extend(bystanders::workers(rng, job));
        }
        for number in 0..rng.usize(0..=2) {
            scripts.push(bystanders::stranger(rng, number, job));
        }
        if rng.u8(..) == 0 {
            scripts.push(bystanders::glutton(rng, job));
        }
        let fault = (ranks > 0 && rng.u8(0..8) == 0).then(|| {
            let fault = match rng.u8(0..4) {
                0 => StartUpFault::StoreCrash,
                1 => StartUpFault::StoreSilent(rng.u64(SECOND..3 * SECOND)),
                2 => StartUpFault::RankCrash(rng.usize(0..ranks)),
                _ => StartUpFault::RankCut(rng.usize(0..ranks)),
            };
            (moment(rng), fault)
        });
        let store_stops = (rng.u8(0..6) == 0).then(|| (moment(rng), rng.u64(MS..SECOND)));
        StartUpScenario { scripts, ranks, fault, cuts, store_stops }
    }
}
