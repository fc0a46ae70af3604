use std::{fmt, sync::Arc};

use burn::{
    lr_scheduler::module_lr_scheduler::ModuleLearningRate,
    module::{Module, Param},
    optim::ModuleOptimizer,
    tensor::Tensor,
};
use drumline::{
    ProcessGroup,
    ddp::{DdpOptions, Owners, ReducerStats, Timeline},
};

use super::{gradients::ShardedGradients, shards::Shards, values};
use crate::{
    DistributedDataParallel, Result,
    agreement::{agree, same_settings},
    checkpoint::{IntoOptimizer, names_with_state},
    failure::{self, ProgramError},
    shards::ShardedStep,
    tensors::{VisitFloat, visit_floats},
};

/// Data-parallel training in which each rank keeps the optimizer's state of a part of the parameters: stage 1 of ZeRO,
/// torch's `ZeroRedundancyOptimizer` over `DistributedDataParallel`.
///
/// Adam's state takes twice the memory of the parameters, on every rank. Here each parameter has an owner. The owner
/// gets the average of its gradient, takes the optimizer's step for it, and sends its new value to all ranks. So a rank
/// of `p` keeps `1/p` of the state and, because no parameter is cut, at most one parameter's more. Parameters end with
/// the bits that [`DistributedDataParallel`] gives, and as many bytes are sent.
///
/// It takes any optimizer of burn, with its groups of parameters, but for `LBFGS`, whose state belongs to all parameters
/// together.
///
/// ```
/// use burn::{nn::{Linear, LinearConfig}, optim::AdamWConfig, tensor::{Device, Tensor}};
/// use drumline::ProcessGroup;
/// use drumline_burn::{Result, ShardedOptimizer, parameters_digest};
///
/// fn train(group: ProcessGroup) -> Result<u64> {
///     let device = Device::flex().autodiff();
///     let model: Linear = LinearConfig::new(2, 1).init(&device); // random: differs between ranks
///     let (mut optimizer, mut model) = ShardedOptimizer::wrap(model, AdamWConfig::new(), &group)?;
///     for step in 0..3 {
///         // This rank's share of the data:
///         let input = Tensor::<2>::full([4, 2], (step + group.rank()) as f32, &device);
///         let loss = (model.forward(input) - 1).square().mean();
///         let gradients = optimizer.backward(loss, &model)?; // instead of loss.backward()
///         model = optimizer.step(0.01, model, gradients)?;
///     }
///     parameters_digest(&model)
/// }
///
/// let ranks = drumline::rendezvous::local_world(2)?;
/// let threads: Vec<_> =
///     ranks.into_iter().map(|group| std::thread::spawn(move || train(group))).collect();
/// let digests: Vec<_> = threads.into_iter().map(|rank| rank.join().expect("no panic")).collect();
/// assert_eq!(digests[0].as_ref().ok(), digests[1].as_ref().ok()); // the same bits
/// # digests.into_iter().collect::<Result<Vec<_>>>()?;
/// # Ok::<(), drumline_burn::Error>(())
/// ```
///
/// # Checkpoints
///
/// Wrap first, give the `ShardedOptimizer` to [`TrainingState::new`](crate::checkpoint::TrainingState::new), then
/// resume. Saving brings the state of all ranks to rank 0. The file is the one that an optimizer on one rank would
/// write, with the same bits. So any number of ranks can go on from it, with a sharded optimizer or without.
///
/// # Limits
///
/// burn's `Learner` owns its optimizer, so it cannot train such a model; its error says so. A loss has one wrapped model.
/// Every optimizer of burn treats each parameter by itself; an optimizer of your own must, too.
#[doc(alias = "ZeroRedundancyOptimizer")]
#[doc(alias = "ZeRO")]
pub struct ShardedOptimizer {
    ddp: DistributedDataParallel,
    /// Has state of this rank's parameters alone.
    optimizer: ModuleOptimizer,
    /// The text of the optimizer's configuration.
    config: Option<String>,
    shards: Arc<Shards>,
}

impl ShardedOptimizer {
    /// Makes `model` equal on all ranks of `group`, as [`DistributedDataParallel::wrap`] does, and shares the
    /// optimizer's state out. `optimizer` is [a configuration](IntoOptimizer) or an optimizer that has taken no step.
    ///
    /// # Errors
    ///
    /// As for [`DistributedDataParallel::wrap`]. [`Argument`](crate::ErrorKind::Argument) on every rank if the optimizer of some rank has state
    /// already for a parameter that another rank owns: it names rank and parameter. So it is if ranks have other
    /// configurations of the optimizer.
    pub fn wrap<M: Module>(
        model: M,
        optimizer: impl IntoOptimizer<Optimizer = ModuleOptimizer>,
        group: &ProcessGroup,
    ) -> Result<(Self, M)> {
        Self::wrap_with(model, optimizer, group, &DdpOptions::default())
    }

