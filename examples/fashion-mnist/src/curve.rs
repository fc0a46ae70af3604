//! The losses of an unfinished epoch.

use std::num::NonZeroUsize;

use anyhow::{Context, Result, ensure};
use drumline::{
    ProcessGroup, ReduceOp,
    checkpoint::{Checkpoint, Tensor},
};
use fashion_mnist::history::POINTS_PER_EPOCH;

/// Sums up the losses of the steps between two points of a curve.
#[derive(Clone, Debug)]
pub(crate) struct LossCurve {
    /// The number of steps of the whole epoch.
    steps: usize,
    /// The sum of the losses for each point: of this rank, or with shards of all.
    sums: Vec<f64>,
}

const UNFINISHED: &str = "history.unfinished";
const STEPS_PER_EPOCH: &str = "steps per epoch";

impl LossCurve {
    pub(crate) fn new(steps: usize) -> Self {
        Self { steps, sums: vec![0.0; steps.min(POINTS_PER_EPOCH)] }
    }

    /// Whether the curve belongs to an epoch of `steps` steps.
    pub(crate) fn fits(&self, steps: usize) -> bool {
        self.steps == steps
    }

    pub(crate) fn add(&mut self, step: usize, loss: f64) {
        let point = self.point(step);
        self.sums[point] += loss;
    }

    /// The mean loss at each point, over the ranks of a group if each has losses of its own. Every rank must have made
    /// all steps.
    pub(crate) fn mean(self, over: Option<&ProcessGroup>) -> Result<Vec<f64>> {
        let mut counts = vec![0.0; self.sums.len()];
        (0..self.steps).for_each(|step| counts[self.point(step)] += 1.0);
        let mut means: Vec<f64> = self.sums.iter().zip(counts).map(|(s, n)| s / n).collect();
        if let Some(group) = over {
            group.all_reduce(&mut means, ReduceOp::Avg)?;
        }
        Ok(means)
    }

    /// The losses for a checkpoint, of the ranks of a group if each has losses of its own.
    pub(crate) fn gather(&self, of: Option<&ProcessGroup>) -> Result<GatheredLosses> {
        let ranks = of.map_or(1, ProcessGroup::world_size);
        let mut sums = self.sums.repeat(ranks);
        if let Some(group) = of {
            group.all_gather(&self.sums, &mut sums)?;
        }
        Ok(GatheredLosses { steps: self.steps, shape: [ranks, self.sums.len()], sums })
    }

    /// Loads this rank's losses, if the checkpoint was made in the middle of an epoch. If it has those of another number
    /// of ranks, every rank gets their mean, which leaves the total mean unchanged.
    pub(crate) fn load(checkpoint: &Checkpoint, group: &ProcessGroup) -> Result<Option<Self>> {
        let Some(tensor) = checkpoint.tensor(UNFINISHED) else { return Ok(None) };
        let steps = checkpoint.metadata.get(STEPS_PER_EPOCH);
        let steps: NonZeroUsize = steps
            .and_then(|text| text.parse().ok())
            .with_context(|| format!("it does not say its {STEPS_PER_EPOCH}"))?;
        let mut curve = Self::new(steps.get());
        let (all, points) = (tensor.values::<f64>()?, curve.sums.len());
        ensure!(
            !all.is_empty() && tensor.shape() == [all.len() / points, points],
            "{UNFINISHED} does not fit {} steps",
            curve.steps
        );
        let ranks = all.len() / points;
        if ranks == group.world_size() {
            curve.sums = all[group.rank() * points..][..points].to_vec();
        } else {
            for sums in all.chunks_exact(points) {
                curve.sums.iter_mut().zip(sums).for_each(|(mean, sum)| *mean += sum / ranks as f64);
            }
        }
        Ok(Some(curve))
    }

    fn point(&self, step: usize) -> usize {
        step * self.sums.len() / self.steps
    }
}

/// The unfinished curves of all ranks; one with shards, which is that of all.
pub(crate) struct GatheredLosses {
    steps: usize,
    /// Number of curves, number of points.
    shape: [usize; 2],
    pub(crate) sums: Vec<f64>,
}

impl GatheredLosses {
    pub(crate) fn save(&self, checkpoint: &mut Checkpoint) -> Result<()> {
        checkpoint.insert(Tensor::from_values(UNFINISHED, self.shape, &self.sums)?);
        checkpoint.metadata.insert(STEPS_PER_EPOCH.into(), self.steps.to_string());
        Ok(())
    }
}
