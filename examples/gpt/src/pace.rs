//! How fast the training is, and what of it is communication.

use std::time::Instant;

use drumline::ddp::ReducerStats;
use drumline_burn::DistributedDataParallel;

/// What is measured from one report to the next.
pub(crate) struct Pace {
    step: u64,
    since: Instant,
    before: ReducerStats,
}

impl Pace {
    pub(crate) fn new(step: u64, ddp: &DistributedDataParallel) -> Self {
        Self { step, since: Instant::now(), before: ddp.stats() }
    }

    /// `characters`: in one step of one rank.
    pub(crate) fn tell(
        &self,
        step: u64,
        characters: usize,
        ddp: &DistributedDataParallel,
    ) -> String {
        let (seconds, stats) = (self.since.elapsed().as_secs_f64(), ddp.stats());
        let (steps, ranks) = ((step - self.step) as f64, ddp.group().world_size());
        let rate = steps * (characters * ranks) as f64 / seconds;
        let communication = (stats.communication - self.before.communication).as_secs_f64();
        let exposed = (stats.exposed - self.before.exposed).as_secs_f64();
        if communication == 0.0 {
            return format!("{rate:.0} characters/s"); // alone
        }
        format!(
            "{rate:.0} characters/s, communication {:.1} ms per step, {:.0} % of it exposed",
            1e3 * communication / steps,
            100.0 * exposed / communication
        )
    }
}
