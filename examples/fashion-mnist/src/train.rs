//! One epoch of training, and one evaluation.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use burn::{
    module::Module,
    nn::loss::{CrossEntropyLoss, CrossEntropyLossConfig},
    tensor::{Device, Int, Tensor, TensorData},
};
use drumline::{
    ProcessGroup, ReduceOp,
    sampler::{DistributedSampler, evaluation_shard},
};
use drumline_burn::{DistributedDataParallel, parameters_digest};
use fashion_mnist::data::{PIXELS, Split};

use crate::{
    checkpoints::Checkpoints, curve::LossCurve, model::Classifier, progress::Progress, state::State,
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
    learning_rate: f64,
    loss: CrossEntropyLoss,
    device: &'a Device,
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

impl<'a> Trainer<'a> {
    /// Trains in steps of `batch_size` images on each rank. `learning_rate` is that of the first step.
    pub(crate) fn new(
        ddp: &'a DistributedDataParallel,
        batch_size: usize,
        learning_rate: f64,
        device: &'a Device,
    ) -> Self {
        let loss = CrossEntropyLossConfig::new().init(device);
        Self { ddp, batch_size, learning_rate, loss, device }
    }

    /// Trains on all remaining images of the epoch. Each rank trains on the images that its sampler gives it.
    /// Afterwards all ranks have the same model.
    pub(crate) fn epoch(
        &self,
        mut state: State,
        images: &Split,
        sampler: &mut DistributedSampler,
        checkpoints: &Checkpoints,
        progress: &mut Progress,
    ) -> Result<(State, Trained)> {
        let group = self.ddp.group();
        let (started, before) = (Instant::now(), self.ddp.stats());
        let epoch = state.epochs.len();
        let indices: Vec<usize> = sampler.iter().collect();
        let images_per_step = self.batch_size * group.world_size();
        let done = sampler.state().consumed / images_per_step;
        let steps = done + indices.len().div_ceil(self.batch_size);
        let mut curve = state.curve.take().unwrap_or_else(|| LossCurve::new(steps));
        ensure!(curve.fits(steps), "the losses of the epoch that was interrupted do not fit");
        progress.start(format!("epoch {}", epoch + 1), steps, done);
        for (step, batch) in (done..).zip(indices.chunks(self.batch_size)) {
            tracing::trace!(epoch, step, ?batch, "trains on images");
            let (images, labels) = to_tensors(images.batch(batch.iter().copied()), self.device);
            let loss = self.loss.forward(state.model.forward(images), labels);
            let loss_value: f32 = loss.clone().into_scalar();
            let gradients = self.ddp.backward(loss, &state.model)?;
            let at = epoch as f64 + step as f64 / steps as f64;
            let learning_rate = learning_rate(self.learning_rate, at);
            state.model = state.optimizer.step(learning_rate, state.model, gradients);

            state.steps += 1;
            sampler.advance(batch.len());
            curve.add(step, f64::from(loss_value));
            progress.step(loss_value);
            if step + 1 < steps && checkpoints.is_due(state.steps) {
                let losses = curve.gather(group)?;
                check_losses(&losses.sums, epoch)?;
                checkpoints.save(&state, sampler, Some(&losses), group)?;
            }
        }
        progress.finish();
        state.model = self.ddp.sync_buffers(state.model)?;
        let losses = curve.mean(group)?;
        check_losses(&losses, epoch)?;
        let stats = self.ddp.stats();
        let trained = Trained {
            losses,
            images_per_s: (indices.len() * group.world_size()) as f64
                / started.elapsed().as_secs_f64(),
            communication: stats.communication.saturating_sub(before.communication),
            exposed: stats.exposed.saturating_sub(before.exposed),
        };
        Ok((state, trained))
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
pub(crate) fn evaluate(model: &Classifier, images: &Split, group: &ProcessGroup) -> Result<f64> {
    const BATCH_SIZE: usize = 250;
    let model = model.valid();
    let device = Device::flex();
    let shard: Vec<usize> =
        evaluation_shard(images.count(), group.world_size(), group.rank())?.collect();
    let mut recognised = 0;
    for batch in shard.chunks(BATCH_SIZE) {
        let (images, labels) = to_tensors(images.batch(batch.iter().copied()), &device);
        let guesses = model.forward(images).argmax(1).flatten::<1>(0, 1);
        recognised += guesses.equal(labels).int().sum().into_scalar::<i64>();
    }
    let mut counts = [recognised, shard.len() as i64];
    group.all_reduce(&mut counts, ReduceOp::Sum)?;
    Ok(counts[0] as f64 / counts[1] as f64)
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

fn to_tensors(
    (pixels, labels): (Vec<f32>, Vec<i32>),
    device: &Device,
) -> (Tensor<2>, Tensor<1, Int>) {
    let len = labels.len();
    let pixels = Tensor::from_data(TensorData::new(pixels, [len, PIXELS]), device);
    (pixels, Tensor::from_data(TensorData::new(labels, [len]), device))
}
