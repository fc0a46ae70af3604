//! Traces: what every rank did, and when. Each rank writes a file.
//!
//! With `DRUMLINE_TRACE=dir` (or [`Config::trace`](crate::Config::trace)) every rank writes
//! `dir/rank-N.json`, an array with one event on each line. [Perfetto](https://ui.perfetto.dev) and
//! `chrome://tracing` open it. [`merge()`] makes one file of the files of all ranks, in which the ranks are
//! one below the other. [`summarize`] makes a table that says for which rank the others wait.
//!
//! ```
//! # use drumline_group as drumline;
//! use drumline::{Config, ProcessGroup, ReduceOp, trace::{Trace, merge, summarize}};
//!
//! let dir = std::env::temp_dir().join(format!("drumline-doc-{}", std::process::id()));
//! let config = Config::default().trace(Trace::to(&dir));
//! std::thread::scope(|threads| {
//!     for group in drumline::rendezvous::local_world_with(2, &config)? {
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
//! A failure, or a warning of late ranks, is a mark with its text. The same calls are `tracing` spans of
//! level debug and target `drumline::operation`, for programs with a subscriber of their own. Without a
//! subscriber and a trace, a call only pays for checking that there is none.
//!
//! # Limits
//!
//! A thread writes the events ten times a second. So a rank that is killed loses at most its last tenth of a
//! second. Its file is complete up to there, and readers accept a file that ends anywhere. A file takes at
//! most [`Trace::bytes_max`] bytes; then it says so, and later events are not recorded. If the disk is too
//! slow, some events are left out, and the file says how many: a call never waits for the disk.
//!
//! # Clocks
//!
//! Times are those of `CLOCK_MONOTONIC`, in microseconds. The ranks of one host share this clock. At start-up one rank
//! of each other host asks rank 0 for its time, several times, and keeps the fastest answer. The error of that answer
//! is at most half of the time that it took. Both figures are in the file, and [`merge()`] applies them. Files without
//! these figures (if rank 0 writes no trace) are aligned by the wall clocks, and the result says so.

use std::path::Path;

pub(crate) use drumline_trace::{GroupTrace, Inquiry};
pub use drumline_trace::{Merged, OperationSummary, RankSummary, Summary, Trace};

use crate::Result;

/// Writes the events of all ranks in `dir` to `out`, with times on rank 0's clock. The viewer shows the ranks
/// one below the other. Arrows connect the parts of a collective, from the first rank to the last.
///
/// `out` is replaced only when it is complete. The memory in use does not depend on the length of the files.
///
/// ```
/// # use drumline_group as drumline;
/// # use drumline::{Config, ProcessGroup, trace::Trace};
/// # let directory = tempfile::tempdir().unwrap();
/// # let dir = directory.path().join("trace");
/// # let config = Config::default().trace(Trace::to(&dir));
/// # for group in drumline::rendezvous::local_world_with(1, &config)? {
/// #     for _ in 0..3 {
/// #         group.broadcast(&mut [0_u8; 100], 0)?;
/// #     }
/// #     group.destroy()?;
/// # }
/// use drumline::trace::merge;
///
/// let out = dir.join("trace.json"); // for ui.perfetto.dev
/// let merged = merge(&dir, &out)?;
/// let text = std::fs::read_to_string(&out).unwrap();
/// assert_eq!(text.matches(r#""name":"broadcast""#).count(), 3);
/// assert!(merge(&dir.join("elsewhere"), &out).is_err());
/// # Ok::<_, drumline::Error>(())
/// ```
///
/// # Errors
///
/// [`Trace`](crate::ErrorKind::Trace) names the file and the line that cannot be read, or says that there
/// is no file. A file that ends in the middle of an event, because its rank was killed, is no error.
pub fn merge(dir: &Path, out: &Path) -> Result<Merged> {
    drumline_trace::merge(dir, out)
}

/// Sums up what the ranks in `dir` did.
///
/// # Errors
///
/// As for [`merge`](merge()).
pub fn summarize(dir: &Path) -> Result<Summary> {
    drumline_trace::summarize(dir)
}
