//! The command `drumline`.

#![forbid(unsafe_code)]

mod cli;

use std::{
    io::{self, IsTerminal, Write},
    process::ExitCode,
};

use clap::Parser;
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let outcome = match cli::Cli::parse().command {
        cli::Command::Run(args) => {
            log_to_stderr();
            drumline_launch::run(&args.into())
        }
        cli::Command::Check { json } => {
            log_to_stderr();
            drumline_launch::check(json)
        }
        cli::Command::Bench(options) => {
            log_to_stderr();
            drumline_launch::bench::bench(&options, std::env::args_os().skip(1).collect())
        }
        cli::Command::Trace(cli::TraceCommand::Merge { dir, out }) => {
            drumline_launch::trace::merge(&dir, out.as_deref()).map(|()| 0)
        }
        cli::Command::Trace(cli::TraceCommand::Summary { dir }) => {
            drumline_launch::trace::summary(&dir).map(|()| 0)
        }
        cli::Command::ExecWorker { launcher, program, command } => {
            Err(drumline_launch::exec_as_worker(launcher, &program, &command))
        }
    };
    match outcome {
        Ok(code) => code.into(),
        Err(error) => {
            // Not eprintln!, which panics when stderr is closed.
            let _ = writeln!(io::stderr(), "drumline: {error}");
            error.exit_code().into()
        }
    }
}

/// What `RUST_LOG` asks for, warnings otherwise.
fn log_to_stderr() {
    let is_plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal() && !is_plain)
        .log_internal_errors(false)
        .init();
}
