//! What counts as a rank that hangs.

use std::time::Duration;

use clap::Args;
use drumline_launch::Hangs;

use super::{names::Names, time::time};

// No doc comment: clap would make it the description of the command.
#[derive(Args, Clone, Copy, Debug)]
pub(super) struct HangArgs {
    /// End a rank, as one that has failed, that begins a step (drumline::step) and no other within this time, nor ends
    #[arg(long, value_name = "TIME", value_parser = time)]
    step_timeout: Option<Duration>,
}

impl HangArgs {
    pub(super) fn hangs(self, names: &Names) -> Result<Hangs, String> {
        if self.step_timeout == Some(Duration::ZERO) {
            let option = names.of("step-timeout");
            return Err(format!(
                "{option}: every step takes longer than 0s; leave it out for no limit"
            ));
        }
        Ok(Hangs { step_timeout: self.step_timeout })
    }
}
