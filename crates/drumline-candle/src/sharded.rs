//! AdamW whose state is shared out between the ranks.

use std::{fmt, path::Path, sync::Arc};

use candle_core::{Tensor, backprop::GradStore};
use candle_nn::{Optimizer, ParamsAdamW, VarMap};
use drumline::{
    Objects, ProcessGroup,
    checkpoint::Checkpoint,
    ddp::{DdpOptions, Owners, ReducerStats, Timeline},
    sampler::DistributedSampler,
};

use crate::{
    Error, Result,
    adamw::{AdamW, state_specs, variable_of},
    checkpoint::{self, OPTIMIZER, Resumable},
    data_parallel::{DataParallel, fail_with},
    failure::OrFail,
    variables,
};

/// Data-parallel training with [`AdamW`] in which each rank keeps the moments of a part of the variables:
/// stage 1 of ZeRO, torch's `ZeroRedundancyOptimizer` over `DistributedDataParallel`.
///
/// AdamW's moments take twice the memory of the variables, on every rank. Here each variable has an owner. The owner gets
/// the average of its gradient, takes the step for it, and sends its new value to all ranks. So a rank of `p` keeps `1/p`
/// of the moments and, because no variable is cut, at most one variable's more. Variables end with the bits that
/// [`DataParallel`] gives, and as many bytes are sent.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, ParamsAdamW, VarBuilder, VarMap, linear};
/// use drumline::ProcessGroup;
/// use drumline_candle::{ShardedOptimizer, variables_digest};
///
/// fn train(group: ProcessGroup) -> anyhow::Result<u64> {
///     let varmap = VarMap::new();
///     let model = linear(2, 1, VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu))?;
///     let params = ParamsAdamW { lr: 0.01, ..ParamsAdamW::default() };
///     let mut optimizer = ShardedOptimizer::wrap(&varmap, params, &group)?;
///     for step in 0..3 {
///         // This rank's share of the data:
///         let input = Tensor::full((step + group.rank()) as f32, (4, 2), &Device::Cpu)?;
///         let loss = (model.forward(&input)? - 1.0)?.sqr()?.mean_all()?;
///         optimizer.backward_step(&loss)?;
///     }
///     Ok(variables_digest(&varmap)?)
/// }
///
/// let digests = drumline::local(2, |group| Ok(train(group)?))?;
/// assert_eq!(digests[0], digests[1]); // the same bits
/// # Ok::<(), anyhow::Error>(())
/// ```
#[doc(alias = "ZeroRedundancyOptimizer")]
#[doc(alias = "ZeRO")]
pub struct ShardedOptimizer {
    ddp: DataParallel,
    /// Of the variables of this rank alone.
    part: AdamW,
    identity: Arc<()>,
}

/// The averages of the gradients of one step, of which this rank has those of its own variables.
/// [`ShardedOptimizer::backward`] makes them, and only [`ShardedOptimizer::step`] takes them.
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::{Module, ParamsAdamW, VarBuilder, VarMap, linear};
/// # use drumline::ProcessGroup;
/// use drumline_candle::{ShardedGradients, ShardedOptimizer};
/// # let varmap = VarMap::new();
/// # let model = linear(2, 1, VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu))?;
/// # let input = Tensor::ones((3, 2), DType::F32, &Device::Cpu)?;
///
/// let mut optimizer =
///     ShardedOptimizer::wrap(&varmap, ParamsAdamW::default(), &ProcessGroup::alone())?;
/// let loss = model.forward(&input)?.sqr()?.mean_all()?;
/// let gradients: ShardedGradients = optimizer.average(loss.backward()?)?;
/// optimizer.step(gradients)?;
/// # Ok::<_, anyhow::Error>(())
/// ```
#[must_use = "`ShardedOptimizer::step` takes them"]
pub struct ShardedGradients {
    store: GradStore,
    of: Arc<()>,
}

impl ShardedOptimizer {
    /// Makes the variables of `varmap` equal on all ranks of `group`, as [`DataParallel::wrap`] does, and shares the
    /// moments out.
    ///
    /// # Errors
    ///
    /// As for [`DataParallel::wrap`].
    pub fn wrap(varmap: &VarMap, params: ParamsAdamW, group: &ProcessGroup) -> Result<Self> {
        Self::wrap_with(varmap, params, group, &DdpOptions::default())
    }

