//! Whether a job that has failed starts again.

use std::time::Duration;

use clap::Args;
use drumline_launch::Restarts;

use super::time::{time, times};

// No doc comment: clap would make it the description of the command.
#[derive(Args, Clone, Copy, Debug)]
pub(super) struct RestartArgs {
    /// How often the job may start all its ranks again after one has failed, in all
    #[arg(long, value_name = "N", default_value_t = 0)]
    max_restarts: u32,

    /// The pause before a restart: from the first one to the longest, each twice as long as the one before; 0: none
    #[arg(long, value_name = "TIME..TIME", default_value = "1s..60s", value_parser = times)]
    restart_delay: (Duration, Duration),

    /// All restarts are there again after ranks have run for this time [default: never]
    #[arg(long, value_name = "TIME", value_parser = time)]
    reset_restarts_after: Option<Duration>,
}

impl RestartArgs {
    pub(super) fn restarts(self) -> Restarts {
        let (delay_min, delay_max) = self.restart_delay;
        let reset_after = self.reset_restarts_after;
        Restarts { max: self.max_restarts, delay_min, delay_max, reset_after }
    }
}
