//! One epoch of training, and one evaluation.

use std::{
    num::NonZeroU64,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use burn::{
    data::dataloader::{DataLoader, DataLoaderIterator},
    module::Module,
    nn::loss::{CrossEntropyLoss, CrossEntropyLossConfig},
    tensor::{Device, Tensor},
};
use drumline::ProcessGroup;
use drumline_burn::{
    DistributedDataParallel,
    checkpoint::{Checkpoints, DataPosition},
    data::{Steps, Totals},
    parameters_digest,
};

use crate::{
    curve::LossCurve,
    images::{Batch, Image, Loader},
    model::Classifier,
    progress::Progress,
    state::{Settings, State},
};

/// The learning rate after `epochs` epochs. It halves in each epoch, smoothly.
///
/// It does not depend on the total number of epochs, so a training can be resumed for more epochs.
fn learning_rate(initial: f64, epochs: f64) -> f64 {
    initial * 0.5_f64.powf(epochs)
}

/// Trains on one rank.
pub(crate) struct Trainer<'a> {
    ddp: &'a DistributedDataParallel,
    batch_size: usize,
    has_shards: bool,
    learning_rate: f64,
    loss: CrossEntropyLoss,
    checkpoints: &'a Checkpoints,
    /// The number of steps from one checkpoint to the next within an epoch; `None` for none.
    save_every: Option<NonZeroU64>,
}

/// The results of an epoch of training.
#[derive(Clone, Debug)]
pub(crate) struct Trained {
    /// See [`fashion_mnist::history::Epoch::losses`].
    pub(crate) losses: Vec<f64>,
    /// Images per second, by all ranks together.
    pub(crate) images_per_s: f64,
    /// Time during which gradients of this rank were under way, including the wait for other ranks.
    pub(crate) communication: Duration,
    /// The part of this time that the backward pass did not hide.
    pub(crate) exposed: Duration,
}

impl Trained {
    /// The share of the communication that the backward pass did not hide, in percent.
    pub(crate) fn exposed_percent(&self) -> f64 {
        match self.communication.as_secs_f64() {
            0.0 => 0.0, // A world of one.
            communication => 100.0 * self.exposed.as_secs_f64() / communication,
        }
    }
}

