//! Whether a job that has failed starts again.

use std::time::Duration;

use clap::Args;
use drumline_launch::Restarts;

use super::time::times;

// No doc comment: clap would make it the description of the command.
#[derive(Args, Clone, Copy, Debug)]
pub(super) struct RestartArgs {
    /// How often the job may start all its ranks again after one has failed
    #[arg(long, value_name = "N", default_value_t = 0)]
    max_restarts: u32,

    /// The pause before a restart: from the first one to the longest, each twice as long as the one before; 0: none
    #[arg(long, value_name = "TIME..TIME", default_value = "1s..60s", value_parser = times)]
    restart_delay: (Duration, Duration),
}

impl RestartArgs {
    pub(super) fn restarts(self) -> Restarts {
        let (delay_min, delay_max) = self.restart_delay;
        Restarts { max: self.max_restarts, delay_min, delay_max, ..Restarts::default() }
    }
}
