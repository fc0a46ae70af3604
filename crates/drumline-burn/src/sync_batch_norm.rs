//! Batch normalisation over the samples of all ranks.

mod statistics;
mod step;

use burn::{
    module::{Flag, Module, Param, RunningState},
    nn::{BatchNorm, BatchNormConfig},
    tensor::{Device, Tensor, TensorData, module::batch_norm},
};
use drumline::ProcessGroup;

use self::statistics::Statistics;
pub(crate) use self::step::take_failure;
use crate::{Result, failure, pack, shards};

/// Batch normalisation with the mean and variance of the samples of *all* ranks.
///
/// It replaces burn's [`BatchNorm`] in a model where each rank has few samples. The names of its tensors are
/// the same, so a checkpoint of one fits the other. As in torch's `SyncBatchNorm`, and unlike in burn's
/// layer, the running variance is unbiased.
///
/// Forward gathers a few numbers per channel from all ranks, and backward sums as many. So all ranks must
/// call both, in the same order. Each rank may have any number of samples, or none. (On a GPU it needs at least
/// one, because burn cannot compute with empty tensors there.) In validation (`model.valid()`, or a frozen
/// layer) nothing is sent.
///
/// # A group of its own
///
/// Use `group` for normalisation only: backward waits for it while gradients travel in another group. All
/// such layers of a model share one group. To make a second group, connect it under a name of its own
/// ([`drumline::rendezvous::connect`]).
///
/// ```
/// use burn::{module::Module, nn::{Linear, LinearConfig}, tensor::{Device, Tensor}};
/// use drumline::ProcessGroup;
/// use drumline_burn::{DistributedDataParallel, Result, SyncBatchNorm, SyncBatchNormConfig};
///
/// #[derive(Module, Debug)]
/// struct Model {
///     linear: Linear,
///     norm: SyncBatchNorm,
/// }
///
/// fn step(gradients: &ProcessGroup, statistics: &ProcessGroup) -> Result<()> {
///     let device = Device::flex().autodiff();
///     let model = Model {
///         linear: LinearConfig::new(3, 4).init(&device),
///         norm: SyncBatchNormConfig::new(4).init(statistics, &device),
///     };
///     let (ddp, model) = DistributedDataParallel::wrap(model, gradients)?;
///     let input = Tensor::<2>::from_data([[1.0, 2.0, 3.0], [3.0, 1.0, 2.0]], &device);
///     let output = model.norm.forward(model.linear.forward(input))?;
///     let gradients = ddp.backward(output.square().mean(), &model)?;
///     assert_eq!(gradients.len(), 4);
///     Ok(())
/// }
/// # step(&ProcessGroup::alone(), &ProcessGroup::alone())?;
/// # Ok::<_, drumline_burn::Error>(())
/// ```
///
/// # No conversion of whole models
///
/// torch replaces the layers of a model at run time. In Rust the type of a field is fixed when the program is
/// compiled. So write `SyncBatchNorm` in the model where you want one. [`SyncBatchNorm::from_batch_norm`]
/// takes over the values of a layer.
#[derive(Module, Debug)]
pub struct SyncBatchNorm {
    /// The learnable scale, one per channel.
    pub gamma: Param<Tensor<1>>,
    /// The learnable shift, one per channel.
    pub beta: Param<Tensor<1>>,
    /// Whether forward uses, and learns, the statistics of the batch.
    pub training: Param<Flag>,
    /// The running mean, one per channel; equal on all ranks.
    pub running_mean: RunningState<Tensor<1>>,
    /// The running variance (unbiased), one per channel; equal on all ranks.
    pub running_var: RunningState<Tensor<1>>,
    /// The weight of a batch in the running statistics.
    pub momentum: f64,
    /// Added to the variance.
    pub epsilon: f64,
    #[module(skip)]
    group: ProcessGroup,
}

/// Makes a [`SyncBatchNorm`].
///
/// ```
/// # use burn::tensor::{Device, Tensor};
/// # use drumline::ProcessGroup;
/// # use drumline_burn::SyncBatchNormConfig;
/// # let device = Device::flex().autodiff();
/// let config = SyncBatchNormConfig::new(16).with_momentum(0.01);
/// let norm = config.init(&ProcessGroup::alone(), &device);
/// assert_eq!((norm.momentum, norm.epsilon, norm.gamma.dims()), (0.01, 1e-5, [16]));
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SyncBatchNormConfig {
    /// The number of channels; at least 1.
    pub num_features: usize,
    /// Added to the variance; 1e-5 unless set.
    pub epsilon: f64,
    /// The weight of a batch in the running statistics; 0.1 unless set.
    pub momentum: f64,
}

