//! The table of algorithms.
//!
//! An algorithm is a row of [`ALGORITHMS`]: its properties, a function that writes the steps of one rank,
//! and a function that returns its cost. To add an algorithm, add a row; the checker in `drumline-inspect`
//! proves it. A row of your own need not be in the table to be scheduled or checked.
//!
//! Every row keeps the order of sums of [`tree`](crate::tree). So the choice of a row changes the time that
//! a call takes, and no bit of its result.

mod apart;
mod binomial;
mod bruck;
mod carriers;
mod cost;
mod cube;
mod cube_census;
mod direct;
mod dissemination;
mod doubling;
mod gather;
mod halving;
mod halving_blocks;
mod hierarchical;
mod hierarchical_blocks;
mod hierarchical_exchange;
mod hierarchical_gather;
mod hierarchical_rooted;
mod leaders;
mod nodes;
mod registered;
mod ring;
mod rooted;
mod row;
mod schedules;
mod seats;
mod shared;
mod shared_blocks;
mod shared_rooted;
mod table;

pub use cost::Cost;
pub use direct::DIRECT_MAX_RANKS;
pub use hierarchical::slice_holders;
pub use row::{Algorithm, Lengths, any};
pub use table::ALGORITHMS;
