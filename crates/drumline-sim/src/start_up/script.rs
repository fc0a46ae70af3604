//! The programs of processes that use the store.

use fastrand::Rng;

use super::{
    action::Action,
    rank::{Kept, RankPlan},
};
use crate::{
    network::LinkQuality,
    scenario::Scenario,
    time::{MS, Nanos},
};

/// The program of one process.
#[derive(Debug)]
pub(super) struct Script {
    pub(super) name: String,
    pub(super) quality: LinkQuality,
    pub(super) starts_at: Nanos,
    pub(super) program: Program,
    /// Whether it asks the store for extensions, and uses them.
    pub(super) knows_extensions: bool,
    /// Whether it goes on after an action that has failed.
    pub(super) persists: bool,
}

impl Script {
    /// The script of a process that starts within a millisecond and ends after the first error.
    pub(super) fn new(rng: &mut Rng, name: String, job: &Scenario, actions: Vec<Action>) -> Script {
        Script::of(rng, name, job, Program::Actions(actions))
    }

    /// The script of a rank.
    pub(super) fn of_rank(rng: &mut Rng, job: &Scenario, rank: usize) -> Script {
        let program = Program::Rank(RankPlan::new(job, rank), Kept::default());
        Script::of(rng, format!("rank {rank}"), job, program)
    }

    fn of(rng: &mut Rng, name: String, job: &Scenario, program: Program) -> Script {
        let quality = if rng.bool() { job.near } else { job.far };
        // Over a slow link, a capacity of 32 bytes takes longer than any client waits.
        let quality = LinkQuality { capacity: quality.capacity.max(256), ..quality };
        let knows_extensions = rng.u8(0..4) > 0;
        let starts_at = rng.u64(0..MS);
        Script { name, quality, starts_at, program, knows_extensions, persists: false }
    }
}

/// What a process does.
#[derive(Debug)]
pub(super) enum Program {
    /// These actions, one after another.
    Actions(Vec<Action>),
    /// The actions that the start-up code of a rank asks for. The second field keeps them.
    Rank(RankPlan, Kept),
}

/// A random time of any magnitude.
pub(super) fn moment(rng: &mut Rng) -> Nanos {
    let most = 20_000 << rng.u32(0..12);
    rng.u64(1_000..most)
}
