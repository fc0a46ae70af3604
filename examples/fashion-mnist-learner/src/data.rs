//! Images as burn's loader wants them.

use std::sync::Arc;

use burn::{
    data::{
        dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher},
        dataset::{Dataset, DatasetError},
    },
    tensor::{Device, Int, Tensor, TensorData},
};
use fashion_mnist::data::{PIXELS, Split};

/// Images and their labels.
#[derive(Clone, Debug)]
pub struct Batch {
    /// `[batch, PIXELS]`.
    pub images: Tensor<2>,
    /// `[batch]`.
    pub labels: Tensor<1, Int>,
}

/// A loader of `split`, shuffled in each epoch if there is a seed.
pub fn loader(split: Split, batch_size: usize, seed: Option<u64>) -> Arc<dyn DataLoader<Batch>> {
    let split = Arc::new(split);
    let builder = DataLoaderBuilder::new(Stack(split.clone())).batch_size(batch_size);
    let builder = match seed {
        Some(seed) => builder.shuffle(seed),
        None => builder,
    };
    builder.build(Numbers(split.count()))
}

/// The numbers of the images of a split.
#[derive(Clone, Copy, Debug)]
pub struct Numbers(pub usize);

impl Dataset<usize> for Numbers {
    fn get(&self, index: usize) -> Result<usize, DatasetError> {
        Ok(index)
    }

    fn len(&self) -> usize {
        self.0
    }
}

/// Makes a batch of images from their numbers.
#[derive(Clone, Debug)]
pub struct Stack(pub Arc<Split>);

impl Batcher<usize, Batch> for Stack {
    fn batch(&self, numbers: Vec<usize>, device: &Device) -> Batch {
        let count = numbers.len();
        let (pixels, labels) = self.0.batch(numbers);
        Batch {
            images: Tensor::from_data(TensorData::new(pixels, [count, PIXELS]), device),
            labels: Tensor::from_data(TensorData::new(labels, [count]), device),
        }
    }
}
