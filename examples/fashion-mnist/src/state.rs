//! The state of training, and how it is saved and resumed.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use burn::optim::{ModuleOptimizer, SgdConfig, momentum::MomentumConfig};
use drumline::{ProcessGroup, checkpoint::Checkpoint};
use drumline_burn::checkpoint::{Checkpoints, TrainingState};
use fashion_mnist::history::{self, Epoch};

use crate::{
    curve::{GatheredLosses, LossCurve},
    images::Loader,
    model::Classifier,
};

/// Everything that changes during training.
///
/// It needs no random generator: the weights are drawn once, and the order of the images follows from seed
/// and epoch. Without shards, the statistics of batch normalisation differ between the ranks within an epoch, but only those
/// of rank 0 are ever used.
pub(crate) struct State {
    pub(crate) training: TrainingState<Classifier, ModuleOptimizer, (), Loader>,
    /// The finished epochs.
    pub(crate) epochs: Vec<Epoch>,
    /// The losses of the epoch in the middle of which training is resumed.
    pub(crate) curve: Option<LossCurve>,
}

/// The settings that must be equal when training is resumed.
pub(crate) struct Settings {
    /// The name and size of the data set.
    pub(crate) data: String,
    /// Images per step, on all ranks together.
    pub(crate) images_per_step: usize,
    pub(crate) shards: Option<usize>,
    /// The learning rate of the first step.
    pub(crate) learning_rate: f64,
    pub(crate) seed: u64,
}

impl State {
    /// The state before the first epoch.
    pub(crate) fn new(model: Classifier, images: Loader, settings: &Settings) -> Self {
        let momentum = MomentumConfig { momentum: 0.9, dampening: 0.0, nesterov: true };
        let training = TrainingState::new(model, SgdConfig::new().with_momentum(Some(momentum)))
            .sampler(images)
            .setting("data", &settings.data)
            .setting("images per step", settings.images_per_step)
            .setting("learning rate", settings.learning_rate)
            .setting("seed", settings.seed);
        let training =
            settings.shards.into_iter().fold(training, |it, shards| it.setting("shards", shards));
        Self { training, epochs: Vec::new(), curve: None }
    }

    /// Goes on from the checkpoint at `path`, or from the newest one if `path` is a directory.
    pub(crate) fn resume(
        self,
        checkpoints: &Checkpoints,
        path: &Path,
        group: &ProcessGroup,
    ) -> Result<Self> {
        let training = checkpoints.resume_from(path, self.training)?;
        let (epoch, values) = (training.sampler.epoch(), &training.values);
        let load = || {
            let epochs = history::load(values)?;
            ensure!(
                epoch == Some(epochs.len() as u64),
                "its history is of {} epochs, its sampler is in another",
                epochs.len()
            );
            Ok((epochs, LossCurve::load(values, group)?))
        };
        let path = training.resumed_from().unwrap_or(path).display();
        let (epochs, curve) = load().with_context(|| format!("cannot resume from {path}"))?;
        Ok(Self { training, epochs, curve })
    }

    /// Saves a checkpoint. All ranks must call this. In the middle of an epoch, `losses` are its losses so
    /// far.
    pub(crate) fn save(
        &mut self,
        checkpoints: &Checkpoints,
        losses: Option<&GatheredLosses>,
    ) -> Result<PathBuf> {
        let mut values = Checkpoint::default();
        history::save(&self.epochs, &mut values)?;
        if let Some(losses) = losses {
            losses.save(&mut values)?;
        }
        self.training.values = values;
        checkpoints.save(&self.training)?;
        Ok(checkpoints.directory().path_of(self.training.steps))
    }
}
