//! The samples of a rank.

use std::sync::{Mutex, MutexGuard, PoisonError};

use drumline::sampler::{DistributedSampler, SamplerState, evaluation_shard};
use pyo3::prelude::*;

use crate::error::raise;

/// Draws the indices of an epoch in the same order as torch's sampler.
#[pyclass(frozen, module = "drumline._core")]
pub(crate) struct Sampler(Mutex<DistributedSampler>);

#[pymethods]
impl Sampler {
    #[new]
    fn new(
        samples: usize,
        world_size: usize,
        rank: usize,
        shuffle: bool,
        seed: u64,
        drop_last: bool,
    ) -> PyResult<Sampler> {
        let sampler = DistributedSampler::builder(samples, world_size, rank)
            .shuffle(shuffle)
            .seed(seed)
            .drop_last(drop_last)
            .allow_empty(true)
            .build()
            .map_err(raise)?;
        Ok(Sampler(Mutex::new(sampler)))
    }

    fn set_epoch(&self, epoch: u64) {
        self.lock().set_epoch(epoch);
    }

    /// Marks `indices` further indices of this rank as done.
    fn advance(&self, indices: usize) {
        self.lock().advance(indices);
    }

    /// The indices of the epoch that this rank has not done yet.
    fn indices(&self) -> Vec<usize> {
        self.lock().iter().collect()
    }

    fn __len__(&self) -> usize {
        self.lock().len()
    }

    /// The position of all ranks in the epoch, as text.
    fn state(&self) -> String {
        self.lock().state().to_string()
    }

    fn resume(&self, state: &str) -> PyResult<()> {
        let state: SamplerState = state.parse().map_err(raise)?;
        self.lock().resume(&state).map_err(raise)
    }

    /// The samples of one rank when none may be repeated: from, to.
    #[staticmethod]
    fn shard(samples: usize, world_size: usize, rank: usize) -> PyResult<(usize, usize)> {
        let shard = evaluation_shard(samples, world_size, rank).map_err(raise)?;
        Ok((shard.start, shard.end))
    }
}

impl Sampler {
    fn lock(&self) -> MutexGuard<'_, DistributedSampler> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
