//! The command `drumline`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    drumline_cli::main(std::env::args_os(), []).into()
}