    /// [`wrap`](Self::wrap) with other options, as [`DataParallel::wrap_with`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn wrap_with(
        varmap: &VarMap,
        params: ParamsAdamW,
        group: &ProcessGroup,
        options: &DdpOptions,
    ) -> Result<Self> {
        let ddp = DataParallel::wrap_for(varmap, group, &options.clone().sharded(true))?;
        let own = variables::sorted(varmap).into_iter().filter(|it| ddp.keeps(&it.name));
        let part = AdamW::new(own.map(|it| it.var).collect(), params).or_fail()?;
        Ok(Self { ddp, part, identity: Arc::default() })
    }

    /// Averages the gradients of the variables over all ranks, as [`DataParallel::average`]. Each rank gets the averages
    /// of its own variables.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn average(&mut self, mut gradients: GradStore) -> Result<ShardedGradients> {
        self.ddp.average(&mut gradients)?;
        Ok(ShardedGradients { store: gradients, of: self.identity.clone() })
    }

    /// `loss.backward()`, with the gradients averaged over all ranks, as [`DataParallel::backward`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn backward(&mut self, loss: &Tensor) -> Result<ShardedGradients> {
        let store = self.ddp.backward(loss)?;
        Ok(ShardedGradients { store, of: self.identity.clone() })
    }

    /// Takes part in a step of the other ranks without data, as [`DataParallel::shadow`]. The rank must take the step,
    /// too. `None` when no rank has data left.
    ///
    /// # Errors
    ///
    /// As there.
    #[doc(alias = "join")]
    pub fn shadow(&mut self) -> Result<Option<ShardedGradients>> {
        let store = self.ddp.shadow()?;
        Ok(store.map(|store| ShardedGradients { store, of: self.identity.clone() }))
    }

    /// Takes the step for the variables of this rank, and brings the new values of all variables to all ranks, which must
    /// all call this.
    ///
    /// # Errors
    ///
    /// The communication failed, or candle did. If a value cannot be read from its device, every rank gets an error that
    /// names rank and variable. So it does if ranks have other settings in the first step, or in one that
    /// [`DdpOptions::check_every`] names. Gradients of another `ShardedOptimizer` are an error, and nothing is sent.
    pub fn step(&mut self, gradients: ShardedGradients) -> Result<()> {
        self.check(&gradients, "ShardedOptimizer::step")?;
        self.check_params()?;
        self.part.step(&gradients.store).or_fail()?;
        self.ddp.gather()
    }

    /// Scales averaged gradients down, so that the norm of all of them together is at most `max_norm`, as
    /// [`DataParallel::clip_grad_norm`]. Returns the norm that they had. Here each rank knows a part of it, so all ranks
    /// must call this. They exchange one number for each variable, and get the bits of plain training.
    ///
    /// # Errors
    ///
    /// The communication failed. If a gradient cannot be read, every rank gets an error that names rank and variable.
    /// Gradients of another `ShardedOptimizer` are an error, and nothing is sent.
    #[doc(alias = "clip_grad_norm_")]
    pub fn clip_grad_norm(&self, gradients: &mut ShardedGradients, max_norm: f64) -> Result<f64> {
        self.check(gradients, "ShardedOptimizer::clip_grad_norm")?;
        self.ddp.clip_grad_norm(&mut gradients.store, max_norm)
    }

    /// [`backward`](Self::backward) and [`step`](Self::step).
    ///
    /// # Errors
    ///
    /// As for both.
    pub fn backward_step(&mut self, loss: &Tensor) -> Result<()> {
        let gradients = self.backward(loss)?;
        self.step(gradients)
    }

    /// Copies rank 0's buffers to all ranks, as [`DataParallel::sync_buffers`].
    ///
    /// # Errors
    ///
    /// As there.
    #[doc(alias = "broadcast_buffers")]
    pub fn sync_buffers(&self) -> Result<()> {
        self.ddp.sync_buffers()
    }

    /// The whole training, as [`checkpoint()`](crate::checkpoint()) makes it of one with [`AdamW`]: the
    /// same bits. All ranks must call this. Rank 0 gets the checkpoint, the others get an empty one:
    ///
    /// ```
    /// # use candle_nn::VarMap;
    /// # use drumline::{checkpoint::CheckpointDirectory, sampler::DistributedSampler};
    /// # use drumline::ProcessGroup;
    /// # use drumline_candle::{Result, ShardedOptimizer};
    /// # fn save(optimizer: &ShardedOptimizer, sampler: &DistributedSampler, out: &CheckpointDirectory,
    /// #     group: &ProcessGroup, step: u64) -> Result<()> {
    /// let whole = optimizer.checkpoint(sampler)?;
    /// out.save_on_root(group, step, || Ok(whole))
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// A variable or a moment cannot be read: every rank gets an error that names the rank.
    pub fn checkpoint(&self, sampler: &DistributedSampler) -> Result<Checkpoint> {
        let group = self.ddp.group();
        let place = Path::new("of a sharded optimizer");
        let mut whole = Checkpoint::gather_on_root(&group, place, self.part())?;
        if group.rank() == 0 {
            checkpoint::add_the_rest(self.ddp.varmap(), sampler, &mut whole)?;
        }
        Ok(whole)
    }

    /// Goes on from a checkpoint of any number of ranks, whether its AdamW was sharded or not, as
    /// [`resume()`](crate::resume()). Every rank must be given the same checkpoint, and keeps its part of the moments.
    ///
    /// # Errors
    ///
    /// As there, alike on all ranks.
    pub fn resume(
        &mut self,
        checkpoint: &Checkpoint,
        sampler: &mut DistributedSampler,
    ) -> Result<()> {
        let varmap = self.ddp.varmap();
        let variables = variables::sorted(varmap);
        let floats = variables.iter().filter(|it| it.var.dtype().is_float());
        checkpoint.check(OPTIMIZER, state_specs(floats)?)?;
        let mut part = Checkpoint::default();
        part.metadata.clone_from(&checkpoint.metadata);
        for tensor in checkpoint.tensors() {
            let state = tensor.name().strip_prefix(OPTIMIZER).and_then(variable_of);
            if state.is_none_or(|variable| self.ddp.keeps(variable)) {
                part.insert(tensor.clone());
            }
        }
        checkpoint::resume(&part, varmap, &mut self.part, sampler)
    }

    /// Learning rate, decay rates of the moments, and weight decay.
    pub fn params(&self) -> &ParamsAdamW {
        self.part.params()
    }

    /// Sets them for the steps that follow. They must be the same on all ranks.
    pub fn set_params(&mut self, params: ParamsAdamW) {
        self.part.set_params(params);
    }

    /// The learning rate.
    pub fn learning_rate(&self) -> f64 {
        self.part.learning_rate()
    }

    /// Sets the learning rate for the steps that follow. It must be the same on all ranks.
    pub fn set_learning_rate(&mut self, learning_rate: f64) {
        self.part.set_learning_rate(learning_rate);
    }

    /// The rank that owns a variable. `None` if it is not of a floating-point type, or ignored.
    pub fn owner(&self, variable: &str) -> Option<usize> {
        self.ddp.owner(variable)
    }

    /// How the floating-point variables are shared out, by their index in order of name.
    pub fn owners(&self) -> &Owners {
        match self.ddp.owners() {
            Some(owners) => owners,
            None => unreachable!("it was wrapped with owners"),
        }
    }

    /// How much was communicated so far.
    pub fn stats(&self) -> ReducerStats {
        self.ddp.stats()
    }

    /// When each bucket of the last step was averaged, as [`DataParallel::timeline`].
    pub fn timeline(&self) -> Timeline {
        self.ddp.timeline()
    }

    /// The group over which gradients are averaged.
    pub fn group(&self) -> ProcessGroup {
        self.ddp.group()
    }

    /// Compares the settings of the ranks, if it is time to: the values of variables would not show a difference.
    fn check_params(&self) -> Result<()> {
        if !self.ddp.is_check_step() {
            return Ok(());
        }
        let own = format!("{:?}", self.params());
        let all = self.ddp.group().all_gather_object(&own)?;
        let differs = |params: &String| {
            (*params != all[0]).then(|| format!("it has {params}, but rank 0 has {}", all[0]))
        };
        fail_with(all.iter().map(differs).collect())
    }

    /// Refuses the gradients of another optimizer.
    fn check(&self, gradients: &ShardedGradients, operation: &'static str) -> Result<()> {
        if Arc::ptr_eq(&gradients.of, &self.identity) {
            return Ok(());
        }
        let problem = "these gradients were computed by another `ShardedOptimizer`; pass those of this one's \
                       `backward`";
        Err(Error::argument(operation, problem))
    }

    /// What this rank brings to a checkpoint. What all ranks have alike is rank 0's.
    fn part(&self) -> Result<Checkpoint> {
        let rank = self.ddp.group().rank();
        let mut own = Checkpoint::default();
        self.part.save(OPTIMIZER, self.ddp.varmap(), &mut own)?;
        let mut part = Checkpoint::default();
        for tensor in own.tensors() {
            let variable = tensor.name().strip_prefix(OPTIMIZER).and_then(variable_of);
            let owner = variable.and_then(|variable| self.ddp.owner(variable));
            if owner.unwrap_or(0) == rank {
                part.insert(tensor.clone());
            }
        }
        Ok(part)
    }
}

impl fmt::Debug for ShardedOptimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardedOptimizer")
            .field("ddp", &self.ddp)
            .field("params", self.params())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for ShardedGradients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ShardedGradients")
    }
}
