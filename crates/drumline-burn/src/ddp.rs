use std::{
    collections::HashSet,
    fmt,
    sync::{Arc, atomic::Ordering},
};

use burn::{module::Module, optim::GradientsParams, tensor::Tensor};
use drumline::{
    ElasticGroup, ProcessGroup,
    ddp::{DdpOptions, ReducerStats, Timeline},
};

use crate::{
    Result,
    debug::Debug,
    failure::{self, ProgramError},
    gradients::Kept,
    inspect::{Inspected, inspect},
    running::Running,
    shards::{self, ShardedStep},
    step::{Handle, Reduction, Reductions, Together},
    tap::{self, Taps, Wrapper},
    tensors::{self, Which},
};

/// Keeps the copies of a model on all ranks equal, by averaging their gradients.
///
/// [`wrap`](Self::wrap) once, then use [`backward`](Self::backward) instead of `loss.backward()`.
/// The model keeps its type; see the [crate's page](crate) for a whole program.
///
/// Every rank must wrap, run backward and synchronise buffers the same number of times, in the same order.
/// `wrap` copies rank 0's parameters to all ranks. After that, equal gradients and equal optimizers keep the
/// ranks equal, bit for bit.
///
/// ```
/// use burn::{nn::LinearConfig, tensor::{Device, Tensor}};
/// use drumline_burn::DistributedDataParallel;
///
/// drumline::local(2, |group| {
///     let device = Device::flex().autodiff();
///     let model = LinearConfig::new(2, 1).init(&device); // random
///     let (ddp, model) = DistributedDataParallel::wrap(model, &group)?;
///     let batch = Tensor::<2>::ones([4, 2], &device) * (1 + group.rank()) as f32;
///     let loss = model.forward(batch).mean();
///     let gradients = ddp.backward(loss, &model)?; // instead of loss.backward()
///     let weight = gradients.get::<2>(model.weight.id).unwrap();
///     assert_eq!(weight.to_data().to_vec::<f32>().unwrap(), [1.5; 2]); // of both ranks
///     Ok(())
/// })?;
/// # Ok::<_, drumline_burn::Error>(())
/// ```
pub struct DistributedDataParallel {
    handle: Handle,
    /// Whether the model has reparameterizations of the user.
    is_reparameterized: bool,
}

impl DistributedDataParallel {
    /// Makes `model` equal on all ranks of `group` and attaches gradient taps to its parameters.
    ///
    /// Returns the handle, and the model to train. Parameters that require no gradient now are
    /// treated as buffers. Parameters are f32, f64, f16 or bf16.
    ///
    /// Some parameters cannot have a tap: those that have a reparameterization of the user, and those on a device
    /// whose feature of this crate is off. Their gradients are averaged after backward instead of during it, and a
    /// warning names them. The factors of a LoRA adapter do get taps.
    ///
    /// # Errors
    ///
    /// The ranks hold different models, or a parameter cannot be averaged; the error names it.
    pub fn wrap<M: Module>(model: M, group: &ProcessGroup) -> Result<(Self, M)> {
        Self::wrap_with(model, group, &DdpOptions::default())
    }

    /// [`wrap`](Self::wrap) with other options: bucket sizes, unused parameters, the type in which gradients travel,
    /// tensors that each rank keeps for itself.
    pub fn wrap_with<M: Module>(
        model: M,
        group: &ProcessGroup,
        options: &DdpOptions,
    ) -> Result<(Self, M)> {
        let mut inspected = inspect(&model, options);
        if options.sharded {
            let problem = "`DdpOptions::sharded` gives each rank the averages of its own parameters alone: use \
                           `ShardedOptimizer::wrap_with`, whose steps bring their values to all ranks";
            inspected.problem.get_or_insert(failure::sharded(problem.to_owned()));
        }
        Self::wrap_inspected(model, inspected, group, options)
    }

    /// [`wrap_with`](Self::wrap_with) for a [`ShardedOptimizer`](crate::ShardedOptimizer).
    pub(crate) fn wrap_sharded<M: Module>(
        model: M,
        group: &ProcessGroup,
        options: &DdpOptions,
    ) -> Result<(Self, M)> {
        let options = options.clone().sharded(true);
        let inspected = inspect(&model, &options);
        Self::wrap_inspected(model, inspected, group, &options)
    }

