//! A small network.

use burn::{
    module::Module,
    nn::{Linear, LinearConfig, loss::CrossEntropyLossConfig},
    tensor::{Device, Tensor, activation::relu},
    train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep},
};
use fashion_mnist::data::{CLASSES, PIXELS};

use crate::data::Batch;

/// Two hidden layers.
#[derive(Module, Debug)]
pub(crate) struct Classifier {
    first: Linear,
    second: Linear,
    output: Linear,
}

impl Classifier {
    pub(crate) fn new(device: &Device) -> Self {
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

    fn classify(&self, Batch { images, labels }: Batch) -> ClassificationOutput {
        let output = self.forward(images);
        let loss = CrossEntropyLossConfig::new()
            .init(&output.device())
            .forward(output.clone(), labels.clone());
        ClassificationOutput::new(loss, output, labels)
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