    /// [`wrap`](Self::wrap) with other options.
    ///
    /// # Errors
    ///
    /// As for [`wrap`](Self::wrap).
    pub fn wrap_with<M: Module>(
        model: M,
        optimizer: impl IntoOptimizer<Optimizer = ModuleOptimizer>,
        group: &ProcessGroup,
        options: &DdpOptions,
    ) -> Result<(Self, M)> {
        let (optimizer, config) = optimizer.into_optimizer();
        let (ddp, model) = DistributedDataParallel::wrap_sharded(model, group, options)?;
        let reduction = &ddp.handle().reductions.own;
        let Some(owners) = reduction.reducer.owners() else {
            unreachable!("the model was wrapped for a sharded optimizer")
        };
        let shards = Shards::new(group.clone(), owners.clone(), reduction.slots().clone(), &model);
        let has_own_state_alone = names_with_state(&optimizer, &model).and_then(|names| {
            let owned = names.iter().filter_map(|name| Some((name, shards.owner(name)?)));
            match owned.into_iter().find(|(name, _)| !shards.keeps(name)) {
                None => Ok(()),
                Some((name, owner)) => Err(name_foreign(name, owner)),
            }
        });
        let sharded = failure::sharded;
        agree(group, has_own_state_alone)?.map_err(sharded)?;
        let settings = [("the optimizer", config.clone().unwrap_or_default())];
        same_settings(group, &settings)?.map_err(sharded)?;
        Ok((Self { ddp, optimizer, config, shards: Arc::new(shards) }, model))
    }

    /// `loss.backward()`, with the gradients of `model` averaged over all ranks, while backward still computes the rest.
    /// Each rank gets the averages of its own parameters.
    ///
    /// # Errors
    ///
    /// As for [`DistributedDataParallel::backward`].
    pub fn backward<M: Module, const D: usize>(
        &self,
        loss: Tensor<D>,
        model: &M,
    ) -> Result<ShardedGradients> {
        let here = self.ddp.backward(loss, model)?;
        Ok(ShardedGradients { here, shards: self.shards.clone() })
    }

