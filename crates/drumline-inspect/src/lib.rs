//! Proves and draws the schedules of `drumline-schedule`.
//!
//! - [`check`] proves an algorithm right for one world size, on expressions instead of numbers.
//! - [`draw`] draws it.
//!
//! Programs that only run collectives need none of these.
//!
//! ```
//! use drumline_inspect::check;
//! use drumline_schedule::{Algorithm, Collective, Topology};
//!
//! // The proof that all three ranks get `(a + b) + c`, at the cost in the table.
//! let binomial = Algorithm::find(Collective::AllReduce, "binomial")?;
//! let cost = check::check(binomial, &Topology::flat(3), 0, 1_000)?;
//! assert_eq!((cost.rounds, cost.messages, cost.elements), (2, 2, 2_000));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

pub mod check;
pub mod draw;
mod unroll;
mod walk;

pub use unroll::unrolled;