impl SyncBatchNormConfig {
    /// A layer for `num_features` channels.
    pub fn new(num_features: usize) -> Self {
        Self { num_features, epsilon: 1e-5, momentum: 0.1 }
    }

    /// Sets [`SyncBatchNormConfig::epsilon`].
    #[must_use]
    pub fn with_epsilon(mut self, epsilon: f64) -> Self {
        self.epsilon = epsilon;
        self
    }

    /// Sets [`SyncBatchNormConfig::momentum`].
    #[must_use]
    pub fn with_momentum(mut self, momentum: f64) -> Self {
        self.momentum = momentum;
        self
    }

    /// The layer. `group` must serve normalisation only.
    ///
    /// # Panics
    ///
    /// As burn's [`BatchNormConfig::init`]: no channel, or settings out of range.
    pub fn init(&self, group: &ProcessGroup, device: &Device) -> SyncBatchNorm {
        let Self { num_features, epsilon, momentum } = *self;
        let config = BatchNormConfig::new(num_features).with_epsilon(epsilon);
        SyncBatchNorm::from_batch_norm(config.with_momentum(momentum).init(device), group)
    }
}

impl SyncBatchNorm {
    /// The layer with the values of `norm`. `group` must serve normalisation only.
    pub fn from_batch_norm(norm: BatchNorm, group: &ProcessGroup) -> Self {
        let BatchNorm { gamma, beta, training, running_mean, running_var, momentum, epsilon } =
            norm;
        let group = group.clone();
        Self { gamma, beta, training, running_mean, running_var, momentum, epsilon, group }
    }

    /// Normalises `input`, of shape `[samples, channels, ...]`. There may be no samples.
    ///
    /// # Errors
    ///
    /// The shape does not fit, all ranks together have only one value per channel, the input is not on burn's
    /// flex backend or a GPU whose feature of this crate is on, the device failed, or the communication failed. If
    /// the device or the communication fails in backward, [`DistributedDataParallel::backward`](crate::DistributedDataParallel::backward) returns the error.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Result<Tensor<D>> {
        let shape = input.dims();
        let channels = self.gamma.shape()[0];
        if D < 2 || shape[1] != channels {
            let problem = format!("its shape is {shape:?}, not [_, {channels}, ...]");
            return Err(failure::cannot_normalize(problem));
        }
        match input.device().is_autodiff() && self.training.is_enabled() {
            true => self.forward_train(input),
            false => Ok(self.forward_inference(input)),
        }
    }

    fn forward_inference<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let device = input.device();
        let mean = self.running_mean.value().to_device(&device);
        let variance = self.running_var.value().to_device(&device);
        batch_norm(input, self.gamma.val(), self.beta.val(), mean, variance, self.epsilon)
    }

    fn forward_train<const D: usize>(&self, input: Tensor<D>) -> Result<Tensor<D>> {
        if shards::is_shard() {
            let problem =
                "a shard is computed alone, and its statistics are its own: use burn's `BatchNorm`";
            return Err(failure::cannot_normalize(problem));
        }
        let device = input.device();
        if !pack::is_tappable(&device) {
            let device = pack::device_name(&device);
            let problem = format!(
                "it is on {device}; use burn's flex backend, or a GPU and the feature `gpu` of drumline-burn"
            );
            return Err(failure::cannot_normalize(problem));
        }
        if !pack::is_flex(&device) && input.shape().num_elements() == 0 {
            let problem = "it has no samples, and burn cannot compute with empty tensors on a GPU; \
                           give this rank at least one row";
            return Err(failure::cannot_normalize(problem.to_owned()));
        }
        let own = Statistics::of(input.clone().without_autodiff())?;
        let all = own.over_all_ranks(&self.group)?;
        if all.count < 2.0 {
            let problem = "all ranks together have less than two values per channel".to_owned();
            return Err(failure::cannot_normalize(problem));
        }
        let dtype = input.dtype();
        let tensor = |values: Vec<f64>| {
            Tensor::<1>::from_data(TensorData::from(&values[..]), (&device, dtype))
        };
        let update = |running: &RunningState<Tensor<1>>, values: Vec<f64>| {
            let old = running.value_sync().to_device(&device);
            let new = old * (1.0 - self.momentum) + tensor(values) * self.momentum;
            running.update(new.detach());
        };
        update(&self.running_mean, all.mean.clone());
        update(&self.running_var, all.unbiased_variance());
        Ok(step::normalize(
            input,
            self.gamma.val(),
            self.beta.val(),
            tensor(all.variance()),
            tensor(all.mean),
            step::Over { group: self.group.clone(), count: all.count, epsilon: self.epsilon },
        ))
    }
}
