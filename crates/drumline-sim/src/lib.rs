//! A simulator of whole jobs.
//!
//! Up to 64 ranks run in one thread, on virtual time and over virtual connections: the real store,
//! groups, schedules, streams, shared memory and launchers of Drumline. One number, the seed,
//! decides everything: which host each rank is on, which rank calls what, how bytes are torn and
//! delayed, which rank runs next, and which fault strikes. The same seed gives the same run, to the
//! last bit.
//!
//! After every run these facts are checked:
//!
//! - No rank hangs.
//! - Every result has the bits that an independent computation gives.
//! - Without a fault there is no error. With a fault, every error blames the rank at fault.
//! - The store through which the ranks meet handles each request as a sequential model does.
//!
//! The [`membership`] of the hosts of a job has histories and seeds of its own.
//!
//! Two kinds of jobs are not drawn from a seed and have no faults: [`large`] jobs of a thousand
//! ranks, and [`ConformanceJob`]s, which carry out cases of the conformance suite.
//!
//! ```text
//! cargo run --release -p drumline-sim -- --seeds 0..10000
//! cargo run -p drumline-sim -- --seed 4711 --trace
//! cargo run --release -p drumline-sim -- --membership --seeds 0..10000
//! ```

#![forbid(unsafe_code)]

mod blame;
mod call;
mod checks;
mod conformance_job;
mod dial;
mod draw;
mod event_loop;
mod faults;
pub mod large;
mod launchers;
mod link;
mod member;
pub mod membership;
mod messages;
mod network;
mod process;
mod scenario;
mod seed;
mod simulation;
mod start_up;
mod summary;
mod time;
mod warnings;

pub use conformance_job::{ConformanceJob, Place};
pub use seed::{Simulated, run, run_all};
pub use summary::RunSummary;
