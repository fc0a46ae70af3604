//! Options of torchrun that have no meaning here.

use std::ffi::OsString;

use clap::Args;

use super::{host::Host, names::Names};

/// How long a thread may wait in the kernel under torchrun.
const KERNEL_TIMEOUT: &str = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT";

// No doc comment: clap would make it the description of the command.
#[derive(Args, Clone, Debug)]
pub(super) struct CompatibilityArgs {
    /// Has no effect: the launcher waits for the ranks, and never looks at intervals
    #[arg(long, value_name = "SECONDS")]
    monitor_interval: Option<f64>,

    /// Has no effect: a program is always executed
    #[arg(long, value_name = "METHOD")]
    start_method: Option<StartMethod>,

    /// Only `default`: classes of Python are not loaded
    #[arg(long, value_name = "NAME", value_parser = logs_specs)]
    logs_specs: Option<String>,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum StartMethod {
    Spawn,
    Fork,
    Forkserver,
}

impl CompatibilityArgs {
    /// What was given and means nothing here.
    pub(super) fn ignored(&self, names: &Names, host: &Host<'_>) -> impl Iterator<Item = String> {
        let given = [
            self.monitor_interval.map(|_| "monitor-interval"),
            self.start_method.map(|_| "start-method"),
        ];
        // torch takes 0 and less as off.
        let is_off = |value: &OsString| {
            value.to_str().and_then(|text| text.parse::<f64>().ok()).is_some_and(|it| it <= 0.0)
        };
        let of_kernel = host.variable(KERNEL_TIMEOUT).filter(|value| !is_off(value));
        let of_kernel = of_kernel.map(|_| KERNEL_TIMEOUT.to_owned());
        given.into_iter().flatten().map(|option| names.of(option)).chain(of_kernel)
    }
}

fn logs_specs(text: &str) -> Result<String, String> {
    match text {
        "default" => Ok(text.into()),
        _ => Err("classes of Python are not loaded; --log-dir, --redirects, --tee, \
                  --local-ranks-filter and the filters say what is written and shown"
            .into()),
    }
}
