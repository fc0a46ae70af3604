//! Mean and variance per channel, of one rank and of all ranks.

use std::fmt::Display;

use burn::tensor::Tensor;
use drumline::ProcessGroup;

use crate::{Error, Result, failure};

/// Mean and variance per channel. They travel and are merged in double precision.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Statistics {
    /// Values per channel; a whole number.
    pub(super) count: f64,
    pub(super) mean: Vec<f64>,
    /// Per channel, the sum of the squared distances from the mean.
    squares: Vec<f64>,
}

impl Statistics {
    /// The statistics of no samples.
    fn none(channels: usize) -> Self {
        Self { count: 0.0, mean: vec![0.0; channels], squares: vec![0.0; channels] }
    }

    /// The statistics of `input`, of shape `[samples, channels, ...]`.
    pub(super) fn of<const D: usize>(input: Tensor<D>) -> Result<Self> {
        let shape = input.dims();
        let channels = shape[1];
        let count = shape.iter().product::<usize>() / channels.max(1);
        if count == 0 {
            return Ok(Self::none(channels));
        }
        let flat = input.swap_dims(0, 1).reshape([channels, count]);
        let mean = flat.clone().mean_dim(1);
        let squares = (flat - mean.clone()).square().sum_dim(1);
        Ok(Self { count: count as f64, mean: values(mean)?, squares: values(squares)? })
    }

    /// The statistics of the samples of all ranks. All ranks get the same bits.
    pub(super) fn over_all_ranks(self, group: &ProcessGroup) -> Result<Self> {
        let channels = self.mean.len();
        let mine = [&[self.count], &self.mean[..], &self.squares[..]].concat();
        let mut all = vec![0.0; mine.len() * group.world_size()];
        group.all_gather(&mine, &mut all)?;
        let ranks = all.chunks_exact(mine.len()).map(|rank| {
            let (mean, squares) = rank[1..].split_at(channels);
            Self { count: rank[0], mean: mean.to_vec(), squares: squares.to_vec() }
        });
        Ok(ranks.fold(Self::none(channels), Self::and))
    }

    /// The statistics of the samples of both, by the pairwise update of Chan, Golub and LeVeque, in which
    /// nothing cancels.
    fn and(mut self, other: Self) -> Self {
        let count = self.count + other.count;
        if other.count == 0.0 {
            return self;
        }
        let share = other.count / count;
        let both = self.mean.iter_mut().zip(&mut self.squares);
        for ((mean, squares), (other_mean, other_squares)) in
            both.zip(other.mean.into_iter().zip(other.squares))
        {
            let distance = other_mean - *mean;
            *squares += other_squares + distance * distance * self.count * share;
            *mean += distance * share;
        }
        self.count = count;
        self
    }

    /// The variance of these samples, by which they are normalised.
    pub(super) fn variance(&self) -> Vec<f64> {
        self.squares.iter().map(|squares| squares / self.count).collect()
    }

    /// The unbiased estimate of the variance of the distribution behind the samples.
    pub(super) fn unbiased_variance(&self) -> Vec<f64> {
        self.squares.iter().map(|squares| squares / (self.count - 1.0)).collect()
    }
}

fn values(tensor: Tensor<2>) -> Result<Vec<f64>> {
    let values = tensor.try_into_data().map_err(|error| unread(&error))?;
    Ok(values.iter::<f64>().collect())
}

/// The error if a device has failed.
pub(super) fn unread(problem: &impl Display) -> Error {
    let problem = format!("its statistics could not be read from the device: {problem}");
    failure::cannot_normalize(problem)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(values: &[f64]) -> Statistics {
        let count = values.len() as f64;
        let mean = if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / count };
        let squares = values.iter().map(|value| (value - mean).powi(2)).sum();
        Statistics { count, mean: vec![mean], squares: vec![squares] }
    }

    proptest! {
        /// However the samples are divided, and far from zero, the result is that of all samples together.
        #[test]
        fn parts_together_are_the_whole(
            values in prop::collection::vec(-1.0..1.0_f64, 1..60), cut in 0usize..60, far in 0u8..2,
        ) {
            let values: Vec<f64> = values.iter().map(|value| value + 1e6 * f64::from(far)).collect();
            let (left, right) = values.split_at(cut.min(values.len()));
            let (parts, whole) = (of(left).and(of(right)), of(&values));
            prop_assert_eq!(parts.count, whole.count);
            prop_assert!((parts.mean[0] - whole.mean[0]).abs() < 1e-9);
            prop_assert!((parts.variance()[0] - whole.variance()[0]).abs() < 1e-9);
        }
    }
}
