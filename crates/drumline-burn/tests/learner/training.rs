//! Trainings, with ranks as threads.

use std::{path::Path, time::Duration};

use burn::{
    lr_scheduler::linear::LinearLrSchedulerConfig,
    optim::SgdConfig,
    tensor::Device,
    train::{
        Learner, LearningResult, SupervisedTraining, logger::InMemoryMetricLogger,
        metric::LossMetric,
    },
};
use drumline::{Config, ProcessGroup};
use tempfile::TempDir;

use crate::network::{Network, Notes, Samples};

/// Runs `rank` on a thread per rank and returns what each gave, by rank. A rank that waits in vain gets an error.
pub(crate) fn on_ranks<T: Send>(
    world_size: usize,
    rank: impl Fn(ProcessGroup) -> T + Sync,
) -> Vec<T> {
    on_ranks_within(Duration::from_secs(60), world_size, rank)
}

/// [`on_ranks`] with a time limit for each call of the group.
pub(crate) fn on_ranks_within<T: Send>(
    timeout: Duration,
    world_size: usize,
    rank: impl Fn(ProcessGroup) -> T + Sync,
) -> Vec<T> {
    let config = Config::default().timeout(timeout);
    drumline::train::local_with(world_size, &config, |group| Ok(rank(group))).unwrap()
}

pub(crate) fn device() -> Device {
    Device::flex().autodiff()
}

/// What a training is made of.
#[derive(Clone)]
pub(crate) struct Setup {
    pub(crate) train: Samples,
    pub(crate) valid: Samples,
    pub(crate) batch_size: usize,
    pub(crate) epochs: usize,
    pub(crate) accumulation: Option<usize>,
    pub(crate) workers: usize,
}

impl Setup {
    pub(crate) fn new(train: impl IntoIterator<Item = usize>, batch_size: usize) -> Self {
        let valid = Samples::new(9000..9006);
        let train = Samples::new(train);
        Self { train, valid, batch_size, epochs: 1, accumulation: None, workers: 0 }
    }

    /// A training that writes nothing but what checkpointers write to `directory`.
    pub(crate) fn training(&self, directory: &Path) -> SupervisedTraining<Network> {
        let training = SupervisedTraining::new(
            directory,
            self.train.clone().loader(self.batch_size, self.workers),
            self.valid.clone().loader(4, 0),
        );
        let training = training
            .num_epochs(self.epochs)
            .metric_train_numeric(LossMetric::new())
            .metric_valid_numeric(LossMetric::new())
            .with_metric_logger(InMemoryMetricLogger::new())
            .with_application_logger(None);
        match self.accumulation {
            Some(accumulation) => training.grads_accumulation(accumulation),
            None => training,
        }
    }
}

/// A learner whose learning rate falls with each update.
pub(crate) fn learner(model: Network) -> Learner<Network> {
    let scheduler = LinearLrSchedulerConfig::new(0.1, 0.01, 100).init().unwrap();
    Learner::new(model, SgdConfig::new().init(), scheduler)
}

/// One process, with burn's own strategy.
pub(crate) fn alone(setup: &Setup, notes: &Notes) -> LearningResult<Network> {
    let directory = TempDir::new().unwrap();
    let model = Network::new(1, 8, notes.clone(), &device());
    setup.training(directory.path()).launch(learner(model))
}

pub(crate) fn error(result: &LearningResult<Network>) -> String {
    result.error.as_ref().map(ToString::to_string).unwrap_or_default()
}
