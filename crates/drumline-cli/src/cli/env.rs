//! `drumline env`: what a rank of a foreign launcher executes.

use std::{ffi::OsString, time::Duration};

use clap::Args;

use super::time::time;

// No doc comment: clap would make it the description of the command.
#[derive(Args, Clone, Debug)]
pub(crate) struct EnvArgs {
    /// The program, and its arguments. What ends in .py runs under Python; everything else is found and executed as by
    /// a shell
    #[arg(required_unless_present = "print", trailing_var_arg = true, value_name = "PROGRAM")]
    pub(crate) command: Vec<OsString>,

    /// Print the variables, but for the secret, and run nothing
    #[arg(long, conflicts_with = "command")]
    pub(crate) print: bool,

    /// How long to wait for the other ranks
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = time)]
    pub(crate) timeout: Duration,
}
