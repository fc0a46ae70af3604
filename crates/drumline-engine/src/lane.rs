//! The queue of one group on one rank: one collective after another, sends and receives beside them.
//!
//! A lane has no thread, no lock and no clock, and never blocks unless it is told to sleep. A blocking call,
//! the progress thread and the simulator all drive it in the same way.

mod closing;
mod collectives;
mod messages;
mod patience;
mod plans;
mod sleep;
mod state;
mod waiting;

pub use state::Lane;
