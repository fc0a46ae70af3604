use std::{
    collections::BTreeMap,
    fmt::{self, Display},
    path::{Path, PathBuf},
};

use burn::{module::Module, optim::ModuleOptimizer, tensor::Device};
use drumline::{
    ProcessGroup,
    checkpoint::{self, Checkpoint},
};

use super::{
    DataPosition, IntoOptimizer, OptimizerState, SchedulerState, generator::step_seed, optimizer,
    scheduler,
};
use crate::{NamedTensor, load_named_tensors, named_tensors};

/// Everything that a step of training depends on. [`Checkpoints`](super::Checkpoints) saves and resumes it.
///
/// Train with its fields, as with variables of your own:
///
/// ```
/// use burn::{
///     lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig, nn::LinearConfig, optim::AdamConfig,
///     tensor::{Device, Tensor},
/// };
/// use drumline::{ProcessGroup, sampler::DistributedSampler};
/// use drumline_burn::{DistributedDataParallel, checkpoint::TrainingState};
///
/// let (group, device) = (ProcessGroup::alone(), Device::flex().autodiff());
/// let schedule = CosineAnnealingLrSchedulerConfig::new(0.1, 100).init().unwrap();
/// let mut training = TrainingState::new(LinearConfig::new(2, 1).init(&device), AdamConfig::new())
///     .scheduler(schedule)
///     .sampler(DistributedSampler::builder(64, group.world_size(), group.rank()).build()?)
///     .setting("batch size", 16);
///
/// let ddp;
/// (ddp, training.model) = DistributedDataParallel::wrap(training.model, &group)?;
/// let loss = training.model.forward(Tensor::<2>::ones([16, 2], &device)).mean();
/// let gradients = ddp.backward(loss, &training.model)?;
/// let rate = training.scheduler.step();
/// training.model = training.optimizer.step(rate, training.model, gradients);
/// training.sampler.advance(16);
/// training.steps += 1;
/// # Ok::<_, drumline_burn::Error>(())
/// ```
pub struct TrainingState<M, O = ModuleOptimizer, S = (), P = ()> {
    /// The model.
    pub model: M,
    /// The optimizer.
    pub optimizer: O,
    /// The learning-rate scheduler; `()` if there is none.
    pub scheduler: S,
    /// The sampler or whatever else knows the place in the data; `()` if there is none.
    pub sampler: P,
    /// The number of steps so far. Count it up after every step: checkpoints are named after it.
    pub steps: u64,
    /// Tensors and lines of text of your own: losses so far, the best accuracy. On resuming they are those of
    /// the checkpoint. What differs between ranks must be [gathered](ProcessGroup::all_gather) first, because
    /// rank 0's are saved.
    pub values: Checkpoint,
    /// What must be equal on resuming.
    settings: BTreeMap<String, String>,
    seed: u64,
    resumed_from: Option<PathBuf>,
}

/// What the names of the model's tensors in a checkpoint begin with.
const MODEL: &str = "model.";
const STEPS: &str = "steps";
const SAMPLER: &str = "sampler";
const SEED: &str = "seed";
const OPTIMIZER: &str = "optimizer";

impl<M, O, S, P> fmt::Debug for TrainingState<M, O, S, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrainingState")
            .field("steps", &self.steps)
            .field("settings", &self.settings)
            .field("resumed_from", &self.resumed_from)
            .finish_non_exhaustive()
    }
}

impl<M: Module, O: OptimizerState> TrainingState<M, O> {
    /// The state before the first step. `optimizer` is an optimizer or, better, [its
    /// configuration](IntoOptimizer).
    pub fn new(model: M, optimizer: impl IntoOptimizer<Optimizer = O>) -> Self {
        let (optimizer, config) = optimizer.into_optimizer();
        Self {
            model,
            optimizer,
            scheduler: (),
            sampler: (),
            steps: 0,
            values: Checkpoint::default(),
            settings: config.map(|config| (OPTIMIZER.to_owned(), config)).into_iter().collect(),
            seed: 0,
            resumed_from: None,
        }
    }
}

