//! What counts as a rank that hangs.

use std::{
    env,
    hash::{BuildHasher, Hasher, RandomState},
    path::PathBuf,
    time::Duration,
};

use clap::Args;
use drumline_launch::Hangs;

use super::{host::Host, names::Names, time::time};

// No doc comment: clap would make it the description of the command.
#[derive(Args, Clone, Copy, Debug)]
pub(super) struct HangArgs {
    /// End a rank, as one that has failed, that begins a step (drumline::step) and no other within this time, nor ends
    #[arg(long, value_name = "TIME", value_parser = time)]
    step_timeout: Option<Duration>,
}

impl HangArgs {
    pub(super) fn hangs(self, names: &Names, host: &Host<'_>) -> Result<Hangs, String> {
        if self.step_timeout == Some(Duration::ZERO) {
            let option = names.of("step-timeout");
            return Err(format!(
                "{option}: every step takes longer than 0s; leave it out for no limit"
            ));
        }
        Ok(Hangs { step_timeout: self.step_timeout, timer_file: timer_file(host) })
    }
}

/// The pipe for timers of torch, if the user wants one. torchrun makes up such a name, too.
fn timer_file(host: &Host<'_>) -> Option<PathBuf> {
    host.variable("TORCHELASTIC_ENABLE_FILE_TIMER").filter(|value| value == "1")?;
    let given = host.variable("TORCHELASTIC_TIMER_FILE").map(PathBuf::from);
    Some(given.unwrap_or_else(|| {
        let random = RandomState::new().build_hasher().finish();
        env::temp_dir().join(format!("watchdog_timer_{random:016x}"))
    }))
}