    fn wrap_inspected<M: Module>(
        model: M,
        mut inspected: Inspected,
        group: &ProcessGroup,
        options: &DdpOptions,
    ) -> Result<(Self, M)> {
        inspected.verify(group, options)?;
        let is_ignored = |name: &str| options.ignores(name);
        let model = tensors::broadcast(model, Which::All, &is_ignored, 0, group)?;

        let own = Reduction::new(&[&inspected.parameters], options, group)?;
        let untappable: HashSet<&str> =
            inspected.untappable.iter().map(|(name, _)| name.as_str()).collect();
        let (mut taps, mut model) = (None, model);
        if group.world_size() > 1 {
            inspected.warn(group.rank());
            let these = Arc::new(Taps::new(inspected.parameters.len()));
            let wrapper = if options.sharded { Wrapper::ShardedOptimizer } else { Wrapper::Ddp };
            model = tap::attach(model, &these, wrapper, |path| {
                own.slots().get(path).copied().filter(|_| !untappable.contains(path))
            });
            taps = Some(these);
        }
        let handle = Handle {
            elastic: match options.shards {
                Some(_) if !options.sharded => ElasticGroup::new(group),
                _ => ElasticGroup::fixed(group),
            },
            options: options.clone(),
            taps,
            kept: Kept::new(inspected.ignored),
            steps: Arc::default(),
            debug: Debug::begin(group, &inspected.parameters, inspected.buffers.len(), options),
            parameters: inspected.parameters,
            reductions: Reductions::new(own),
            running: match options.shards {
                Some(_) => Running::find(&model, &is_ignored),
                None => Running::default(),
            },
        };
        Ok((Self { handle, is_reparameterized: inspected.is_reparameterized }, model))
    }

    /// `loss.backward()`, with the gradients of `model` averaged over all ranks.
    ///
    /// Gradients are sent to the other ranks while backward still computes the rest. The averages have
    /// the same bits on every rank; pass them to the optimizer. (`loss.backward()` itself
    /// still works, and gives this rank's own gradients.)
    ///
    /// # Errors
    ///
    /// A parameter got no gradient on some rank: every rank gets the same error, which names the
    /// parameter (unless [`UnusedParameters::Ignore`](crate::UnusedParameters) was chosen). Or parameters differ between
    /// ranks, which is found where the second step begins, and as often as [`DdpOptions::check_every`] says. Or the
    /// communication failed, or the device of some rank.
    pub fn backward<M: Module, const D: usize>(
        &self,
        loss: Tensor<D>,
        model: &M,
    ) -> Result<GradientsParams> {
        let mut gradients = Together::one(&self.handle, model).backward(loss)?;
        Ok(gradients.pop().unwrap_or_default())
    }

    /// `loss.backward()` for one of several micro-batches: adds the gradients to this rank's share of the
    /// step and sends nothing. The next [`backward`](Self::backward) averages the sum of all of them.
    ///
    /// With torch this is done within `no_sync()`. The losses are added up. If you want their mean, divide
    /// each loss by the number of micro-batches.
    ///
    /// ```
    /// # use burn::{nn::{Linear, LinearConfig}, optim::GradientsParams};
    /// # use burn::tensor::{Device, Tensor};
    /// # use drumline::ProcessGroup;
    /// # use drumline_burn::{DistributedDataParallel, Result};
    /// fn gradients_of_a_large_batch(
    ///     ddp: &DistributedDataParallel,
    ///     model: &Linear,
    ///     batch: Tensor<2>,
    /// ) -> Result<GradientsParams> {
    ///     let loss = |part: Tensor<2>| model.forward(part).square().mean() * (1.0 / 3.0);
    ///     let parts = batch.chunk(3, 0);
    ///     for part in &parts[..2] {
    ///         ddp.accumulate(loss(part.clone()), model)?; // nothing leaves this rank
    ///     }
    ///     ddp.backward(loss(parts[2].clone()), model) // all three, from all ranks
    /// }
    /// # let device = Device::flex().autodiff();
    /// # let model = LinearConfig::new(2, 1).init(&device);
    /// # let (ddp, model) = DistributedDataParallel::wrap(model, &ProcessGroup::alone())?;
    /// # let gradients = gradients_of_a_large_batch(&ddp, &model, Tensor::ones([6, 2], &device))?;
    /// # assert_eq!(gradients.len(), 2);
    /// # Ok::<_, drumline_burn::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The loss has no gradient, or the device failed. The next `backward` returns all other errors, and says on every
    /// rank that a device has failed.
    #[doc(alias = "no_sync")]
    pub fn accumulate<M: Module, const D: usize>(&self, loss: Tensor<D>, model: &M) -> Result<()> {
        Together::one(&self.handle, model).accumulate(loss)
    }