impl<M, O, S, P> TrainingState<M, O, S, P> {
    /// Adds a learning-rate scheduler.
    #[must_use]
    pub fn scheduler<S2: SchedulerState>(self, scheduler: S2) -> TrainingState<M, O, S2, P> {
        let Self { model, optimizer, sampler, steps, values, settings, seed, resumed_from, .. } =
            self;
        TrainingState {
            model,
            optimizer,
            scheduler,
            sampler,
            steps,
            values,
            settings,
            seed,
            resumed_from,
        }
    }

    /// Adds a sampler, whose place in the data is then saved.
    #[must_use]
    pub fn sampler<P2: DataPosition>(self, sampler: P2) -> TrainingState<M, O, S, P2> {
        let Self {
            model, optimizer, scheduler, steps, values, settings, seed, resumed_from, ..
        } = self;
        TrainingState {
            model,
            optimizer,
            scheduler,
            sampler,
            steps,
            values,
            settings,
            seed,
            resumed_from,
        }
    }

    /// Adds a setting that must be the same on all ranks, and the same when training is resumed: the name of
    /// the data, the batch size of all ranks together. A difference is an error that names it.
    #[must_use]
    pub fn setting(mut self, name: impl Into<String>, value: impl Display) -> Self {
        self.settings.insert(name.into(), value.to_string());
        self
    }

    /// Sets the seed of [`seed_step`](Self::seed_step), 0 unless set. It becomes the
    /// [setting](Self::setting) `seed`.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self.setting(SEED, seed)
    }

    /// Seeds burn's random generator of `device` for the step that begins: from the seed, the number of steps so
    /// far, and the rank. Call it before each forward if the model draws random numbers, as dropout does.
    ///
    /// burn gives no access to the state of its generators; it can only be set from a seed. So a checkpoint
    /// cannot hold it. But if every step begins with a seed of its own, nothing need be held: a resumed run draws
    /// the same numbers in the same steps.
    ///
    /// A backend has one generator per process (flex, ndarray) or per device. So threads that draw from it at the
    /// same time get numbers in an order that changes from run to run: ranks that are threads of one process,
    /// workers that augment data with burn's `random`. Let ranks be processes, and let workers use a
    /// generator of their own, seeded for each sample.
    pub fn seed_step(&self, device: &Device, group: &ProcessGroup) {
        device.seed(step_seed(self.seed, group.rank(), self.steps));
    }

    /// The file that this state comes from; `None` if it is a new one.
    pub fn resumed_from(&self) -> Option<&Path> {
        self.resumed_from.as_deref()
    }

    /// The settings, by name.
    pub(super) fn settings(&self) -> impl Iterator<Item = (&str, &str)> {
        self.settings.iter().map(|(name, value)| (&name[..], &value[..]))
    }
}

impl<M: Module, O: OptimizerState, S: SchedulerState, P: DataPosition> TrainingState<M, O, S, P> {
    /// If the optimizer's state is shared out between the ranks: this rank's part.
    pub(super) fn optimizer_part(&self) -> Option<Result<Checkpoint, String>> {
        optimizer::part(&self.optimizer, &self.model)
    }

    /// As a checkpoint: what [`Checkpoints::save`](super::Checkpoints::save) writes. It begins with `optimizer`, the state
    /// of an optimizer that is shared out.
    ///
    /// # Errors
    ///
    /// A tensor has a dtype that a checkpoint cannot hold. Or a name of [`values`](Self::values) is taken.
    pub(super) fn to_checkpoint(
        &self,
        optimizer: Option<Checkpoint>,
    ) -> Result<Checkpoint, String> {
        let is_missing = optimizer.is_none();
        let mut checkpoint = optimizer.unwrap_or_default();
        for NamedTensor { name, shape, values } in
            named_tensors(&self.model).map_err(|error| error.to_string())?
        {
            let (name, bytes) = (format!("{MODEL}{name}"), values.as_bytes().to_vec());
            let tensor = checkpoint::Tensor::new(name, values.dtype(), shape, bytes);
            checkpoint.insert(tensor.map_err(|error| error.to_string())?);
        }
        if is_missing {
            optimizer::save(&self.optimizer, &self.model, &mut checkpoint)?;
        }
        scheduler::save(&self.scheduler, &mut checkpoint)?;
        checkpoint.metadata = self.settings.clone();
        checkpoint.metadata.insert(STEPS.into(), self.steps.to_string());
        if let Some(state) = self.sampler.state() {
            checkpoint.metadata.insert(SAMPLER.into(), state.to_string());
        }
        self.add_values(checkpoint)
    }

