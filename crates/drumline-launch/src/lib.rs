//! The launcher. It starts one worker process per rank on this host, gives each its rank, and prints
//! what the workers print. When a worker fails, it ends the others and reports the first failure.
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
//! [`run()`] is what the command `drumline run` calls. The simulator drives the [`supervisor`].
//!
//! # What a worker gets
//!
//! - A fresh secret, in a file in memory that is open in every worker
//!   (`DRUMLINE_SECRET_FILE=/proc/self/fd/N`), and a store on an abstract Unix socket that asks for
//!   the secret (`DRUMLINE_STORE`). A `DRUMLINE_SECRET` or `DRUMLINE_SECRET_FILE` in the launcher's
//!   own environment is used instead of a fresh secret.
//! - The environment of torchrun, and a store for programs that run torch at
//!   `MASTER_ADDR:MASTER_PORT`, on loopback. This store cannot authenticate. With `--no-torch-store`
//!   there is none, and the job listens on no TCP port.
//! - `OMP_NUM_THREADS=1` if there are several workers and the variable is not set.
//! - `glibc.pthread.rseq=0` in `GLIBC_TUNABLES`, only with `--disable-rseq`.
//! - An empty stdin. Its stdout and stderr are pipes. The launcher prints whole lines of them to its
//!   own stdout and stderr, each with the rank in front.
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
//! Before it sends SIGKILL the launcher looks in `/proc` where each thread of the rank waits: in which
//! system call, on which file or socket, in which function of the kernel. The report says so.
//!
//! At the end the launcher also kills the processes that the workers have started and left behind in
//! their process groups. It cannot reach a process that has left its group (`setsid`). If the launcher
//! itself is killed by SIGKILL, the children of the workers live on.
//!
//! # Inside
//!
//! The [`supervisor`] decides, without processes and without a clock. [`run()`] is a thin shell around
//! it: one thread starts the workers and waits for them, for signals and for deadlines at once, and
//! two threads per worker print its output.

#![forbid(unsafe_code)]

mod ending;
mod environment;
mod error;
mod events;
mod job;
mod lines;
mod output;
mod processes;
mod program;
mod report;
mod run;
mod secret;
mod signals;
pub mod supervisor;
mod waits;
mod worker;

pub use ending::Ending;
pub use error::{Error, Result};
pub use job::Job;
pub use run::run;
pub use worker::{EXEC_SUBCOMMAND, exec_as_worker};
