//! The losses and accuracies of the finished epochs.

use anyhow::{Result, ensure};
use drumline::checkpoint::{Checkpoint, Tensor};

/// Points of the loss curve per epoch, at most.
pub const POINTS_PER_EPOCH: usize = 50;

/// One epoch of training and the evaluation after it.
#[derive(Clone, Debug, PartialEq)]
pub struct Epoch {
    /// The points of the loss curve, in order. Each is the mean training loss over equally many steps of all
    /// ranks.
    pub losses: Vec<f64>,
    /// The fraction of the test images that was recognised, 0 to 1.
    pub accuracy: f64,
}

impl Epoch {
    /// Mean training loss.
    pub fn loss(&self) -> f64 {
        self.losses.iter().sum::<f64>() / self.losses.len() as f64
    }
}

/// Adds the history to a checkpoint.
pub fn save(epochs: &[Epoch], checkpoint: &mut Checkpoint) -> Result<()> {
    let points = epochs.first().map_or(0, |epoch| epoch.losses.len());
    let losses: Vec<f64> = epochs.iter().flat_map(|epoch| epoch.losses.clone()).collect();
    let accuracies: Vec<f64> = epochs.iter().map(|epoch| epoch.accuracy).collect();
    checkpoint.insert(Tensor::from_values(LOSSES, [epochs.len(), points], &losses)?);
    checkpoint.insert(Tensor::from_values(ACCURACIES, [epochs.len()], &accuracies)?);
    Ok(())
}

/// Reads the history of a checkpoint.
pub fn load(checkpoint: &Checkpoint) -> Result<Vec<Epoch>> {
    let (Some(losses), Some(accuracies)) =
        (checkpoint.tensor(LOSSES), checkpoint.tensor(ACCURACIES))
    else {
        anyhow::bail!("it holds no {LOSSES} and {ACCURACIES}");
    };
    // Without a finished epoch there are no points, but the length of a chunk must not be 0.
    let points = losses.shape().last().copied().unwrap_or_default().max(1);
    let (losses, accuracies) = (losses.values::<f64>()?, accuracies.values::<f64>()?);
    ensure!(
        losses.len() == accuracies.len() * points,
        "{LOSSES} and {ACCURACIES} do not fit each other"
    );
    let epochs = losses.chunks_exact(points).zip(accuracies);
    Ok(epochs.map(|(losses, accuracy)| Epoch { losses: losses.to_vec(), accuracy }).collect())
}

const LOSSES: &str = "history.losses";
const ACCURACIES: &str = "history.accuracies";
