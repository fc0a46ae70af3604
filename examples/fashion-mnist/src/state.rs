//! What training goes on from, and how it is kept in a checkpoint.

use anyhow::{Context, Result, ensure};
use burn::{
    optim::{ModuleOptimizer, SgdConfig, momentum::MomentumConfig},
    tensor::Device,
};
use drumline::checkpoint::{Checkpoint, Tensor};
use drumline_burn::{NamedTensor, load_named_tensors, named_tensors};

use crate::{
    history::{self, Epoch},
    model::Classifier,
    optimizer,
};

/// Everything that changes while training.
pub(crate) struct State {
    pub(crate) model: Classifier,
    pub(crate) optimizer: ModuleOptimizer,
    /// Those that are over.
    pub(crate) epochs: Vec<Epoch>,
}

/// What must be the same when training is resumed.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Its name and size.
    pub(crate) data: String,
    /// On all ranks together.
    pub(crate) images_per_step: usize,
    /// Of the first step.
    pub(crate) learning_rate: f64,
    pub(crate) seed: u64,
}

/// The names of the model's tensors in a checkpoint begin with this.
const MODEL: &str = "model.";

impl State {
    /// Before the first epoch.
    pub(crate) fn new(hidden: usize, seed: u64, device: &Device) -> Self {
        let momentum = MomentumConfig { momentum: 0.9, dampening: 0.0, nesterov: true };
        let optimizer = SgdConfig::new().with_momentum(Some(momentum)).init();
        Self { model: Classifier::new(hidden, seed, device), optimizer, epochs: Vec::new() }
    }

    /// Puts everything into a checkpoint.
    pub(crate) fn save(&self, settings: &Settings) -> Result<Checkpoint> {
        let mut checkpoint = Checkpoint::default();
        for NamedTensor { name, shape, values } in named_tensors(&self.model)? {
            let bytes = values.as_bytes().to_vec();
            checkpoint.insert(Tensor::new(format!("{MODEL}{name}"), values.dtype(), shape, bytes)?);
        }
        optimizer::save(&self.optimizer, &self.model, &mut checkpoint)?;
        history::save(&self.epochs, &mut checkpoint)?;
        checkpoint.metadata = settings.named().map(|(name, value)| (name.into(), value)).into();
        checkpoint.metadata.insert("epoch".into(), self.epochs.len().to_string());
        Ok(checkpoint)
    }

    /// Goes on from a checkpoint of a training with the same settings.
    pub(crate) fn load(self, checkpoint: &Checkpoint, settings: &Settings) -> Result<Self> {
        for (name, ours) in settings.named() {
            let theirs = checkpoint.metadata.get(name);
            let theirs = theirs.with_context(|| format!("it does not say its {name}"))?;
            ensure!(*theirs == ours, "it was made with {name} {theirs}, but this run has {ours}");
        }
        let tensors = checkpoint.tensors().filter_map(|tensor| {
            let name = tensor.name().strip_prefix(MODEL)?;
            Some(NamedTensor::from_bytes(name, tensor.shape(), tensor.dtype(), tensor.bytes()))
        });
        let model = load_named_tensors(self.model, tensors.collect::<Result<_, _>>()?)?;
        let optimizer = optimizer::load(self.optimizer, &model, checkpoint)?;
        Ok(Self { model, optimizer, epochs: history::load(checkpoint)? })
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
