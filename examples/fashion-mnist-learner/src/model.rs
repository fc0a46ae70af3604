//! A small network.

use burn::{
    data::dataset::DatasetError,
    module::Module,
    nn::{Linear, LinearConfig, loss::CrossEntropyLossConfig},
    tensor::{Device, Tensor, activation::relu},
    train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep},
};
use fashion_mnist::data::{CLASSES, PIXELS, Split};

use crate::data::{Batch, loader};

/// Two hidden layers.
#[derive(Module, Debug)]
pub struct Classifier {
    first: Linear,
    second: Linear,
    output: Linear,
}

impl Classifier {
    /// With random weights.
    pub fn new(device: &Device) -> Self {
        Self {
            first: LinearConfig::new(PIXELS, 128).init(device),
            second: LinearConfig::new(128, 64).init(device),
            output: LinearConfig::new(64, CLASSES).init(device),
        }
    }

    /// `[batch, PIXELS]` pixels to `[batch, CLASSES]` logits.
    fn forward(&self, images: Tensor<2>) -> Tensor<2> {
        let hidden = relu(self.first.forward(images));
        self.output.forward(relu(self.second.forward(hidden)))
    }

    /// Logits and loss of a batch.
    pub fn classify(&self, Batch { images, labels }: Batch) -> ClassificationOutput {
        let output = self.forward(images);
        let loss = CrossEntropyLossConfig::new()
            .init(&output.device())
            .forward(output.clone(), labels.clone());
        ClassificationOutput::new(loss, output, labels)
    }

    /// How many of `images` the network recognises, in percent.
    ///
    /// # Errors
    ///
    /// The images cannot be read.
    pub fn accuracy(&self, images: Split) -> Result<f64, DatasetError> {
        let (count, mut recognised) = (images.count(), 0);
        for batch in loader(images, 500, None).iter() {
            let Batch { images, labels } = batch?;
            let guesses = self.forward(images).argmax(1).flatten::<1>(0, 1);
            recognised += guesses.equal(labels).int().sum().into_scalar::<i64>();
        }
        Ok(100.0 * recognised as f64 / count as f64)
    }
}

impl TrainStep for Classifier {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> TrainOutput<ClassificationOutput> {
        let output = self.classify(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Classifier {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> ClassificationOutput {
        self.classify(batch)
    }
}
