//! `--disable-rseq`, of every command that starts ranks.

use clap::Args;

// No doc comment: clap would make it the description of the command.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Rseq {
    /// Start the ranks without restartable sequences: see `drumline run --help`
    #[arg(long, alias = "disable_rseq", env = "DRUMLINE_DISABLE_RSEQ", value_parser = switch)]
    pub(crate) disable_rseq: bool,
}

/// `true` and `false` mean that an option is given or not. 0 and 1 are the values of its variable.
fn switch(text: &str) -> Result<bool, String> {
    match text {
        "" | "0" | "false" => Ok(false),
        "1" | "true" => Ok(true),
        _ => Err("DRUMLINE_DISABLE_RSEQ is 0 or 1".into()),
    }
}
