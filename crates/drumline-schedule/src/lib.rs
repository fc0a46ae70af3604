//! Collective algorithms as data.

#![forbid(unsafe_code)]

pub mod algorithm;
pub mod check;
pub mod draw;
mod error;
mod flush;
mod schedule;
pub mod step;
mod topology;
pub mod tree;
mod walk;

pub use algorithm::{ALGORITHMS, Algorithm, Collective, Cost};
pub use error::Error;
pub use schedule::Schedule;
pub use topology::Topology;
