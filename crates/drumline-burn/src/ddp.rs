use std::{
    collections::HashSet,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use burn::{
    module::Module,
    optim::GradientsParams,
    tensor::{Gradients, Tensor},
};
use drumline::{
    ProcessGroup,
    ddp::{DdpOptions, GradientReducer, ReducerStats, Timeline, UnusedParameters, verify_model},
};

use crate::{
    Error, Result,
    debug::Debug,
    gradients::{self, Slots},
    inspect::inspect,
    sync_batch_norm,
    tap::{self, Taps},
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
/// use drumline::ProcessGroup;
/// use drumline_burn::DistributedDataParallel;
///
/// std::thread::scope(|threads| {
///     for group in ProcessGroup::local_world(2)? {
///         threads.spawn(move || {
///             let device = Device::flex().autodiff();
///             let model = LinearConfig::new(2, 1).init(&device); // random
///             let (ddp, model) = DistributedDataParallel::wrap(model, &group).unwrap();
///             let batch = Tensor::<2>::ones([4, 2], &device) * (1 + group.rank()) as f32;
///             let loss = model.forward(batch).mean();
///             let gradients = ddp.backward(loss, &model).unwrap(); // instead of loss.backward()
///             let weight = gradients.get::<2>(model.weight.id).unwrap();
///             assert_eq!(weight.to_data().to_vec::<f32>().unwrap(), [1.5; 2]); // of both ranks
///         });
///     }
///     Ok::<_, drumline_burn::Error>(())
/// })?;
/// # Ok::<_, drumline_burn::Error>(())
/// ```
pub struct DistributedDataParallel {
    group: ProcessGroup,
    slots: Slots,
    reducer: Arc<GradientReducer>,
    /// `None` in a world of one rank, where burn's own gradients are the averages.
    taps: Option<Arc<Taps>>,
    unused_parameters: UnusedParameters,
    /// Whether the model has reparameterizations of the user.
    is_reparameterized: bool,
    steps: Arc<AtomicU64>,
    debug: Debug,
}

impl DistributedDataParallel {
    /// Makes `model` equal on all ranks of `group` and attaches gradient taps to its parameters.
    ///
    /// Returns the handle, and the model to train. Parameters that require no gradient now are
    /// treated as buffers.
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

    /// [`wrap`](Self::wrap) with other bucket sizes, or another policy for unused parameters.
    ///
    /// ```
    /// # use burn::{nn::{Linear, LinearConfig}, tensor::{Device, Tensor}};
    /// # use drumline::ProcessGroup;
    /// # use drumline_burn::{DdpOptions, DistributedDataParallel, UnusedParameters};
    /// # let device = Device::flex().autodiff();
    /// # let model: Linear = LinearConfig::new(2, 1).init(&device);
    /// # let group = ProcessGroup::alone();
    /// let options = DdpOptions::default().unused_parameters(UnusedParameters::Ignore);
    /// let (ddp, model) = DistributedDataParallel::wrap_with(model, &group, &options)?;
    /// // A loss that the bias has no part in.
    /// let gradients = ddp.backward(model.weight.val().sum(), &model)?;
    /// assert_eq!(gradients.len(), 1);
    /// # Ok::<_, drumline_burn::Error>(())
    /// ```
    pub fn wrap_with<M: Module>(
        model: M,
        group: &ProcessGroup,
        options: &DdpOptions,
    ) -> Result<(Self, M)> {
        let inspected = inspect(&model)?;
        verify_model(group, &inspected.parameters, &inspected.buffers, options)?;
        if let Some(problem) = inspected.problem {
            return Err(problem);
        }
        let model = tensors::broadcast(model, Which::All, group)?;

        let names = inspected.parameters.iter().map(|spec| spec.name.clone());
        let slots: Slots = names.zip(0..).collect();
        let reducer = GradientReducer::new(inspected.parameters.clone(), options, group)?;
        let mut ddp = Self {
            group: group.clone(),
            reducer: Arc::new(reducer),
            taps: None,
            unused_parameters: options.unused_parameters,
            is_reparameterized: inspected.is_reparameterized,
            steps: Arc::default(),
            debug: Debug::begin(group, &inspected.parameters, inspected.buffers.len(), options),
            slots,
        };
        if group.world_size() == 1 {
            return Ok((ddp, model));
        }
        inspected.warn(group.rank());
        let untappable: HashSet<&str> =
            inspected.untappable.iter().map(|(name, _)| name.as_str()).collect();
        let taps = Arc::new(Taps::new(ddp.reducer.clone(), ddp.slots.len()));
        let model = tap::attach(model, &taps, |path| {
            ddp.slots.get(path).copied().filter(|_| !untappable.contains(path))
        });
        ddp.taps = Some(taps);
        Ok((ddp, model))
    }

    /// `loss.backward()`, with the gradients of `model` averaged over all ranks.
    ///
    /// Gradients are sent to the other ranks while backward still computes the rest. The averages have
    /// the same bits on every rank; pass them to the optimizer. (`loss.backward()` itself
    /// still works, and gives this rank's own gradients.)
    ///
    /// ```
    /// # use burn::{nn::{Linear, LinearConfig}, tensor::{Device, Tensor}};
    /// # use drumline::ProcessGroup;
    /// # use drumline_burn::DistributedDataParallel;
    /// # let device = Device::flex().autodiff();
    /// # let model: Linear = LinearConfig::new(2, 1).init(&device);
    /// # let group = ProcessGroup::alone();
    /// let (ddp, model) = DistributedDataParallel::wrap(model, &group)?;
    /// let loss = model.forward(Tensor::<2>::ones([4, 2], &device)).mean();
    /// assert_eq!(ddp.backward(loss, &model)?.len(), 2); // of weight and bias
    ///
    /// let error = ddp.backward(model.weight.val().sum(), &model).unwrap_err().to_string();
    /// assert!(error.contains("parameter `bias` got no gradient"), "{error}");
    /// # Ok::<_, drumline_burn::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// A parameter got no gradient on some rank: every rank gets the same error, which names the
    /// parameter (unless [`UnusedParameters::Ignore`] was chosen). Or the communication failed, or the device of
    /// some rank.
    pub fn backward<M: Module, const D: usize>(
        &self,
        loss: Tensor<D>,
        model: &M,
    ) -> Result<GradientsParams> {
        let began = self.debug.begin_backward();
        let own = self.run(loss, true)?;
        self.debug.end_backward(began);
        let step = self.steps.fetch_add(1, Ordering::Relaxed) + 1;
        if self.taps.is_none() && !self.reducer.has_gradients() {
            let own = gradients::own(&self.slots, own, model, self.unused_parameters, step)?;
            self.debug.end_step(&self.group, || self.stats());
            return Ok(own);
        }
        let submitted = gradients::submit_missing(&self.reducer, &self.slots, &own, model);
        drop(own);
        let averaged = self.reducer.finish(); // even after a failure: the other ranks wait for this one
        submitted?;
        let averaged = averaged?;
        self.debug.end_step(&self.group, || self.stats());
        Ok(gradients::collect(averaged, &self.slots, model))
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
        let own = self.run(loss, false)?;
        gradients::accumulate(&self.reducer, &self.slots, &own, model)
    }

    /// Takes part in a step of the other ranks without data: for a rank whose share of an epoch ends before
    /// theirs. Returns `None` when no rank has data left.
    ///
    /// Until then it returns the averages over all ranks, in which ranks without data count as zeros. The
    /// rank passes the averages to its optimizer as usual. So parameters and optimizer states stay equal on
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
        if self.taps.is_none() {
            return Ok(None);
        }
        let Some(averaged) = self.reducer.shadow()? else { return Ok(None) };
        self.steps.fetch_add(1, Ordering::Relaxed);
        Ok(Some(gradients::collect(averaged, &self.slots, model)))
    }

    /// Copies rank 0's buffers to all ranks: running statistics and all other tensors that are not trained.
    ///
    /// Each rank updates its buffers from its own data. All ranks must call this with the model that is
    /// trained, before evaluation, a checkpoint or a digest. To do the same as torch with
    /// `broadcast_buffers=True`, call it before each forward. Evaluation itself communicates nothing, so one
    /// rank may evaluate alone. For a model without buffers it costs nothing.
    ///
    /// ```
    /// use burn::{module::Module, nn::BatchNormConfig, tensor::{Device, Tensor}};
    /// use drumline::ProcessGroup;
    /// use drumline_burn::{DistributedDataParallel, Error, parameters_digest};
    ///
    /// std::thread::scope(|threads| {
    ///     for group in ProcessGroup::local_world(2)? {
    ///         threads.spawn(move || {
    ///             let device = Device::flex().autodiff();
    ///             let norm = BatchNormConfig::new(1).init(&device);
    ///             let (ddp, norm) = DistributedDataParallel::wrap(norm, &group).unwrap();
    ///             let batch = Tensor::<3>::ones([2, 1, 2], &device) * group.rank() as f32;
    ///             norm.forward(batch); // changes the running mean, on each rank to another one
    ///             let norm = ddp.sync_buffers(norm).unwrap();
    ///             let mut digests = [0; 2];
    ///             group.all_gather(&[parameters_digest(&norm).unwrap()], &mut digests).unwrap();
    ///             assert_eq!(digests[0], digests[1]);
    ///             assert!(matches!(ddp.sync_buffers(norm.valid()), Err(Error::NotTraining)));
    ///         });
    ///     }
    ///     Ok::<_, Error>(())
    /// })?;
    /// # Ok::<_, drumline_burn::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::NotTraining`] for a model in validation mode; nothing is sent. Or the
    /// communication failed.
    #[doc(alias = "broadcast_buffers")]
    pub fn sync_buffers<M: Module>(&self, model: M) -> Result<M> {
        if !tensors::is_training(&model) {
            return Err(Error::NotTraining);
        }
        tensors::broadcast(model, Which::Buffers, &self.group)
    }

    /// Removes this handle's taps from the model.
    ///
    /// This is not needed for saving, evaluation or [`named_tensors`](crate::named_tensors), which see the
    /// same model with and without taps. It is needed only to go on without this handle, or to wrap the model
    /// again. A model with reparameterizations of its own keeps them. It keeps the taps, too, which then do
    /// nothing: burn can only remove all reparameterizations together.
    ///
    /// ```
    /// use burn::{nn::LinearConfig, tensor::{Device, Tensor}};
    /// use drumline::ProcessGroup;
    /// use drumline_burn::{DistributedDataParallel, Error};
    ///
    /// std::thread::scope(|threads| {
    ///     for group in ProcessGroup::local_world(2)? {
    ///         threads.spawn(move || {
    ///             let device = Device::flex().autodiff();
    ///             let model = LinearConfig::new(2, 1).init(&device); // random
    ///             let (ddp, model) = DistributedDataParallel::wrap(model, &group).unwrap();
    ///             let again = DistributedDataParallel::wrap(model.clone(), &group);
    ///             assert!(matches!(again, Err(Error::AlreadyWrapped { .. })));
    ///             let model = ddp.unwrap(model);
    ///             assert!(DistributedDataParallel::wrap(model, &group).is_ok());
    ///         });
    ///     }
    ///     Ok::<_, drumline_burn::Error>(())
    /// })?;
    /// # Ok::<_, drumline_burn::Error>(())
    /// ```
    pub fn unwrap<M: Module>(self, model: M) -> M {
        if self.is_reparameterized { model } else { model.materialize() }
    }

    /// How much was communicated so far, and how long backward's end had to wait for it.
    pub fn stats(&self) -> ReducerStats {
        let mut stats = self.reducer.stats();
        stats.steps = self.steps.load(Ordering::Relaxed);
        stats
    }

    /// When each bucket of the last step was launched and completed, counted from the beginning of backward.
    /// It can be printed. Empty in a world of one rank.
    pub fn timeline(&self) -> Timeline {
        self.reducer.timeline()
    }

    /// The group over which gradients are averaged.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// What a training of burn's `Learner` works with: it shares the reducer and the taps with this handle.
    #[cfg(feature = "train")]
    pub(crate) fn parts(&self) -> (Arc<GradientReducer>, Slots, Option<Arc<Taps>>, Arc<AtomicU64>) {
        (self.reducer.clone(), self.slots.clone(), self.taps.clone(), self.steps.clone())
    }

    /// This rank's own gradients; if `is_last`, the taps submit them.
    fn run<const D: usize>(&self, loss: Tensor<D>, is_last: bool) -> Result<Gradients> {
        if !loss.is_tracked() {
            return Err(Error::LossWithoutGradient);
        }
        self.reducer.begin_backward();
        let gradients = match &self.taps {
            Some(taps) => taps.run(is_last, || loss.backward()),
            None => loss.backward(),
        };
        match sync_batch_norm::take_failure() {
            None => Ok(gradients),
            Some(error) => Err(error),
        }
    }
}

impl fmt::Debug for DistributedDataParallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DistributedDataParallel")
            .field("group", &self.group)
            .field("parameters", &self.slots.len())
            .finish_non_exhaustive()
    }
}
