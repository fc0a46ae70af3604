//! Which samples of a data set a rank works on, and in which order.
//!
//! [`DistributedSampler`] gives the indices that torch's sampler of that name gives for the same
//! arguments, in the same order. A run can move between the two and still see the same batches.
//! [`evaluation_shard`] is for evaluation: it never repeats a sample.
//!
//! ```
//! use drumline::sampler::{DistributedSampler, evaluation_shard};
//!
//! # fn main() -> drumline::Result<()> {
//! let (samples, world_size, rank) = (10, 4, 1);
//! let mut sampler = DistributedSampler::builder(samples, world_size, rank).seed(7).build()?;
//! for epoch in 0..3 {
//!     sampler.set_epoch(epoch); // another order, the same one on every rank
//!     let indices: Vec<usize> = sampler.iter().collect();
//!     assert_eq!(indices.len(), 3); // ceil(10 / 4): all ranks take equally many steps
//! }
//!
//! assert_eq!(evaluation_shard(samples, world_size, rank)?, 3..6);
//! # Ok(())
//! # }
//! ```
//!
//! An epoch can be interrupted and continued, even by another number of ranks: see
//! [`SamplerState`].

mod distributed;
mod evaluation;
mod mt19937;
mod permutation;
mod rank;
mod shards;
mod state;

pub use self::{
    distributed::{DistributedSampler, DistributedSamplerBuilder, Indices},
    evaluation::evaluation_shard,
    shards::shards_of_rank,
    state::SamplerState,
};
