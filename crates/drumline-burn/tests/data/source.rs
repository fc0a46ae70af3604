//! A data set whose samples are their own indices.

use std::sync::Arc;

use burn::{
    data::{
        dataloader::{DataLoader, batcher::Batcher},
        dataset::{Dataset, DatasetError},
    },
    tensor::Device,
};
use drumline::ProcessGroup;
use drumline_burn::data::{DataLoaderBuilder, DistributedDataLoader};

pub(crate) struct Indices(pub(crate) usize);

impl Dataset<usize> for Indices {
    fn get(&self, index: usize) -> Result<usize, DatasetError> {
        Ok(index)
    }

    fn len(&self) -> usize {
        self.0
    }
}

pub(crate) struct Keep;

impl Batcher<usize, Vec<usize>> for Keep {
    fn batch(&self, items: Vec<usize>, _: &Device) -> Vec<usize> {
        items
    }
}

pub(crate) type Loader = Arc<DistributedDataLoader<usize, Vec<usize>>>;

/// Shuffles with seed 3.
pub(crate) fn loader(
    samples: usize,
    batch_size: usize,
    num_workers: usize,
    group: &ProcessGroup,
) -> Loader {
    let builder = DataLoaderBuilder::new(Keep).batch_size(batch_size).num_workers(num_workers);
    builder.shuffle(3).build(Indices(samples), group).unwrap()
}

/// All batches of one iterator.
pub(crate) fn pass(loader: &dyn DataLoader<Vec<usize>>) -> Vec<Vec<usize>> {
    loader.iter().map(Result::unwrap).collect()
}
