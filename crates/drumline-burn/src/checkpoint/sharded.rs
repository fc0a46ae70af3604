//! The state of an optimizer that is shared out between the ranks.

use burn::module::Module;
use drumline::checkpoint::{self, Checkpoint};

use super::optimizer::{IntoOptimizer, OptimizerState, sealed::Saved};
use crate::ShardedOptimizer;

impl OptimizerState for ShardedOptimizer {}

impl IntoOptimizer for ShardedOptimizer {
    type Optimizer = Self;

    fn into_optimizer(self) -> (Self, Option<String>) {
        let config = self.config().map(str::to_owned);
        (self, config)
    }
}

impl Saved for ShardedOptimizer {
    fn to_tensors<M: Module>(&self, model: &M) -> Result<Vec<checkpoint::Tensor>, String> {
        self.part().to_tensors(model)
    }

    fn with_tensors<M: Module>(self, model: &M, from: &Checkpoint) -> Result<Self, String> {
        self.with_part(|part| part.with_tensors(model, from))
    }

    fn is_shared_out(&self) -> bool {
        true
    }

    fn keeps(&self, parameter: &str) -> bool {
        self.shards().keeps(parameter)
    }

    fn saves(&self, parameter: &str) -> bool {
        self.shards().saves(parameter)
    }
}
