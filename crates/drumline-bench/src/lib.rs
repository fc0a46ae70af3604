//! The times of collectives on this host or between hosts: [`measure`] is `drumline bench`, whose options are
//! arguments of `clap`.

#![forbid(unsafe_code)]

mod bench;
mod error;
mod progress;
mod svg;

pub use bench::{Options as BenchOptions, is_over_mpi, measure};
pub use error::{Error, Result};
