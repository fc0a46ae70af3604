use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use burn::{
    tensor::Device,
    train::{Learner, LearnerModel, LearningResult, SupervisedTraining, TrainingStrategy},
};
use drumline::{ElasticGroup, ProcessGroup};

use super::{
    averaging::Wrapped,
    epoch::failure,
    state,
    strategy::{OnOtherRanks, OnRoot, Strategy},
};
use crate::{
    DistributedDataParallel, agreement, burn_version::silent::Silent, data::text_of, failure,
};

/// Makes a training of burn's `Learner` data-parallel over the ranks of `group`.
///
/// Every rank runs the same program. In it, `training.launch(learner)` becomes
/// `distribute(training, &group).launch(learner)`:
///
/// ```
/// use std::sync::Arc;
///
/// use burn::data::{
///     dataloader::{DataLoaderBuilder, batcher::Batcher},
///     dataset::InMemDataset,
/// };
/// use burn::lr_scheduler::constant::ConstantLr;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::module::Module;
/// use burn::optim::SgdConfig;
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn::train::{
///     InferenceStep, Learner, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep,
/// };
/// use drumline::ProcessGroup;
/// use drumline_burn::{distribute, parameters_digest};
///
/// #[derive(Module, Debug)]
/// struct Model {
///     linear: Linear,
/// }
///
/// impl Model {
///     fn output(&self, batch: Tensor<2>) -> RegressionOutput {
///         let output = self.linear.forward(batch.clone());
///         RegressionOutput::new((output.clone() - batch.clone()).square().mean(), output, batch)
///     }
/// }
///
/// impl TrainStep for Model {
///     type Input = Tensor<2>;
///     type Output = RegressionOutput;
///
///     fn step(&self, batch: Tensor<2>) -> TrainOutput<RegressionOutput> {
///         let output = self.output(batch);
///         TrainOutput::new(self, output.loss.backward(), output)
///     }
/// }
///
/// impl InferenceStep for Model {
///     type Input = Tensor<2>;
///     type Output = RegressionOutput;
///
///     fn step(&self, batch: Tensor<2>) -> RegressionOutput {
///         self.output(batch)
///     }
/// }
///
/// struct Stack;
///
/// impl Batcher<f32, Tensor<2>> for Stack {
///     fn batch(&self, items: Vec<f32>, device: &Device) -> Tensor<2> {
///         let count = items.len();
///         Tensor::from_data(TensorData::new(items, [count, 1]), device)
///     }
/// }
///
/// fn train(group: &ProcessGroup, directory: &std::path::Path) -> u64 {
///     let data = |count| {
///         let numbers = (0..count).map(|it| it as f32 / 8.0).collect();
///         DataLoaderBuilder::new(Stack).batch_size(2).build(InMemDataset::new(numbers))
///     };
///     let model = Model { linear: LinearConfig::new(1, 1).init(&Device::flex().autodiff()) };
///     let training = SupervisedTraining::new(directory, data(8), data(2)).num_epochs(2);
///     # let training = training.with_application_logger(None);
///     let learner = Learner::new(model, SgdConfig::new().init(), ConstantLr::new(0.1));
///     let result = distribute(training, group).launch(learner);
///     assert!(result.error.is_none());
///     parameters_digest(&result.model).unwrap()
/// }
///
/// let directory = std::env::temp_dir().join(format!("learner-{}", std::process::id()));
/// let threads: Vec<_> = drumline::rendezvous::local_world(2)?
///     .into_iter()
///     .map(|group| {
///         let directory = directory.clone();
///         std::thread::spawn(move || train(&group, &directory))
///     })
///     .collect();
/// let digests: Vec<u64> = threads.into_iter().map(|rank| rank.join().unwrap()).collect();
/// assert_eq!(digests[0], digests[1]);
/// # std::fs::remove_dir_all(&directory).ok();
/// # Ok::<_, drumline::Error>(())
/// ```
///
/// # What happens
///
/// - Rank 0's parameters and buffers are copied to all ranks.
/// - Each rank trains on its share of the data. Rank `r` of `p` takes the `r`-th of `p` equal parts of the loader
///   (what is left over is not used). A [`DistributedDataLoader`](crate::data::DistributedDataLoader) yields the share of
///   its rank by itself. For a loader of your own that does so, see
///   [`deals_shares`](DistributedTraining::deals_shares).
/// - Gradients are averaged when `TrainStep::step` has returned. If the model was
///   [wrapped](DistributedTraining::wrapped), they travel during backward. With `grads_accumulation(k)` they travel
///   once in `k` calls of `step`.
/// - Rank 0 alone validates (on all data), computes metrics, shows progress, writes logs, metrics and checkpoints, and
///   decides about early stopping. Its progress counts the items of all ranks. Training metrics are those of rank 0's
///   share.
/// - A training that resumes from a checkpoint takes rank 0's model, optimizer and scheduler on all ranks. The other ranks
///   read no file. [`newest_epoch`](crate::newest_epoch) says where to go on.
/// - If one rank asks to stop (its `Interrupter`, a key in the dashboard), all ranks stop after the same step.
/// - With [`shards`](DistributedTraining::shards), the parameters do not depend on the number of ranks, and the others go on
///   when a rank has died.
///
/// # Errors
///
/// A failure ends `launch` on every rank. [`LearningResult::error`] says why, and names the rank. That includes
/// ranks whose settings or models differ, a loader that was built for another rank or group, a checkpoint that is not
/// there or of another model, data that cannot be read, a rank that died, and parameters that differ between ranks after
/// the first step or at the end of an epoch.
///
/// In a world of one rank `launch` is burn's own, unless a step is shards.
pub fn distribute<M: LearnerModel>(
    training: SupervisedTraining<M>,
    group: &ProcessGroup,
) -> DistributedTraining<M> {
    DistributedTraining {
        training,
        group: group.clone(),
        elastic: OnceLock::new(),
        device: None,
        wrapped: None,
        shards: None,
        deals_shares: false,
    }
}

/// A training on many ranks that can be launched. Made by [`distribute`].
#[must_use = "nothing is trained before `launch`"]
pub struct DistributedTraining<M: LearnerModel> {
    training: SupervisedTraining<M>,
    group: ProcessGroup,
    elastic: OnceLock<ElasticGroup>,
    device: Option<Device>,
    wrapped: Option<Wrapped>,
    shards: Option<usize>,
    deals_shares: bool,
}

impl<M: LearnerModel> DistributedTraining<M> {
    /// The model of the learner was wrapped, with this handle, before `Learner::new`. Then gradients travel while
    /// backward still computes others.
    ///
    /// `TrainStep::step` must run one backward, and return the gradients as backward has made them.
    pub fn wrapped(mut self, ddp: &DistributedDataParallel) -> Self {
        self.wrapped = Some(Wrapped::new(ddp));
        self
    }

    /// Makes a step so many shards, whatever the number of ranks, as
    /// [`DdpOptions::shards`](crate::DdpOptions::shards) does in a loop: `TrainStep::step` computes a shard. The parameters have
    /// the same bits on any number of ranks. If a rank dies, the others make the step again, and go on.
    ///
    /// The loader of the training data must deal its samples to as many shards:
    /// [`DataLoaderBuilder::shards`](crate::data::DataLoaderBuilder::shards). A model that was [wrapped](Self::wrapped) must be
    /// wrapped with these shards, and its options decide on the seed of random numbers. Then this call is not needed.
    ///
    /// ```
    /// # use burn::train::{Learner, LearnerModel, SupervisedTraining};
    /// use drumline::ProcessGroup;
    /// use drumline_burn::distribute;
    ///
    /// # fn train<M: LearnerModel>(
    /// #     training: SupervisedTraining<M>,
    /// #     learner: Learner<M>,
    /// #     group: &ProcessGroup,
    /// # ) -> drumline_burn::Result<()> {
    /// let training = distribute(training, group).shards(8);
    /// let elastic = training.elastic(); // instead of the group, after `launch`
    /// let result = training.launch(learner);
    /// if elastic.group().rank() == 0 {
    ///     println!("{:?}", result.error);
    /// }
    /// elastic.close()?; // instead of `group.destroy()`
    /// # Ok(())
    /// # }
    /// ```
    pub fn shards(mut self, count: usize) -> Self {
        self.shards = Some(count);
        self
    }

    /// What goes on when a rank has died, if a step is [shards](Self::shards): that of the wrapped model, if there is one.
    /// Call it last before `launch`.
    pub fn elastic(&self) -> ElasticGroup {
        let begin = || match &self.wrapped {
            Some(wrapped) => wrapped.elastic.clone(),
            None if self.shards.is_some() => ElasticGroup::new(&self.group),
            None => ElasticGroup::fixed(&self.group),
        };
        self.elastic.get_or_init(begin).clone()
    }

    /// The loader of the training data yields this rank's share alone, so it is not to be divided.
    ///
    /// Say so for a loader of your own that deals shares. One of [`data`](crate::data) is known, also within a loader
    /// that passes `num_items` on to it.
    ///
    /// All ranks must have the same number of batches.
    pub fn deals_shares(mut self) -> Self {
        self.deals_shares = true;
        self
    }

    /// The device to train on. Without this call it is the device of the model's first parameter.
    ///
    /// A strategy that was set with `with_training_strategy` is replaced, and so is what `gradient_checkpointing` has
    /// set. For gradient checkpointing pass `device.autodiff().gradient_checkpointing()` here.
    pub fn device(mut self, device: &Device) -> Self {
        self.device = Some(device.clone());
        self
    }

    /// Trains, like burn's own `launch`. All ranks must call this.
    pub fn launch(self, learner: Learner<M>) -> LearningResult<M> {
        let elastic = self.elastic();
        let Self { training, group, device, wrapped, shards, deals_shares, .. } = self;
        let shards = shards.or_else(|| wrapped.as_ref()?.options.shards);
        if group.world_size() == 1 && shards.is_none() {
            return match device {
                Some(device) => training
                    .with_training_strategy(burn::train::ExecutionStrategy::single(device).into())
                    .launch(learner),
                None => training.launch(learner),
            };
        }
        let has_begun = Arc::<AtomicBool>::default();
        let strategy = Strategy {
            group: group.clone(),
            elastic,
            shards,
            device,
            wrapped,
            deals_shares,
            has_begun: has_begun.clone(),
        };
        let model = learner.model();
        let launch = || {
            if group.rank() == 0 {
                let strategy = TrainingStrategy::Custom(Arc::new(OnRoot(strategy)));
                return training.with_training_strategy(strategy).launch(learner);
            }
            // With shards, any rank may become rank 0.
            let training = match shards {
                Some(_) => training,
                None => state::without_files(training),
            };
            training
                .renderer(Box::new(Silent))
                .with_application_logger(None)
                .with_training_strategy(TrainingStrategy::Custom(Arc::new(OnOtherRanks(strategy))))
                .launch(learner)
        };
        match catch_unwind(AssertUnwindSafe(launch)) {
            Ok(result) => result,
            Err(panic) if has_begun.load(Ordering::Relaxed) => resume_unwind(panic),
            Err(panic) => refuse(model, text_of(panic.as_ref()), &group),
        }
    }
}

/// What this rank returns if burn has panicked before it came to the strategy. burn does so if it cannot load a
/// checkpoint. The other ranks are about to compare settings.
fn refuse<M: LearnerModel>(model: M, panic: &str, group: &ProcessGroup) -> LearningResult<M> {
    let problem = format!("burn cannot begin this training: {panic}");
    let error = match agreement::agree::<()>(group, Err(problem.clone())) {
        Ok(told) => failure::learner(told.err().unwrap_or(problem)),
        Err(error) => error,
    };
    LearningResult {
        model: model.valid(),
        renderer: Box::new(Silent),
        interrupted: None,
        error: Some(Arc::new(failure(group.rank(), error.to_string()))),
    }
}

impl<M: LearnerModel> fmt::Debug for DistributedTraining<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DistributedTraining")
            .field("group", &self.group)
            .field("device", &self.device)
            .field("is_wrapped", &self.wrapped.is_some())
            .field("shards", &self.shards)
            .field("deals_shares", &self.deals_shares)
            .finish_non_exhaustive()
    }
}
