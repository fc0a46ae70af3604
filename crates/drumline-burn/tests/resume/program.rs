//! A small training with everything that a checkpoint must hold.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard},
};

use burn::{
    lr_scheduler::{
        cosine::CosineAnnealingLrSchedulerConfig,
        module_lr_scheduler::{ModuleLearningRate, ModuleLrScheduler},
    },
    module::Module,
    nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig},
    optim::ModuleOptimizer,
    tensor::{Device, Tensor, activation::relu},
};
use drumline::{ProcessGroup, checkpoint as raw, sampler::DistributedSampler};
use drumline_burn::{
    DistributedDataParallel, Result,
    checkpoint::{Checkpoints, IntoOptimizer, OptimizerState, TrainingState},
    named_tensors,
};

pub(crate) const SAMPLES: usize = 60;
pub(crate) const BATCH: usize = 5;

/// Parameters with one and two dimensions, running statistics, random numbers.
#[derive(Module, Debug)]
pub(crate) struct Net {
    pub(crate) first: Linear,
    norm: BatchNorm,
    dropout: Dropout,
    last: Linear,
}

impl Net {
    pub(crate) fn new(hidden: usize, device: &Device) -> Self {
        let _guard = generator();
        device.seed(3);
        let net = Self {
            first: LinearConfig::new(2, hidden).init(device),
            norm: BatchNormConfig::new(hidden).init(device),
            dropout: DropoutConfig::new(0.25).init(),
            last: LinearConfig::new(hidden, 1).init(device),
        };
        named_tensors(&net).unwrap(); // burn draws weights when they are first used
        net
    }

    pub(crate) fn loss(&self, input: Tensor<2>) -> Tensor<1> {
        let target = input.clone().sum_dim(1).sin();
        let x = relu(self.norm.forward(self.first.forward(input)));
        (self.last.forward(self.dropout.forward(x)) - target).square().mean()
    }
}

/// flex has one generator per process, and tests are threads of one.
pub(crate) fn generator() -> MutexGuard<'static, ()> {
    static GENERATOR: Mutex<()> = Mutex::new(());
    GENERATOR.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// A training with everything.
pub(crate) type Training<O> = TrainingState<Net, O, ModuleLrScheduler, DistributedSampler>;

/// The state of a new training.
pub(crate) fn new_state<C: IntoOptimizer<Optimizer = ModuleOptimizer>>(
    group: &ProcessGroup,
    optimizer: C,
) -> Result<Training<ModuleOptimizer>> {
    with_the_rest(group, TrainingState::new(new_net(), optimizer), BATCH)
}

pub(crate) fn new_net() -> Net {
    Net::new(4, &Device::flex().autodiff())
}

/// Adds all but the model and the optimizer, for batches of `batch` samples on each rank.
pub(crate) fn with_the_rest<O>(
    group: &ProcessGroup,
    state: TrainingState<Net, O>,
    batch: usize,
) -> Result<Training<O>> {
    let sampler = DistributedSampler::builder(SAMPLES, group.world_size(), group.rank());
    let schedule = CosineAnnealingLrSchedulerConfig::new(0.05, 20).init().unwrap();
    Ok(state
        .scheduler(schedule)
        .sampler(sampler.seed(5).build()?)
        .seed(11)
        .setting("samples per step", batch * group.world_size()))
}

/// A batch of numbers that follow from the indices.
pub(crate) fn batch(indices: &[usize], device: &Device) -> Tensor<2> {
    let values: Vec<f32> =
        indices.iter().flat_map(|i| [*i as f32 / 30.0 - 1.0, (*i as f32 * 0.7).sin()]).collect();
    Tensor::<1>::from_floats(&values[..], device).reshape([indices.len(), 2])
}

/// When a training resumes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Resume {
    BeforeWrapping,
    AfterWrapping,
}

/// Goes on with the training in `out` up to `steps` steps; saves after each.
pub(crate) fn train<C: IntoOptimizer<Optimizer = ModuleOptimizer>>(
    group: &ProcessGroup,
    out: &Path,
    optimizer: C,
    steps: u64,
) -> Result<()> {
    train_resumed(group, out, optimizer, steps, Resume::BeforeWrapping)
}

pub(crate) fn train_resumed<C: IntoOptimizer<Optimizer = ModuleOptimizer>>(
    group: &ProcessGroup,
    out: &Path,
    optimizer: C,
    steps: u64,
    resume: Resume,
) -> Result<()> {
    let checkpoints = Checkpoints::open(out, group)?;
    let mut training = new_state(group, optimizer)?;
    if resume == Resume::BeforeWrapping {
        training = checkpoints.resume(training)?;
    }
    let ddp;
    (ddp, training.model) = DistributedDataParallel::wrap(training.model, group)?;
    if resume == Resume::AfterWrapping {
        training = checkpoints.resume(training)?;
    }
    run(group, &checkpoints, training, steps, BATCH, |optimizer, rate, model, loss| {
        let gradients = ddp.backward(loss, &model)?;
        Ok(optimizer.step(rate, model, gradients))
    })
}

/// Trains up to `steps` steps with batches of `batch` samples on each rank, and saves after each step. `update` takes
/// the step that a loss asks for.
pub(crate) fn run<O: OptimizerState>(
    group: &ProcessGroup,
    checkpoints: &Checkpoints,
    mut training: Training<O>,
    steps: u64,
    batch_size: usize,
    mut update: impl FnMut(&mut O, ModuleLearningRate, Net, Tensor<1>) -> Result<Net>,
) -> Result<()> {
    let device = Device::flex().autodiff();
    while training.steps < steps {
        let left: Vec<usize> = training.sampler.iter().collect();
        let indices = &left[..left.len().min(batch_size)];
        let loss = {
            let _guard = generator();
            training.seed_step(&device, group);
            training.model.loss(batch(indices, &device))
        };
        let value: f32 = loss.clone().into_scalar();
        let rate = training.scheduler.step();
        training.model = update(&mut training.optimizer, rate, training.model, loss)?;
        training.sampler.advance(indices.len());
        training.steps += 1;
        if left.len() <= batch_size {
            let epoch = training.sampler.state().epoch + 1;
            training.sampler.set_epoch(epoch);
        }
        let mut losses = match training.values.tensor("losses") {
            Some(losses) => losses.values::<f32>()?,
            None => Vec::new(),
        };
        losses.push(value);
        let losses = raw::Tensor::from_values("losses", [losses.len()], &losses)?;
        training.values.insert(losses);
        checkpoints.save(&training)?;
    }
    Ok(())
}

/// The bytes of the file of a step.
pub(crate) fn file(out: &Path, step: u64) -> Vec<u8> {
    let path: PathBuf = raw::CheckpointDirectory::new(out).path_of(step);
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
