//! What every rank did, and when: one file per rank, and what can be made of them.
//!
//! With `DRUMLINE_TRACE=dir` (or [`Config::trace`](crate::Config::trace)) every rank writes
//! `dir/rank-N.json`, which [Perfetto](https://ui.perfetto.dev) and `chrome://tracing` open: an
//! array of events, one on a line. [`merge()`] makes one file of them, in which the ranks stand below
//! each other, and [`summarize`] a table that says which rank the others wait for.
//!
//! ```
//! use drumline::{Config, ProcessGroup, ReduceOp, trace::{Trace, merge, summarize}};
//!
//! let dir = std::env::temp_dir().join(format!("drumline-doc-{}", std::process::id()));
//! let config = Config { trace: Some(Trace::to(&dir)), ..Config::default() };
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

mod clock;
mod file;
mod format;
mod group_trace;
mod histogram;
mod join;
mod lines;
mod merge;
mod read;
mod summary;

use std::path::PathBuf;

use drumline_schedule::step::Rank;

pub(crate) use clock::Inquiry;
pub(crate) use group_trace::GroupTrace;
pub use merge::{Merged, merge};
pub use summary::{OperationSummary, RankSummary, Summary, summarize};

/// Where a rank writes what it does.
///
/// ```
/// use drumline::{Config, ProcessGroup, trace::Trace};
///
/// # let directory = tempfile::tempdir().unwrap();
/// # let dir = directory.path().join("trace");
/// let mut trace = Trace::to(&dir);
/// trace.bytes_max = 1 << 20;
/// let config = Config { trace: Some(trace), ..Config::default() };
/// for group in ProcessGroup::local_world_with(1, &config)? {
///     group.barrier()?;
///     group.destroy()?;
/// }
/// assert!(dir.join("rank-0.json").exists());
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// The directory, which belongs to one run: files of an earlier one are replaced. It is made
    /// if it is not there.
    pub dir: PathBuf,

    /// How long the file of a rank may become, in bytes; 256 MiB unless set, which is more than a
    /// million operations.
    pub bytes_max: u64,

    /// The rank of this process in the job, which names its file. That of the first group, unless
    /// known.
    pub(crate) rank: Option<Rank>,
}

impl Trace {
    /// A trace in `dir`.
    ///
    /// ```
    /// use drumline::trace::Trace;
    ///
    /// let trace = Trace::to("runs/7/trace");
    /// assert_eq!(trace.dir, std::path::Path::new("runs/7/trace"));
    /// assert_eq!(trace.bytes_max, 256 << 20);
    /// ```
    pub fn to(dir: impl Into<PathBuf>) -> Trace {
        Trace { dir: dir.into(), bytes_max: 256 << 20, rank: None }
    }
}

/// The file of a rank in the directory of a trace.
fn file_name(rank: Rank) -> String {
    format!("rank-{rank}.json")
}
