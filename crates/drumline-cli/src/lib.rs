//! The command line `drumline`: [`main`] is what the binary and the Python package call.
//!
//! ```text
//! $ drumline run --nproc-per-node 2 -- ./train --epochs 3
//! $ drumline check
//! $ drumline bench all_reduce --sizes 1M
//! $ drumline trace summary trace
//! ```
//!
//! A program that registers backends of its own calls [`check()`] to try them as well.

#![forbid(unsafe_code)]

#[cfg(feature = "bench")]
mod bench;
mod check;
mod cli;
mod command;
mod error;
mod output;
mod page;
mod secret;
mod trace;

pub use check::check;
pub use command::{main, refusal};
pub use error::{Error, Result};
