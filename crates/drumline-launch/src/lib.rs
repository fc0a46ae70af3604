//! The launcher: starts one worker process per rank on this machine, tells each who it is, prints
//! what they print, and when one fails ends the others and says who was first.
//!
//! ```text
//! $ drumline run --nproc-per-node 2 -- ./train --epochs 3
//! [0] epoch 1: loss 0.52
//! [1] out of patience
//! drumline: rank 1 (pid 4713) exited with code 3 after 12.3 s
//! drumline: last lines of its stderr:
//!     out of patience
//! drumline: ended the other ranks: 0 (SIGTERM)
//! $ echo $?
//! 3
//! ```
//!
//! It is the library behind the command `drumline`, which other programs can be too ([`main`]): the
//! Python package is, and programs with backends of their own have them [checked](check()). The
//! simulator drives the [`supervisor`].
//!
//! # What a worker gets
//!
//! - A fresh secret, in a file in memory that is open in every worker
//!   (`DRUMLINE_SECRET_FILE=/proc/self/fd/N`), and a store that asks for it (`DRUMLINE_STORE`), on
//!   an abstract Unix socket. A `DRUMLINE_SECRET` or `DRUMLINE_SECRET_FILE` in the launcher's own
//!   environment is used instead of a fresh one.
//! - The environment of torchrun, and a store for programs that run torch at
//!   `MASTER_ADDR:MASTER_PORT`, on loopback. It cannot authenticate; `--no-torch-store` does without
//!   it, and then the job listens on no TCP port at all.
//! - An empty stdin. Its stdout and stderr are pipes; whole lines come out at the launcher's stdout
//!   and stderr, each with its rank in front.
//! - A process group of its own.
//!
//! # How a job ends
//!
//! | what happens | what the launcher does | exit code |
//! |---|---|---|
//! | all ranks exit with 0 | nothing | 0 |
//! | a rank fails | SIGTERM to the others after 100 ms, SIGKILL after `--kill-after` (500 ms), report | that of the first rank to fail; 128 + n for signal n |
//! | SIGINT, SIGTERM, SIGHUP or SIGQUIT to the launcher | passes it on, SIGKILL after `--shutdown-timeout` (30 s) or a second Ctrl-C | 128 + n |
//! | SIGUSR1, SIGUSR2, Ctrl-Z | passes them on; the job goes on, or stops and continues | |
//! | SIGKILL to the launcher | nothing any more: the kernel kills the workers | 137 |
//!
//! Whatever the end, what the workers have started and left behind in their process groups is
//! killed as well. Two things are beyond reach: a process that leaves its group (`setsid`), and,
//! if the launcher itself is killed by SIGKILL, the children of the workers.
//!
//! # Inside
//!
//! The [`supervisor`] decides, without processes and without a clock. A thin shell is around
//! it: one thread that starts the workers and waits for them, for signals and for deadlines at
//! once, and two threads per worker that print its output.

#![forbid(unsafe_code)]

mod bench;
mod check;
mod cli;
mod command;
mod ending;
mod environment;
mod error;
mod events;
mod job;
mod lines;
mod output;
mod program;
mod report;
mod secret;
mod signals;
mod simulate;
pub mod supervisor;
mod trace;
mod worker;

pub use check::check;
pub use command::main;
pub use ending::Ending;
pub use error::{Error, Result};

use std::io::{self, Write};

use job::{Job, run};

/// Not print!, which panics when stdout is closed. A reader that has seen enough is no error.
fn print(text: &str) -> Result<()> {
    match io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Error::System { what: "write to stdout".to_owned(), source: error })
        }
        _ => Ok(()),
    }
}
