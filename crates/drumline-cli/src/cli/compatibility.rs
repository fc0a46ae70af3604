//! Options of torchrun that have no meaning here.

use clap::Args;

use super::names::Names;

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
    pub(super) fn ignored(&self, names: &Names) -> impl Iterator<Item = String> {
        let given = [
            self.monitor_interval.map(|_| "monitor-interval"),
            self.start_method.map(|_| "start-method"),
        ];
        given.into_iter().flatten().map(|option| names.of(option))
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
