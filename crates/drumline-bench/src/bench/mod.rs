//! `drumline bench`: how fast collectives are on this host, or between hosts.
//!
//! | module | what it holds |
//! |---|---|
//! | `options`, `choice` | the options, and the values that they choose from |
//! | `operation` | what is measured: the buffers, result and bus factor of each operation |
//! | `answers` | inputs whose results are known, and the count of wrong elements |
//! | `trial` | one case: an operation with its buffers, and how a rank calls it |
//! | `session` | all cases, and the order in which they take turns |
//! | `carrier` | a group for each transport |
//! | `measure` | the times of one turn, and the CPU time and thread switches of an operation |
//! | `bound`, `plain_stream` | what operations are compared with: a copy, or a plain stream |
//! | `probe` | near or far: how long a word takes from core to core |
//! | `row`, `table`, `plot` | one figure, and all figures as text, JSON and SVG |
//! | `explain` | which algorithm was taken, and what the others would have cost |

mod answers;
mod bound;
mod carrier;
mod choice;
mod explain;
mod measure;
mod operation;
mod options;
mod plain_stream;
mod plot;
mod probe;
mod row;
mod session;
mod table;
mod trial;

pub use self::{carrier::is_over_mpi, options::Options, session::measure};
