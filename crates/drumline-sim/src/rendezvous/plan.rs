//! Who uses the store of a start-up, and what goes wrong with it.

use fastrand::Rng;

use super::{
    programs,
    script::{Op, Script},
    start_up::start_up,
};
use crate::{
    network::{Nanos, Quality},
    plan::{self, MS, SECOND},
};

/// A start-up.
#[derive(Debug)]
pub(super) struct Plan {
    /// Those of the ranks first.
    pub(super) scripts: Vec<Script>,
    pub(super) ranks: usize,
    /// What keeps the job from beginning.
    pub(super) fault: Option<(Nanos, Fault)>,
    /// When the connections of others break.
    pub(super) cuts: Vec<(Nanos, usize)>,
    /// When the host of the store is stopped, and for how long.
    pub(super) host_stops: Option<(Nanos, Nanos)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    HostCrash,
    /// The host of the store is cut off. Keep-alives notice after so long.
    HostSilent(Nanos),
    RankCrash(usize),
    RankCut(usize),
}

impl Plan {
    /// The start-up of `job` where nobody else uses the store and nothing goes wrong.
    pub(super) fn undisturbed(rng: &mut Rng, job: &plan::Plan) -> Plan {
        let ranks = job.world_size;
        let scripts = (0..ranks).map(|rank| start_up(rng, job, rank)).collect();
        Plan { scripts, ranks, fault: None, cuts: Vec::new(), host_stops: None }
    }

    /// The start-up of `job`. In one of eight something is wrong that the job cannot survive.
    pub(super) fn new(rng: &mut Rng, job: &plan::Plan) -> Plan {
        let ranks = match job.world_size {
            // Everybody hears of everybody: many ranks cost much.
            7..=16 if rng.u8(0..4) > 0 => 0,
            17.. if rng.u8(0..16) > 0 => 0,
            ranks => ranks,
        };
        let mut scripts: Vec<_> = (0..ranks).map(|rank| start_up(rng, job, rank)).collect();
        let mut cuts = Vec::new();
        for number in 0..rng.usize(0..=3) {
            if rng.u8(0..5) == 0 {
                cuts.push((moment(rng), scripts.len()));
            }
            scripts.push(programs::user(rng, number, job));
        }
        if rng.u8(0..4) == 0 {
            scripts.extend(programs::workers(rng, job));
        }
        for number in 0..rng.usize(0..=2) {
            scripts.push(programs::stranger(rng, number, job));
        }
        if rng.u8(..) == 0 {
            scripts.push(programs::glutton(rng, job));
        }
        let fault = (ranks > 0 && rng.u8(0..8) == 0).then(|| {
            let fault = match rng.u8(0..4) {
                0 => Fault::HostCrash,
                1 => Fault::HostSilent(rng.u64(SECOND..3 * SECOND)),
                2 => Fault::RankCrash(rng.usize(0..ranks)),
                _ => Fault::RankCut(rng.usize(0..ranks)),
            };
            (moment(rng), fault)
        });
        let host_stops = (rng.u8(0..6) == 0).then(|| (moment(rng), rng.u64(MS..SECOND)));
        Plan { scripts, ranks, fault, cuts, host_stops }
    }
}

/// Early or late: of any magnitude.
pub(super) fn moment(rng: &mut Rng) -> Nanos {
    let most = 20_000 << rng.u32(0..12);
    rng.u64(1_000..most)
}

pub(super) fn script(rng: &mut Rng, name: String, job: &plan::Plan, ops: Vec<Op>) -> Script {
    let wire = if rng.bool() { job.near } else { job.far };
    // A window of 32 bytes over a slow wire would take longer than anybody waits.
    let quality = Quality { capacity: wire.capacity.max(256), ..wire };
    let knows_extensions = rng.u8(0..4) > 0;
    Script { name, quality, starts_at: rng.u64(0..MS), ops, knows_extensions, persists: false }
}
