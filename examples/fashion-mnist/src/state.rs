//! The state of training, and how it is saved and loaded.

use anyhow::{Context, Result, ensure};
use burn::{
    optim::{ModuleOptimizer, SgdConfig, momentum::MomentumConfig},
    tensor::Device,
};
use drumline::{
    ProcessGroup,
    checkpoint::{Checkpoint, Tensor},
    sampler::DistributedSampler,
};
use drumline_burn::{NamedTensor, load_named_tensors, named_tensors};
use fashion_mnist::history::{self, Epoch};

use crate::{curve::LossCurve, model::Classifier, optimizer};

/// Everything that changes during training, except for the sampler's position.
///
/// It needs no random generator: the weights are drawn once, and the order of the images follows from seed
/// and epoch. The statistics of batch normalisation differ between the ranks within an epoch, but only those
/// of rank 0 are ever used.
pub(crate) struct State {
    pub(crate) model: Classifier,
    pub(crate) optimizer: ModuleOptimizer,
    /// The finished epochs.
    pub(crate) epochs: Vec<Epoch>,
    /// The number of steps in all epochs.
    pub(crate) steps: u64,
    /// The losses of the epoch in the middle of which training is resumed.
    pub(crate) curve: Option<LossCurve>,
}

/// The settings that must be equal when training is resumed.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// The name and size of the data set.
    pub(crate) data: String,
    /// Images per step, on all ranks together.
    pub(crate) images_per_step: usize,
    /// The learning rate of the first step.
    pub(crate) learning_rate: f64,
    pub(crate) seed: u64,
}

/// The names of the model's tensors in a checkpoint begin with this.
const MODEL: &str = "model.";
const STEPS: &str = "steps";
const SAMPLER: &str = "sampler";

impl State {
    /// The state before the first epoch.
    pub(crate) fn new(hidden: usize, seed: u64, device: &Device) -> Self {
        let momentum = MomentumConfig { momentum: 0.9, dampening: 0.0, nesterov: true };
        let optimizer = SgdConfig::new().with_momentum(Some(momentum)).init();
        let model = Classifier::new(hidden, seed, device);
        Self { model, optimizer, epochs: Vec::new(), steps: 0, curve: None }
    }

    /// Puts everything but an epoch's unfinished curve into a checkpoint.
    pub(crate) fn save(
        &self,
        settings: &Settings,
        sampler: &DistributedSampler,
    ) -> Result<Checkpoint> {
        let mut checkpoint = Checkpoint::default();
        for NamedTensor { name, shape, values } in named_tensors(&self.model)? {
            let bytes = values.as_bytes().to_vec();
            checkpoint.insert(Tensor::new(format!("{MODEL}{name}"), values.dtype(), shape, bytes)?);
        }
        optimizer::save(&self.optimizer, &self.model, &mut checkpoint)?;
        history::save(&self.epochs, &mut checkpoint)?;
        checkpoint.metadata = settings.named().map(|(name, value)| (name.into(), value)).into();
        checkpoint.metadata.insert(STEPS.into(), self.steps.to_string());
        checkpoint.metadata.insert(SAMPLER.into(), sampler.state().to_string());
        Ok(checkpoint)
    }

    /// Loads a checkpoint of a training with the same settings.
    pub(crate) fn load(
        self,
        checkpoint: &Checkpoint,
        settings: &Settings,
        sampler: &mut DistributedSampler,
        group: &ProcessGroup,
    ) -> Result<Self> {
        let entry = |name: &str| {
            let text = checkpoint.metadata.get(name);
            text.with_context(|| format!("it does not say its {name}"))
        };
        for (name, ours) in settings.named() {
            let theirs = entry(name)?;
            ensure!(*theirs == ours, "it was made with {name} {theirs}, but this run has {ours}");
        }
        checkpoint.check(MODEL, named_tensors(&self.model)?.iter().map(NamedTensor::spec))?;
        let tensors = checkpoint.section(MODEL).map(|(name, tensor)| {
            NamedTensor::from_bytes(name, tensor.shape(), tensor.dtype(), tensor.bytes())
        });
        let model = load_named_tensors(self.model, tensors.collect::<Result<_, _>>()?)?;
        let optimizer = optimizer::load(self.optimizer, &model, checkpoint)?;
        let epochs = history::load(checkpoint)?;
        let steps = entry(STEPS)?.parse().context("its number of steps is none")?;
        sampler.resume(&entry(SAMPLER)?.parse()?)?;
        ensure!(
            sampler.state().epoch == epochs.len() as u64,
            "its history is of {} epochs, its sampler is in another",
            epochs.len()
        );
        Ok(Self { model, optimizer, epochs, steps, curve: LossCurve::load(checkpoint, group)? })
    }
}

impl Settings {
    fn named(&self) -> [(&'static str, String); 4] {
        [
            ("data", self.data.clone()),
            ("images per step", self.images_per_step.to_string()),
            ("learning rate", self.learning_rate.to_string()),
            ("seed", self.seed.to_string()),
        ]
    }
}
