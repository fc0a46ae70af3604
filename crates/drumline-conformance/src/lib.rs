//! The tests that every transport and every backend must pass: cases, a sequential oracle, and runners.
//!
//! | module | what it holds |
//! |---|---|
//! | [`Case`] | one collective call, with the data and the expected result of every rank |
//! | [`same_bits`] | sums that must have the same bits over every transport and by every algorithm |
//! | [`suite`] | the list of cases |
//! | [`on_group`] | runs a case on a [`ProcessGroup`](drumline::ProcessGroup) |
//! | [`Program`] | random groups and calls; every rank has many calls under way at a time |
//! | [`under_mpi`] | starts ranks by the MPIs that are installed |
//! | [`World`] | makes groups: over shared memory, sockets, or your own backend |
//!
//! To test your own backend:
//!
//! ```
//! use drumline_conformance::{Extent, Threads, run};
//!
//! let world = Threads::new("over TCP", drumline::Config::default().unix_sockets(false));
//! run(&world, &[2], Extent::Small)?;
//! # Ok::<(), String>(())
//! ```
//!
//! The oracle computes one element at a time, in the canonical order of sums, and without the
//! kernels of the library.

#![forbid(unsafe_code)]

mod case;
pub mod on_group;
mod oracle;
mod part;
mod program;
pub mod same_bits;
mod slices;
pub mod suite;
pub mod under_mpi;
mod value;
mod wait;
mod world;

pub use case::{Buffers, Case, Kind};
pub use part::Part;
pub use program::Program;
pub use suite::{Extent, run, run_part};
pub use world::{Threads, World};
