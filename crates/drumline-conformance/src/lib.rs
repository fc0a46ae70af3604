//! What every transport and every backend must pass: cases, a sequential oracle, and whoever
//! carries the cases out.
//!
//! | module | what it holds |
//! |---|---|
//! | [`Case`] | one collective call, with the data of every rank and what must come out |
//! | [`same_bits`] | what gives the same bits wherever and however it is summed |
//! | [`suite`] | which cases there are |
//! | [`on_group`] | carries a case out with a [`ProcessGroup`](drumline::ProcessGroup) |
//! | [`Program`] | random groups and calls, of which every rank begins and awaits many at a time |
//! | [`World`] | where groups come from: shared memory, sockets, a backend of yours |
//!
//! A backend of your own is tested like this:
//!
//! ```
//! use drumline_conformance::{Extent, Threads, run};
//!
//! let world = Threads::new("over TCP", drumline::Config { unix_sockets: false, ..Default::default() });
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
pub mod suite;
mod value;
mod wait;
mod world;

pub use case::{Buffers, Case, Kind};
pub use part::Part;
pub use program::Program;
pub use suite::{Extent, run, run_part};
pub use world::{Threads, World};
