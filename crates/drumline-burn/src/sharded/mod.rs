//! An optimizer whose state is shared out between the ranks.

mod gradients;
mod optimizer;
mod shards;
mod values;

pub use self::{gradients::ShardedGradients, optimizer::ShardedOptimizer};
