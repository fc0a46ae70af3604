//! The launcher. It starts one worker process per rank on this host, gives each its rank, and prints
//! what the workers print. When a worker fails, it ends the others and reports the first failure.
//!
//! ```text
//! $ drumline run --nproc-per-node 2 -- ./train --epochs 3
//! [0] epoch 1: loss 0.52
//! [1] out of patience
//! drumline: rank 1 (pid 4713) exited with code 3 after 12.3 s, at 2026-11-25T07:20:01.123Z on node7
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
//! - The environment of torchrun, and a store for programs that use torch at `MASTER_ADDR:MASTER_PORT`, on
//!   loopback. This store has no authentication. With `--no-torch-store` there is none, and the job listens
//!   on no TCP port.
//! - On several hosts `GLOO_SOCKET_IFNAME`, unless it is set: the interface by which the others reach this one.
//! - `OMP_NUM_THREADS=1` if there are several workers and the variable is not set.
//! - `glibc.pthread.rseq=0` in `GLIBC_TUNABLES`, only with `--disable-rseq`.
//! - `DRUMLINE_SECURITY`, only with `--security`.
//! - As many descriptors as the hard limit allows (`ulimit -Hn`), at most 524,288, because a few groups of 64
//!   ranks use up the usual soft limit of 1,024. A program that calls `select` cannot use descriptors from
//!   1,024 on; with the soft limit it would fail to open them. If it must fail there, start the launcher with
//!   a hard limit of 1,024 (`ulimit -Hn 1024`).
//! - A file in which it may say why it fails (`TORCHELASTIC_ERROR_FILE`). The report quotes that of the first rank to
//!   fail. Without `--log-dir` the file is in a private directory that is removed at the end.
//! - An empty stdin; [one worker](Stdin) gets that of the launcher. Its stdout and stderr are pipes. The launcher prints whole lines of them to its
//!   own stdout and stderr, each with the rank in front.
//! - A process group of its own; a worker that gets the terminal is in the group of the launcher.
//!
//! # How a job ends
//!
//! | what happens | what the launcher does | exit code |
//! |---|---|---|
//! | all ranks exit with 0 | nothing | 0 |
//! | a rank fails | SIGTERM to the others after 100 ms, SIGKILL after `--kill-after` (500 ms), report | that of the first rank to fail; 128 + n for signal n |
//! | a rank [hangs](Hangs) | SIGKILL to it; then as if it had failed | 137 |
//! | SIGINT, SIGTERM, SIGHUP or SIGQUIT to the launcher | passes it on ([to whom](#signals)), SIGKILL after `--shutdown-timeout` (30 s) or a second Ctrl-C | 128 + n |
//! | SIGUSR1, SIGUSR2, Ctrl-Z | passes them on; the job goes on, or stops and continues | |
//! | SIGKILL to the launcher | nothing: it is dead, and the keeper kills everything | 137 |
//!
//! # Signals
//!
//! A rank that handles a signal, ignores or blocks it gets it alone: its children, such as loaders of data, go on, so
//! that it can finish its step and save. Of a rank that does not, the whole process group gets the signal (of SIGUSR1 and
//! SIGUSR2 the process alone). A shell lets signals through to the programs that it runs; it gets one itself if it has a
//! trap. When a rank has ended, the rest of its group gets the signal. SIGKILL goes to the whole group.
//!
//! Before it sends SIGKILL, the launcher looks up in `/proc` where each thread of the rank waits: the system
//! call, the file or socket, and the function of the kernel. It adds the result to the report.
//!
//! No process of a job is left: no worker, and no process that a worker has started, behind a wrapper, by a
//! double fork or in a session of its own (`setsid`). Between launcher and workers there are three *keepers*, one below
//! another. When a process below the last keeper loses its parent, the kernel makes that keeper its parent. When the job is
//! over, the keeper gives the remaining processes 500 ms to end, then kills them, and the launcher names them. If
//! launcher or keepers are killed or stopped, each one that is left ends the workers and all that they have started. If all
//! four are killed at once, the kernel kills the workers; what these have started lives on. If the last keeper is stopped,
//! the launcher says so after a few seconds and ends the world. Processes of other users (`sudo`) are never ended.
//!
//! # Several hosts
//!
//! With [`Job::meeting`] this launcher is one of several, one on each host. They meet in a store, and one of them decides
//! which hosts run a world together: [`membership`]. All ranks of a world meet in a store of the world's first host.
//! The keepers kill the workers of a host that the others cannot hear, before the others start new ones.
//!
//! # Inside
//!
//! ```text
//! run ──► attempt: the workers of one world ──► keepers ──► workers
//!   │        │   supervisor: decides when to end which worker
//!   │        └── output, files, report, watch
//!   └───► agent: one of several hosts; membership: decides which hosts run which world
//! ```
//!
//! The [`supervisor`], the [`membership`] and [`RestartBudget`] make the decisions, without processes, sockets or a
//! clock. [`run()`] and the agent are thin shells around them: one thread waits for workers, signals and deadlines at
//! once, two threads for each worker read its output, one writes it, and one speaks with the other hosts. [`keep()`] is the code of
//! the keepers.

#![forbid(unsafe_code)]

mod agent;
mod attempt;
mod channel;
mod clock;
pub mod devices;
mod ending;
mod environment;
mod error;
mod events;
mod files;
pub mod foreign;
mod groups;
mod job;
mod keep;
mod keeper;
mod last_words;
mod launch;
mod lease;
mod limits;
mod lines;
mod listener;
mod logs;
pub mod membership;
mod monitor;
mod outcome;
mod output;
mod prefix;
mod processes;
pub mod program;
mod quote;
mod recipients;
mod report;
mod restarts;
mod run;
mod secret;
mod signals;
mod sink;
mod stdin;
mod stores;
pub mod supervisor;
mod sweep;
mod tell;
mod waits;
mod watch;
mod worker;
mod world;

pub use drumline::cores::NumaBinding;
pub use ending::Ending;
pub use error::{Error, Result};
pub use job::{Etcd, Hosts, Job, Joining, Meeting, OnSignal, TorchStore};
pub use keep::{KEEP_SUBCOMMAND, keep};
pub use logs::{Logs, StreamMap, Streams};
pub use monitor::settings::{EventLog, Monitoring, ServiceManager};
pub use output::flush;
pub use restarts::{EndedWorld, Next, NoRestart, RestartBudget, Restarts};
pub use run::run;
pub use stdin::Stdin;
pub use watch::hangs::Hangs;