    /// The gradients of step `number` of a training whose steps are shards, as [`DistributedDataParallel::step`]. Each rank
    /// gets the averages of its own parameters.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn backward_shards<M: Module, const D: usize>(
        &self,
        number: u64,
        loss: impl FnMut(usize) -> std::result::Result<Tensor<D>, ProgramError>,
        model: &M,
    ) -> Result<ShardedStep<ShardedGradients>> {
        let ShardedStep { gradients: here, loss } = self.ddp.step(number, loss, model)?;
        let gradients = ShardedGradients { here, shards: self.shards.clone() };
        Ok(ShardedStep { gradients, loss })
    }

    /// `loss.backward()` for one of several micro-batches, as [`DistributedDataParallel::accumulate`]: sends nothing.
    ///
    /// # Errors
    ///
    /// As there.
    #[doc(alias = "no_sync")]
    pub fn accumulate<M: Module, const D: usize>(&self, loss: Tensor<D>, model: &M) -> Result<()> {
        self.ddp.accumulate(loss, model)
    }

    /// Takes part in a step of the other ranks without data, as [`DistributedDataParallel::shadow`]. `None` when no rank
    /// has data left. The rank must take the step, too:
    ///
    /// ```
    /// # use burn::{module::Module, tensor::Tensor};
    /// # use drumline_burn::{Result, ShardedOptimizer};
    /// # fn epoch<M: Module>(optimizer: &mut ShardedOptimizer, mut model: M, batches: Vec<Tensor<2>>,
    /// #     loss: impl Fn(&M, Tensor<2>) -> Tensor<1>) -> Result<M> {
    /// for batch in batches {
    ///     let gradients = optimizer.backward(loss(&model, batch), &model)?;
    ///     model = optimizer.step(0.1, model, gradients)?;
    /// }
    /// while let Some(gradients) = optimizer.shadow(&model)? {
    ///     model = optimizer.step(0.1, model, gradients)?;
    /// }
    /// # Ok(model)
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`DistributedDataParallel::shadow`].
    #[doc(alias = "join")]
    pub fn shadow<M: Module>(&self, model: &M) -> Result<Option<ShardedGradients>> {
        let here = self.ddp.shadow(model)?;
        Ok(here.map(|here| ShardedGradients { here, shards: self.shards.clone() }))
    }

    /// Takes the optimizer's step for the parameters that this rank owns, and brings the new values of all parameters to
    /// all ranks, which must all call this. The learning rate is a number or what a scheduler of burn gives.
    ///
    /// # Errors
    ///
    /// The communication failed, or the device of some rank: every rank gets an error that names rank and parameter.
    /// [`Argument`](crate::ErrorKind::Argument) on every rank if ranks have other learning rates in the first step, or in one that
    /// [`DdpOptions::check_every`] names. [`Argument`](crate::ErrorKind::Argument) if `gradients` are of another `ShardedOptimizer`; nothing is
    /// sent then.
    pub fn step<M: Module>(
        &mut self,
        learning_rate: impl Into<ModuleLearningRate>,
        model: M,
        gradients: ShardedGradients,
    ) -> Result<M> {
        let ShardedGradients { here, shards } = gradients;
        if !Arc::ptr_eq(&shards, &self.shards) {
            let problem = "these gradients were computed by another `ShardedOptimizer`; pass those of this \
                           one's `backward`";
            return Err(failure::sharded(problem.to_owned()));
        }
        let learning_rate = learning_rate.into();
        self.check_rates(&learning_rate, &model)?;
        let model = self.optimizer.step(learning_rate, model, here);
        values::gather(model, &self.shards, &self.ddp.handle().reductions.own.reducer)
    }

    /// Compares the learning rates of the ranks, if it is time to: the values of parameters would not show a difference.
    fn check_rates<M: Module>(&self, rates: &ModuleLearningRate, model: &M) -> Result<()> {
        if !self.ddp.handle().reductions.own.reducer.is_check_step() {
            return Ok(());
        }
        let mut collect = Rates { rates, shards: &self.shards, found: Vec::new() };
        visit_floats(model, &mut collect);
        let found: Vec<(&str, String)> =
            collect.found.iter().map(|(name, rate)| (&name[..], rate.clone())).collect();
        same_settings(&self.group(), &found)?.map_err(failure::sharded)
    }

    /// Copies rank 0's buffers to all ranks, as [`DistributedDataParallel::sync_buffers`].
    ///
    /// # Errors
    ///
    /// As there.
    #[doc(alias = "broadcast_buffers")]
    pub fn sync_buffers<M: Module>(&self, model: M) -> Result<M> {
        self.ddp.sync_buffers(model)
    }

    /// A digest of the tensors that are equal on all ranks, as [`DistributedDataParallel::parameters_digest`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn parameters_digest<M: Module>(&self, model: &M) -> Result<u64> {
        self.ddp.parameters_digest(model)
    }

    /// Removes the taps from the model, as [`DistributedDataParallel::unwrap`].
    pub fn unwrap<M: Module>(self, model: M) -> M {
        self.ddp.unwrap(model)
    }

    /// This rank's part of the optimizer, to look at: its record has the state of the parameters that this rank owns.
    pub fn part(&self) -> &ModuleOptimizer {
        &self.optimizer
    }

    /// The rank that owns a parameter, by the parameter's path. `None` if it is not trained, or ignored.
    pub fn owner(&self, parameter: &str) -> Option<usize> {
        self.shards.owner(parameter)
    }

    /// How the parameters are shared out, by their index in the order in which the model defines those that are trained.
    pub fn owners(&self) -> &Owners {
        &self.shards.owners
    }

    /// How much was communicated so far.
    pub fn stats(&self) -> ReducerStats {
        self.ddp.stats()
    }

    /// When each bucket of the last backward was launched and completed, as [`DistributedDataParallel::timeline`].
    pub fn timeline(&self) -> Timeline {
        self.ddp.timeline()
    }

    /// The group over which gradients are averaged.
    pub fn group(&self) -> ProcessGroup {
        self.ddp.group()
    }

    pub(crate) fn shards(&self) -> &Shards {
        &self.shards
    }

    /// The same with another state of this rank's parameters.
    pub(crate) fn with_part<E>(
        self,
        change: impl FnOnce(ModuleOptimizer) -> Result<ModuleOptimizer, E>,
    ) -> Result<Self, E> {
        Ok(Self { optimizer: change(self.optimizer)?, ..self })
    }

    pub(crate) fn config(&self) -> Option<&str> {
        self.config.as_deref()
    }
}

/// Collects the learning rates of the parameters that have owners.
struct Rates<'a> {
    rates: &'a ModuleLearningRate,
    shards: &'a Shards,
    found: Vec<(String, String)>,
}

impl VisitFloat for Rates<'_> {
    fn float<const D: usize>(&mut self, name: &str, param: &Param<Tensor<D>>) {
        if self.shards.owner(name).is_some() {
            let rate = self.rates.lr_from_param(param.id, Some(name));
            self.found.push((format!("the learning rate of `{name}`"), rate.to_string()));
        }
    }
}

fn name_foreign(name: &str, owner: usize) -> String {
    format!(
        "the optimizer has state already for parameter `{name}`, which rank {owner} owns; wrap an optimizer that has \
         taken no step, and resume afterwards: `Checkpoints::resume` gives each rank its part"
    )
}

impl fmt::Debug for ShardedOptimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardedOptimizer")
            .field("ddp", &self.ddp)
            .field("bytes", &self.shards.owners.bytes(self.group().rank()))
            .finish_non_exhaustive()
    }
}
