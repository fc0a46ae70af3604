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

use crate::{
    data::{PIXELS, Split},
    history::POINTS_PER_EPOCH,
    model::Classifier,
    progress::Progress,
    state::State,
};

/// The learning rate after so many epochs: halved in each, smoothly.
///
/// It does not depend on how many are to come, so that training can be resumed for more.
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

/// What an epoch of training gave.
#[derive(Clone, Debug)]
pub(crate) struct Trained {
    /// See [`crate::history::Epoch::losses`].
    pub(crate) losses: Vec<f64>,
    /// By all ranks together.
    pub(crate) images_per_s: f64,
    /// Time that this rank was in collectives, waiting for others included, most of it while
    /// backward went on.
    pub(crate) communication: Duration,
}

impl<'a> Trainer<'a> {
    /// Steps of `batch_size` images on each rank; the first with this learning rate.
    pub(crate) fn new(
        ddp: &'a DistributedDataParallel,
        batch_size: usize,
        learning_rate: f64,
        device: &'a Device,
    ) -> Self {
        let loss = CrossEntropyLossConfig::new().init(device);
        Self { ddp, batch_size, learning_rate, loss, device }
    }

    /// Trains once on every image; each rank on those that its sampler gives it. Afterwards all
    /// ranks have the same model.
    pub(crate) fn epoch(
        &self,
        mut state: State,
        images: &Split,
        sampler: &DistributedSampler,
        progress: &mut Progress,
    ) -> Result<(State, Trained)> {
        let group = self.ddp.group();
        let (started, communicated) = (Instant::now(), group.communication_time());
        let epoch = state.epochs.len();
        let indices: Vec<usize> = sampler.iter().collect();
        let steps = indices.len().div_ceil(self.batch_size);
        let mut curve = LossCurve::new(steps);
        progress.start(format!("epoch {}", epoch + 1), steps);
        for (step, batch) in indices.chunks(self.batch_size).enumerate() {
            let (batch, labels) = to_tensors(images.batch(batch.iter().copied()), self.device);
            let loss = self.loss.forward(state.model.forward(batch), labels);
            let loss_value: f32 = loss.clone().into_scalar();
            let gradients = self.ddp.backward(loss, &state.model)?;
            let at = epoch as f64 + step as f64 / steps as f64;
            let learning_rate = learning_rate(self.learning_rate, at);
            state.model = state.optimizer.step(learning_rate, state.model, gradients);

            curve.add(step, f64::from(loss_value));
            progress.step(loss_value);
        }
        progress.finish();
        state.model = self.ddp.sync_buffers(state.model)?;
        let losses = curve.mean(group)?;
        if let Some(loss) = losses.iter().find(|loss| !loss.is_finite()) {
            bail!("the loss became {loss} in epoch {}; try a smaller --lr", epoch + 1);
        }
        let trained = Trained {
            losses,
            images_per_s: (indices.len() * group.world_size()) as f64
                / started.elapsed().as_secs_f64(),
            communication: group.communication_time().saturating_sub(communicated),
        };
        Ok((state, trained))
    }
}

/// The part of the images that `model` recognises. Each is looked at by one rank.
pub(crate) fn evaluate(model: &Classifier, images: &Split, group: &ProcessGroup) -> Result<f64> {
    const BATCH_SIZE: usize = 250;
    let model = model.valid();
    let device = Device::flex();
    let shard: Vec<usize> =
        evaluation_shard(images.len(), group.world_size(), group.rank())?.collect();
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

/// Sums up the losses of the steps between the points of a curve.
struct LossCurve {
    steps: usize,
    sums: Vec<f64>,
    counts: Vec<f64>,
}

impl LossCurve {
    fn new(steps: usize) -> Self {
        let points = steps.min(POINTS_PER_EPOCH);
        Self { steps, sums: vec![0.0; points], counts: vec![0.0; points] }
    }

    fn add(&mut self, step: usize, loss: f64) {
        let point = step * self.sums.len() / self.steps;
        self.sums[point] += loss;
        self.counts[point] += 1.0;
    }

    /// Over all ranks, which have made equally many steps.
    fn mean(self, group: &ProcessGroup) -> Result<Vec<f64>> {
        let mut means: Vec<f64> = self.sums.iter().zip(self.counts).map(|(s, n)| s / n).collect();
        group.all_reduce(&mut means, ReduceOp::Avg)?;
        Ok(means)
    }
}
