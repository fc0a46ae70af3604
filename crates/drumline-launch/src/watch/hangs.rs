//! What counts as a rank that hangs.

use std::{path::PathBuf, time::Duration};

/// What the launcher takes for a rank that hangs, and then ends as a failure. By default nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hangs {
    /// The longest time between the beginnings of two [steps](drumline::step) of a rank, and from the last one to its
    /// end: `--step-timeout`. A rank that has begun no step has no limit.
    pub step_timeout: Option<Duration>,
    /// The named pipe into which programs of torch write their timers: `TORCHELASTIC_TIMER_FILE`. The launcher makes it
    /// for each world, and removes it. A process whose timer expires is ended.
    pub timer_file: Option<PathBuf>,
}
