//! Collective algorithms as data: how ranks sum, spread, gather and meet.
//!
//! This crate rests on two ideas.
//!
//! **A collective is data, not code.** An algorithm is a pure function from the topology and a rank to a
//! [`Schedule`]: a short list of [steps](step::Step) over symbolic blocks ("block 2 of 5"). So one schedule
//! serves every length, element type and transport. This crate has no I/O, no clock and no number. An
//! executor needs to know the verbs and nothing else. Because a schedule is data, `drumline-inspect` can
//! prove it and draw it without a socket.
//!
//! **There is one order of sums.** For a given world size every algorithm adds along the same [`tree`].
//! Floating-point addition is not associative, so a fixed order makes the result the same to the last bit,
//! whatever the algorithm, the message size or the timing. The checker compares expressions, not numbers,
//! so it finds an algorithm that adds in another order.
//!
//! ```
//! use drumline_schedule::{Algorithm, Collective, Topology};
//!
//! // What rank 2 of 3 does to sum with the others.
//! let world = Topology::flat(3);
//! let binomial = Algorithm::find(Collective::AllReduce, "binomial")?;
//! println!("{}", binomial.schedule(&world, 2, 0)?);
//! // all_reduce binomial, rank 2 of 3
//! //   0  send    data -> rank 0
//! //   1  flush   until rank 0 has taken message 1
//! //   2  recv    data <- rank 0
//! # assert_eq!(binomial.schedule(&world, 2, 0)?.to_string(), "\
//! # all_reduce binomial, rank 2 of 3
//! #   0  send    data -> rank 0
//! #   1  flush   until rank 0 has taken message 1
//! #   2  recv    data <- rank 0
//! # ");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Where to read on: the verbs in [`step`], the order in [`tree`], the table in [`algorithm`], the prices of
//! links in [`price`], and which row is taken in [`Chooser`] and [`eligible`]. A new algorithm is a row of
//! the table, or an [`Algorithm`] of your own. `docs/schedules` shows all of them.

#![forbid(unsafe_code)]

pub mod algorithm;
mod chooser;
mod collective;
mod dealing;
pub mod device;
mod error;
mod extent;
mod flush;
mod lags;
mod pipeline;
pub mod price;
mod schedule;
mod situation;
pub mod step;
mod topology;
pub mod tree;

pub use algorithm::{ALGORITHMS, Algorithm, Cost, slice_holders};
pub use chooser::Chooser;
pub use collective::Collective;
pub use dealing::Dealing;
pub use error::Error;
pub use extent::{Blocks, Borders, Counts};
pub use lags::Lags;
pub use pipeline::Pipeline;
pub use schedule::{MemoryUse, Schedule, Shelves};
pub use situation::{Situation, Why, eligible};
pub use topology::{Rounding, SumOrder, Topology};
