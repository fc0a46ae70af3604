//! The command line `drumline`, in whatever process it is called.

use std::{
    ffi::OsString,
    io::{self, IsTerminal, Write},
};

use clap::Parser;
use tracing_subscriber::EnvFilter;

use crate::{
    cli::{Cli, Command, TraceCommand},
    worker,
};

/// Runs the command line `drumline ...` and returns its exit code. `arguments` begin with the name of
/// the program.
///
/// `itself` is what calls this function again when more arguments are put behind it, for every rank
/// that is started. Empty: the binary of this process.
///
/// ```
/// use drumline_launch::main;
///
/// let drumline = |argument: &str| main(["drumline".into(), argument.into()], []);
/// assert_eq!(drumline("--version"), 0);
/// assert_eq!(drumline("rum"), 2); // there is no such command, and it says so
/// ```
pub fn main(
    arguments: impl IntoIterator<Item = OsString>,
    itself: impl IntoIterator<Item = OsString>,
) -> u8 {
    worker::start_by(itself.into_iter().collect());
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let command = match Cli::try_parse_from(&arguments) {
        Ok(Cli { command }) => command,
        Err(error) => {
            // Help is no error, and goes to stdout.
            let _ = error.print();
            return u8::try_from(error.exit_code()).unwrap_or(2);
        }
    };
    let outcome = match command {
        Command::Run(args) => {
            log_to_stderr();
            crate::run(&args.into())
        }
        Command::Check { json } => {
            log_to_stderr();
            crate::check(json)
        }
        Command::Bench(options) => {
            log_to_stderr();
            crate::bench::bench(&options, arguments.into_iter().skip(1).collect())
        }
        Command::Simulate(options) => {
            log_to_stderr();
            crate::simulate::simulate(&options)
        }
        Command::Trace(TraceCommand::Merge { dir, out }) => {
            crate::trace::merge(&dir, out.as_deref()).map(|()| 0)
        }
        Command::Trace(TraceCommand::Summary { dir }) => crate::trace::summary(&dir).map(|()| 0),
        Command::ExecWorker { launcher, program, command } => {
            Err(worker::exec_as_worker(launcher, &program, &command))
        }
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            // Not eprintln!, which panics when stderr is closed.
            let _ = writeln!(io::stderr(), "drumline: {error}");
            error.exit_code()
        }
    }
}

/// What `RUST_LOG` asks for, warnings otherwise.
fn log_to_stderr() {
    let is_plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    // In the process of somebody else there may be a log already.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal() && !is_plain)
        .log_internal_errors(false)
        .try_init();
}
