//! What every rank did, and when: one file per rank, and what can be made of them.
//!
//! With `DRUMLINE_TRACE=dir` (or [`Config::trace`](crate::Config::trace)) every rank writes
//! `dir/rank-N.json`, which [Perfetto](https://ui.perfetto.dev) and `chrome://tracing` open: an
//! array of events, one on a line. [`merge()`] makes one file of them, in which the ranks stand below
//! each other, and [`summarize`] a table that says which rank the others wait for.
//!
//! ```
//! # use drumline_group as drumline;
//! use drumline::{Config, ProcessGroup, ReduceOp, trace::{Trace, merge, summarize}};
//!
//! let dir = std::env::temp_dir().join(format!("drumline-doc-{}", std::process::id()));
//! let config = Config::default().trace(Trace::to(&dir));
//! std::thread::scope(|threads| {
//!     for group in ProcessGroup::local_world_with(2, &config)? {
//!         threads.spawn(move || {
//!             group.all_reduce(&mut [1.0_f32; 100], ReduceOp::Sum)?;
//!             group.destroy()
//!         });
//!     }
//!     Ok::<_, drumline::Error>(())
//! })?;
//! let merged = merge(&dir, &dir.join("trace.json"))?;
//! assert_eq!(merged.ranks, [0, 1]);
//! let summary = summarize(&dir)?;
//! assert_eq!(summary.operation("all_reduce").map(|it| it.calls), Some(2)); // one on each rank
//! println!("{summary}");
//! # std::fs::remove_dir_all(&dir).unwrap();
//! # Ok::<_, drumline::Error>(())
//! ```
//!
//! # What is in it
//!
//! | category | events | fields |
//! |---|---|---|
//! | `collective` | collectives, blocking or not, from their start on this rank to their end | group, sequence, bytes, algorithm |
//! | `message` | sends and receives, from the call to the end | group, peer, tag, bytes |
//! | `bucket` | buckets of gradients, from their launch to their return | group, bucket, bytes |
//! | `start-up` | the phases of start-up, and `destroy` | group |
//! | `store` | waits for keys of the store during start-up | key |
//!
//! A failure and a warning of late ranks are marks with the text. The same operations are
//! `tracing` spans of level debug and target `drumline::operation`, for programs with a subscriber
//! of their own; without one, and without a trace, an operation pays for looking whether anybody
//! listens.
//!
//! # Limits
//!
//! Events are handed to a thread that writes them ten times a second: a rank that is killed loses
//! at most its last tenth of a second. Its file is whole up to there, and readers accept one that
//! ends anywhere. A file takes at most [`Trace::bytes_max`]; then it says so, and the rest is not
//! recorded. Where the disk is slower than the events, some are left out, and the file says how
//! many: an operation never waits for the disk.
//!
//! # Clocks
//!
//! Times are those of `CLOCK_MONOTONIC`, in microseconds, which the ranks of one host share. At
//! start-up one rank of each other host asks rank 0 for its time, several times, and keeps the
//! answer that came fastest: half of the time that it took is how wrong it can be. Both figures
//! stand in the file, and are applied by [`merge()`]. Files without them (rank 0 does not trace) are
//! aligned by the clocks on the wall, which is said.

pub(crate) mod clock;
mod destination;
mod file;
mod format;
mod group_trace;
mod histogram;
mod join;
mod lines;
mod merge;
mod read;
mod summary;

pub(crate) use clock::Inquiry;
pub use destination::Trace;
pub(crate) use group_trace::GroupTrace;
pub use merge::{Merged, merge};
pub use summary::{OperationSummary, RankSummary, Summary, summarize};