    /// Runs step `number` of a training whose steps are [shards](DdpOptions::shards): `loss` computes that of a shard, once
    /// for each shard that this rank has. The gradients of all shards are averaged, and so are their losses. The bits are
    /// the same on any number of ranks, as long as `loss` depends on the number of the step and the shard alone.
    ///
    /// Each shard begins with random numbers of its own, which follow from the seed in the options, `number` and the
    /// shard. After the step the program's generator goes on from where it was. (burn has one generator for all threads
    /// of a process.) Running statistics become those of shard 0, on all ranks; the other shards begin from the same.
    ///
    /// ```
    /// use burn::{nn::LinearConfig, optim::SgdConfig, tensor::{Device, Tensor}};
    /// use drumline_burn::{DdpOptions, DistributedDataParallel, parameters_digest};
    ///
    /// let train = |ranks: usize| {
    ///     drumline::local(ranks, |group| {
    ///         let device = Device::flex().autodiff();
    ///         let model = LinearConfig::new(2, 1).init(&device);
    ///         # let model = burn::module::Module::map(model, &mut Halves);
    ///         let options = DdpOptions::default().shards(4);
    ///         let (ddp, mut model) = DistributedDataParallel::wrap_with(model, &group, &options)?;
    ///         let mut optimizer = SgdConfig::new().init();
    ///         for number in 0..3 {
    ///             let loss = |shard: usize| {
    ///                 let input = Tensor::<2>::full([1, 2], (shard as f32 + 0.1).sin(), &device);
    ///                 Ok((model.forward(input) - number as f32).square().mean())
    ///             };
    ///             let step = ddp.step(number, loss, &model)?;
    ///             model = optimizer.step(0.1, model, step.gradients);
    ///         }
    ///         Ok(parameters_digest(&model)?)
    ///     })
    /// };
    /// # struct Halves;
    /// # impl burn::module::ModuleMapper for Halves {
    /// #     fn map_float<const D: usize>(
    /// #         &mut self,
    /// #         param: burn::module::Param<Tensor<D>>,
    /// #     ) -> burn::module::Param<Tensor<D>> {
    /// #         param.map(|it| Tensor::full(it.shape(), 0.5, &it.device()).require_grad())
    /// #     }
    /// # }
    /// let alone = train(1)?[0];
    /// assert_eq!(train(2)?, [alone; 2]);
    /// assert_eq!(train(3)?, [alone; 3]);
    /// # Ok::<_, drumline_burn::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`backward`](Self::backward). If `loss` fails, this rank returns its error, and the other ranks one that
    /// names this rank; the error of `loss` is the [detail](crate::Error::detail), a `Box<dyn Error + Send + Sync>`.
    /// [`Argument`](crate::ErrorKind::Argument) if the options do not say that a step is shards.
    pub fn step<M: Module, const D: usize>(
        &self,
        number: u64,
        loss: impl FnMut(usize) -> std::result::Result<Tensor<D>, ProgramError>,
        model: &M,
    ) -> Result<ShardedStep> {
        shards::run(&self.handle, number, loss, model)
    }