/// The batches of an epoch.
enum Batches<'a> {
    /// Of any shard.
    OfShards(Box<Steps<'a, Image, Batch>>),
    /// Of this rank, one after another.
    Own(Box<dyn DataLoaderIterator<Batch> + 'a>),
}

impl<'a> Trainer<'a> {
    /// Trains in steps of `batch_size` images on each rank, or of each shard.
    pub(crate) fn new(
        ddp: &'a DistributedDataParallel,
        batch_size: usize,
        settings: &Settings,
        device: &Device,
        checkpoints: &'a Checkpoints,
        save_every: Option<NonZeroU64>,
    ) -> Self {
        let loss = CrossEntropyLossConfig::new().init(device);
        let (learning_rate, has_shards) = (settings.learning_rate, settings.shards.is_some());
        Self { ddp, batch_size, has_shards, learning_rate, loss, checkpoints, save_every }
    }

    /// Trains on all remaining images of the epoch. Afterwards all ranks have the same model.
    pub(crate) fn epoch(
        &self,
        mut state: State,
        progress: &mut Progress,
    ) -> Result<(State, Trained)> {
        let group = self.ddp.group();
        let (started, before) = (Instant::now(), self.ddp.stats());
        let epoch = state.epochs.len();
        let images = state.training.sampler.clone();
        let (all, consumed) = images.state().map_or((0, 0), |it| (it.samples, it.consumed));
        let mut batches = match self.has_shards {
            true => Batches::OfShards(Box::new(images.steps()?)),
            false => Batches::Own(images.iter()),
        };
        let left = match &batches {
            Batches::OfShards(batches) => batches.left(),
            Batches::Own(batches) => {
                let left = batches.progress().items_total - batches.progress().items_processed;
                let done = consumed / (self.batch_size * group.world_size());
                done..done + left.div_ceil(self.batch_size)
            }
        };
        let steps = left.end;
        // With shards, all ranks have the losses of all.
        let with_others = (!self.has_shards).then_some(group);
        let mut curve = state.curve.take().unwrap_or_else(|| LossCurve::new(steps));
        ensure!(curve.fits(steps), "the losses of the epoch that was interrupted do not fit");
        progress.start(format!("epoch {}", epoch + 1), steps, left.start);
        for step in left {
            let training = &state.training;
            let loss = |Batch { pixels, labels, indices }| -> Tensor<1> {
                tracing::trace!(epoch, step, batch = ?indices, "trains on images");
                self.loss.forward(training.model.forward(pixels), labels)
            };
            let (gradients, loss) = match &mut batches {
                Batches::OfShards(batches) => {
                    let loss = |shard| Ok(loss(batches.of(step, shard)?));
                    let step = self.ddp.step(training.steps, loss, &training.model)?;
                    (step.gradients, step.loss)
                }
                Batches::Own(batches) => {
                    let loss = loss(batches.next().context("no batch is left")??);
                    let value: f32 = loss.clone().into_scalar();
                    (self.ddp.backward(loss, &training.model)?, f64::from(value))
                }
            };
            let at = epoch as f64 + step as f64 / steps as f64;
            let learning_rate = learning_rate(self.learning_rate, at);
            state.training.model =
                state.training.optimizer.step(learning_rate, state.training.model, gradients);

            state.training.steps += 1;
            curve.add(step, loss);
            progress.step(loss as f32);
            if step + 1 < steps && self.is_save_due(state.training.steps) {
                let losses = curve.gather(with_others.as_ref())?;
                check_losses(&losses.sums, epoch)?;
                let mut save =
                    |group: &ProcessGroup| state.save(&self.checkpoints.over(group), Some(&losses));
                self.ddp.elastic().run(&mut save)?;
            }
        }
        let is_over = match &mut batches {
            Batches::OfShards(batches) => batches.next().is_none(),
            Batches::Own(batches) => batches.next().is_none(),
        };
        ensure!(is_over, "batches are left");
        progress.finish();
        // Shards leave the same buffers on all ranks.
        if !self.has_shards {
            state.training.model = self.ddp.sync_buffers(state.training.model)?;
        }
        let losses = curve.mean(with_others.as_ref())?;
        check_losses(&losses, epoch)?;
        let stats = self.ddp.stats();
        let trained = Trained {
            losses,
            images_per_s: all.saturating_sub(consumed) as f64 / started.elapsed().as_secs_f64(),
            communication: stats.communication.saturating_sub(before.communication),
            exposed: stats.exposed.saturating_sub(before.exposed),
        };
        Ok((state, trained))
    }

    fn is_save_due(&self, steps: u64) -> bool {
        self.save_every.is_some_and(|every| steps.is_multiple_of(every.get()))
    }
}

/// Checks that all losses are numbers. Otherwise the model is spoiled, and must not get into a checkpoint.
fn check_losses(losses: &[f64], epoch: usize) -> Result<()> {
    match losses.iter().find(|loss| !loss.is_finite()) {
        Some(loss) => bail!("the loss became {loss} in epoch {}; try a smaller --lr", epoch + 1),
        None => Ok(()),
    }
}

/// The fraction of the images that `model` recognises. Each image is evaluated by one rank.
pub(crate) fn evaluate(model: &Classifier, images: &Loader, group: &ProcessGroup) -> Result<f64> {
    let model = model.valid();
    let mut totals = Totals::default();
    for batch in images.iter() {
        let Batch { pixels, labels, indices } = batch?;
        let guesses = model.forward(pixels).argmax(1).flatten::<1>(0, 1);
        let recognised: i64 = guesses.equal(labels).int().sum().into_scalar();
        totals.add([recognised as f64], indices.len() as u64);
    }
    let [accuracy] = totals.over(group)?.means();
    Ok(accuracy)
}

/// The digest of parameters and buffers, which must be the same on all ranks.
pub(crate) fn common_digest(model: &Classifier, group: &ProcessGroup) -> Result<u64> {
    let digest = parameters_digest(model)?;
    let mut digests = vec![0; group.world_size()];
    group.all_gather(&[digest as i64], &mut digests)?;
    let others: Vec<usize> =
        (0..digests.len()).filter(|&rank| digests[rank] != digests[0]).collect();
    ensure!(others.is_empty(), "the parameters of ranks {others:?} differ from those of rank 0");
    Ok(digest)
}
