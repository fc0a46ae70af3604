//! burn's `Learner` on many processes.
//!
//! The loop of a training is [`strategy`], and [`epoch`] or [`shards`]; with [`state`] they are all that depends on burn's crate for
//! training. The other files know models, data, files, gradients and groups alone.

mod averaging;
mod batches;
mod distribute;
mod epoch;
mod newest;
mod shards;
mod shares;
mod state;
mod stopping;
mod strategy;

pub use distribute::{DistributedTraining, distribute};
pub use newest::newest_epoch;
