//! What every rank did, and when: each rank writes a file, and what reads these files brings them together.
//!
//! | module | what it holds |
//! |---|---|
//! | [`GroupTrace`] | the records of a group on one rank, and the file to which they go |
//! | [`Trace`] | the directory of these files |
//! | [`Inquiry`], [`Offset`] | how far the clocks of two hosts are apart |
//! | [`merge()`], [`summarize`] | one file, or two tables, of the files of all ranks |
//! | [`Outlet`] | where lines go, and a thread that waits for those who read them |
//!
//! The module `trace` of `drumline-group` describes the files for users.

#![forbid(unsafe_code)]

mod clock;
mod destination;
mod file;
mod format;
mod group_trace;
mod histogram;
mod join;
mod lines;
mod merge;
mod outlet;
mod read;
mod summary;

pub use clock::{Inquiry, Offset};
pub use destination::Trace;
pub use drumline_error::{Error, Result};
pub use group_trace::GroupTrace;
pub use merge::{Merged, merge};
pub use outlet::{ERASE, Outlet, Stderr, stderr, write_all};
pub use summary::{OperationSummary, RankSummary, Summary, summarize};