    /// Takes part in a step of the other ranks without data: for a rank whose share of an epoch ends before
    /// theirs. Returns `None` when no rank has data left.
    ///
    /// Until then it returns the averages over all ranks, in which ranks without data count as zeros, or with
    /// [`Divisor::ActiveRanks`](crate::Divisor) those over the ranks with data. The rank passes the averages to its
    /// optimizer as usual. So parameters and optimizer states stay equal on
    /// all ranks, bit for bit. With torch this is done by `Join`:
    ///
    /// ```
    /// # use burn::{module::Module, optim::ModuleOptimizer, tensor::Tensor};
    /// # use drumline_burn::{DistributedDataParallel, Result};
    /// # fn epoch<M: Module>(ddp: &DistributedDataParallel, mut model: M,
    /// #     mut optimizer: ModuleOptimizer, batches: Vec<Tensor<2>>,
    /// #     loss: impl Fn(&M, Tensor<2>) -> Tensor<1>) -> Result<M> {
    /// for batch in batches {
    ///     let gradients = ddp.backward(loss(&model, batch), &model)?;
    ///     model = optimizer.step(0.1, model, gradients);
    /// }
    /// while let Some(gradients) = ddp.shadow(&model)? {
    ///     model = optimizer.step(0.1, model, gradients);
    /// }
    /// # Ok(model)
    /// # }
    /// ```
    ///
    /// All ranks must do this, including those with most data. It replaces only [`backward`](Self::backward):
    /// if the other ranks also synchronise buffers in each step, this rank must do so, too. A
    /// [`SyncBatchNorm`](crate::SyncBatchNorm) waits for every rank's forward; give it an empty batch
    /// instead.
    ///
    /// # Errors
    ///
    /// As for [`backward`](Self::backward).
    #[doc(alias = "join")]
    pub fn shadow<M: Module>(&self, model: &M) -> Result<Option<GradientsParams>> {
        let gradients = Together::one(&self.handle, model).shadow()?;
        Ok(gradients.and_then(|mut of_models| of_models.pop()))
    }

    /// Copies rank 0's buffers to all ranks: running statistics and all other tensors that are not trained. If rank 0 had
    /// no data in the last step ([`shadow`](Self::shadow)), those of the lowest rank that had.
    ///
    /// Each rank updates its buffers from its own data. All ranks must call this with the model that is
    /// trained, before evaluation, a checkpoint or a digest. To do the same as torch with
    /// `broadcast_buffers=True`, call it before each forward. Evaluation itself communicates nothing, so one
    /// rank may evaluate alone. For a model without buffers it costs one small message.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) for a model in validation mode; nothing is sent. If ranks have other buffers, because one has
    /// frozen a layer for example, every rank gets an error that names rank and tensor. Or the communication failed.
    #[doc(alias = "broadcast_buffers")]
    pub fn sync_buffers<M: Module>(&self, model: M) -> Result<M> {
        if !tensors::is_training(&model) {
            return Err(failure::not_training());
        }
        let is_ignored = |name: &str| self.handle.options.ignores(name);
        let source = self.handle.reductions.last().reducer.lowest_active_rank();
        tensors::broadcast(model, Which::Buffers, &is_ignored, source, &self.group())
    }

    /// [`parameters_digest`](crate::parameters_digest) of the tensors that are equal on all ranks: without those that
    /// the options [ignore](DdpOptions::ignore).
    ///
    /// # Errors
    ///
    /// As for [`parameters_digest`](crate::parameters_digest).
    pub fn parameters_digest<M: Module>(&self, model: &M) -> Result<u64> {
        tensors::digest_except(model, &|name| self.handle.options.ignores(name))
    }

    /// Removes this handle's taps from the model.
    ///
    /// This is not needed for saving, evaluation or [`named_tensors`](crate::named_tensors), which see the
    /// same model with and without taps. It is needed only to go on without this handle, or to wrap the model
    /// again. A model with reparameterizations of its own keeps them. It keeps the taps, too, which then do
    /// nothing: burn can only remove all reparameterizations together.
    pub fn unwrap<M: Module>(self, model: M) -> M {
        if self.is_reparameterized { model } else { model.materialize() }
    }

    /// How much was communicated so far, and how long backward's end had to wait for it.
    pub fn stats(&self) -> ReducerStats {
        let mut stats = self.handle.reductions.stats();
        stats.steps = self.handle.steps.load(Ordering::Relaxed);
        stats
    }

    /// When each bucket of the last step was launched and completed, counted from the beginning of backward.
    /// It can be printed. Empty in a world of one rank.
    pub fn timeline(&self) -> Timeline {
        self.handle.reductions.last().reducer.timeline()
    }

    /// The group over which gradients are averaged. With [shards](DdpOptions::shards) it is another one after a rank has
    /// died.
    pub fn group(&self) -> ProcessGroup {
        self.handle.elastic.group()
    }

    /// What goes on when a rank has died, if the options say [`shards`](DdpOptions::shards): each [`step`](Self::step) is a
    /// piece of it. Hand in what else the ranks do together.
    pub fn elastic(&self) -> &ElasticGroup {
        &self.handle.elastic
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }
}

impl fmt::Debug for DistributedDataParallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DistributedDataParallel")
            .field("group", &self.group())
            .field("parameters", &self.handle.parameters.len())
            .finish_non_exhaustive()
    }
}
