//! The times of collectives. [`measure`] takes them on this host or between hosts (`drumline bench`).
//! [`predict()`] predicts them for a cluster that need not exist, by replaying the schedules (`drumline
//! predict`).
//!
//! Both are parts of the command line: their options are arguments of `clap`.
//!
//! ```
//! use clap::Parser;
//! use drumline_bench::PredictOptions;
//!
//! #[derive(Parser)]
//! struct Arguments {
//!     #[command(flatten)]
//!     options: PredictOptions,
//! }
//!
//! let Arguments { options } = Arguments::parse_from(["predict", "--hosts", "4", "--sizes", "1M"]);
//! let mut text = Vec::new();
//! drumline_bench::predict(&options, &mut text)?;
//! assert!(String::from_utf8_lossy(&text).contains("4 ranks"));
//! # Ok::<_, drumline_bench::Error>(())
//! ```

#![forbid(unsafe_code)]

mod bench;
mod error;
mod predict;
mod progress;
mod svg;

pub use bench::{Options as BenchOptions, is_over_mpi, measure};
pub use error::{Error, Result};
pub use predict::{Options as PredictOptions, predict};
