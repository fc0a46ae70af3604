//! burn's `Learner` on many processes.
//!
//! The loop of a training is [`strategy`] and [`epoch`]; with [`silent`] they are all that depends on burn's crate for
//! training. The other files know models, gradients and groups alone.

mod averaging;
mod batches;
mod distribute;
mod epoch;
mod silent;
mod stopping;
mod strategy;

pub use distribute::{DistributedTraining, distribute};
