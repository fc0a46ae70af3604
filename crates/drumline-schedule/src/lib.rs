//! Collective algorithms as data: how ranks sum, spread, gather and meet.
//!
//! Two ideas make this crate.
//!
//! **A collective is data, not code.** An algorithm is a pure function from the topology and a
//! rank to a [`Schedule`]: a short list of [steps](step::Step) over symbolic blocks ("block 2 of
//! 5"), so that one schedule serves every length, element type and transport. There is no I/O
//! here, no clock and no number. Whoever runs a schedule needs to know nothing but the verbs; and
//! since it is data, it can be printed, [drawn](draw) and [proved](check) without a socket.
//!
//! **There is one order of sums.** For a given world size every algorithm adds along the same
//! [`tree`]. Floating-point addition is not associative, so this is what makes a result
//! the same to the last bit whatever algorithm, message size or timing led to it. The checker
//! compares expressions, not numbers, so that an algorithm which adds in another order is wrong.
//!
//! ```
//! use drumline_schedule::{Algorithm, Collective, Topology, check};
//!
//! // What rank 2 of 3 does to sum with the others ...
//! let world = Topology::flat(3);
//! let binomial = Algorithm::find(Collective::AllReduce, "binomial")?;
//! println!("{}", binomial.schedule(&world, 2, 0)?);
//! // all_reduce binomial, rank 2 of 3
//! //   0  send    data -> rank 0
//! //   1  flush   until rank 0 has taken message 1
//! //   2  recv    data <- rank 0
//!
//! // ... and the proof that all three get `(a + b) + c`, at the price in the table.
//! let cost = check::check(binomial, &world, 0, 1_000)?;
//! assert_eq!((cost.rounds, cost.messages, cost.elements), (2, 2, 2_000));
//! # assert_eq!(binomial.schedule(&world, 2, 0)?.to_string(), "\
//! # all_reduce binomial, rank 2 of 3
//! #   0  send    data -> rank 0
//! #   1  flush   until rank 0 has taken message 1
//! #   2  recv    data <- rank 0
//! # ");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! It serves `drumline`, which runs schedules, chooses among them, and hands [`Collective`],
//! [`SumOrder`] and [`PriceList`](price::PriceList) on to its users; `drumline simulate`, which
//! [replays](replay) them; and whoever writes an algorithm.
//!
//! Where to read on: the verbs in [`step`], the order in [`tree`], the table in [`algorithm`],
//! which row to take over links in [`price`]. A new algorithm is a row of the table, or a value of
//! type [`Algorithm`] of your own; [`check`] finds what is wrong with it. `docs/schedules` shows
//! them all.

#![forbid(unsafe_code)]

pub mod algorithm;
pub mod check;
pub mod draw;
mod error;
mod extent;
mod flush;
mod pipeline;
pub mod price;
pub mod replay;
mod schedule;
pub mod step;
mod topology;
pub mod tree;
mod walk;

pub use algorithm::{ALGORITHMS, Algorithm, Collective, Cost, MemoryUse};
pub use error::Error;
pub use extent::{Blocks, Borders, Counts};
pub use pipeline::Pipeline;
pub use schedule::Schedule;
pub use topology::{SumOrder, Topology};
