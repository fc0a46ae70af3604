//! The images as a data set of burn, and batches of them.

use std::sync::Arc;

use anyhow::Result;
use burn::{
    data::{
        dataloader::batcher::Batcher,
        dataset::{Dataset, DatasetError},
    },
    tensor::{Device, Int, Tensor, TensorData},
};
use drumline::ProcessGroup;
use drumline_burn::data::{DataLoaderBuilder, DistributedDataLoader};
use fashion_mnist::data::{PIXELS, Split};

/// Delivers this rank's batches.
pub(crate) type Loader = Arc<DistributedDataLoader<Image, Batch>>;

/// An image of a data set.
pub(crate) struct Image {
    index: usize,
    pixels: Vec<f32>,
    label: i32,
}

/// Images that are trained on or evaluated together.
pub(crate) struct Batch {
    /// `[images, PIXELS]`
    pub(crate) pixels: Tensor<2>,
    /// `[images]`
    pub(crate) labels: Tensor<1, Int>,
    /// Their places in the data set.
    pub(crate) indices: Vec<usize>,
}

/// Images for training: in each epoch they are shuffled over all ranks, or over `shards`.
pub(crate) fn shuffled(
    images: Split,
    batch_size: usize,
    seed: u64,
    shards: Option<usize>,
    device: &Device,
    group: &ProcessGroup,
) -> Result<Loader> {
    let builder = DataLoaderBuilder::new(ToTensors).set_device(device.clone());
    let builder = builder.batch_size(batch_size).num_workers(1);
    let builder = shards.into_iter().fold(builder.shuffle(seed), DataLoaderBuilder::shards);
    Ok(builder.build(Images(images), group)?)
}

/// Images for evaluation: each goes to one rank.
pub(crate) fn shard(images: Split, group: &ProcessGroup) -> Result<Loader> {
    let builder = DataLoaderBuilder::new(ToTensors).set_device(Device::flex());
    Ok(builder.batch_size(250).build_shard(Images(images), group)?)
}

struct Images(Split);

impl Dataset<Image> for Images {
    fn get(&self, index: usize) -> Result<Image, DatasetError> {
        let (pixels, labels) = self.0.batch([index]);
        Ok(Image { index, pixels, label: labels[0] })
    }

    fn len(&self) -> usize {
        self.0.count()
    }
}

struct ToTensors;

impl Batcher<Image, Batch> for ToTensors {
    fn batch(&self, images: Vec<Image>, device: &Device) -> Batch {
        let count = images.len();
        let indices = images.iter().map(|image| image.index).collect();
        let labels: Vec<i32> = images.iter().map(|image| image.label).collect();
        let pixels: Vec<f32> = images.into_iter().flat_map(|image| image.pixels).collect();
        Batch {
            pixels: Tensor::from_data(TensorData::new(pixels, [count, PIXELS]), device),
            labels: Tensor::from_data(TensorData::new(labels, [count]), device),
            indices,
        }
    }
}