    fn add_values(&self, mut checkpoint: Checkpoint) -> Result<Checkpoint, String> {
        let taken = |name: &str| {
            format!("{name} is a name of the training state itself; give your value another one")
        };
        for tensor in self.values.tensors() {
            if is_ours(tensor.name()) {
                return Err(taken(tensor.name()));
            }
            checkpoint.insert(tensor.clone());
        }
        for (name, text) in &self.values.metadata {
            let before = checkpoint.metadata.insert(name.clone(), text.clone());
            if before.is_some() || [SAMPLER, OPTIMIZER].contains(&&name[..]) {
                return Err(taken(name));
            }
        }
        Ok(checkpoint)
    }

    /// The state in a checkpoint of a training like this one.
    ///
    /// # Errors
    ///
    /// What differs: a setting, a parameter, the optimizer, the scheduler, the sampler.
    pub(super) fn load(self, path: PathBuf, mut checkpoint: Checkpoint) -> Result<Self, String> {
        self.check_settings(&checkpoint)?;
        let specs = named_tensors(&self.model).map_err(|error| error.to_string())?;
        let specs = specs.iter().map(NamedTensor::spec);
        checkpoint.check(MODEL, specs).map_err(|misfit| misfit.to_string())?;
        let tensors = checkpoint.section(MODEL).map(|(name, tensor)| {
            NamedTensor::from_bytes(name, tensor.shape(), tensor.dtype(), tensor.bytes())
        });
        let model = tensors
            .collect::<Result<_, _>>()
            .and_then(|tensors| load_named_tensors(self.model, tensors))
            .map_err(|error| error.to_string())?;
        let optimizer = optimizer::load(self.optimizer, &model, &checkpoint)?;
        let scheduler = scheduler::load(self.scheduler, &checkpoint)?;

        let mut text = |name: &str| checkpoint.metadata.remove(name);
        let mut sampler = self.sampler;
        match (text(SAMPLER), sampler.state()) {
            (None, None) => {}
            (Some(saved), Some(_)) => saved
                .parse()
                .and_then(|state| sampler.resume(&state))
                .map_err(|error| error.to_string())?,
            (None, Some(_)) => return Err("it does not hold the state of a sampler".into()),
            (Some(_), None) => {
                return Err("it holds the state of a sampler, but this run has none".into());
            }
        }
        let steps = text(STEPS).ok_or("it does not say its steps")?;
        let steps = steps.parse().map_err(|_| format!("{steps:?} is no number of steps"))?;
        self.settings.keys().for_each(|name| drop(text(name)));
        text(OPTIMIZER);

        let mut values = Checkpoint::default();
        values.metadata.clone_from(&checkpoint.metadata);
        for tensor in checkpoint.tensors().filter(|tensor| !is_ours(tensor.name())) {
            values.insert(tensor.clone());
        }
        Ok(Self {
            model,
            optimizer,
            scheduler,
            sampler,
            steps,
            values,
            settings: self.settings,
            seed: self.seed,
            resumed_from: Some(path),
        })
    }

    fn check_settings(&self, checkpoint: &Checkpoint) -> Result<(), String> {
        for (name, ours) in &self.settings {
            let advice = if name == OPTIMIZER {
                "; to change it on purpose, give the state the optimizer itself, from `init()`"
            } else {
                ""
            };
            match checkpoint.metadata.get(name) {
                Some(theirs) if theirs == ours => {}
                Some(theirs) => {
                    return Err(format!(
                        "it was made with {name} {theirs}, but this run has {ours}{advice}"
                    ));
                }
                // Checkpoints that were made by hand hold no text of the optimizer; its tensors are compared.
                None if name == OPTIMIZER => {}
                None => return Err(format!("it does not say its {name}; this run has {ours}")),
            }
        }
        Ok(())
    }
}

fn is_ours(name: &str) -> bool {
    [MODEL, optimizer::PREFIX, scheduler::PREFIX].iter().any(|prefix| name.starts_with(prefix))
}
