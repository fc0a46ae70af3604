//! The network of candle's own example.

use candle_core::{Result, Tensor};
use candle_nn::{Linear, Module, VarBuilder, linear};
use fashion_mnist::data::{CLASSES, PIXELS};

/// One hidden layer; 79,510 parameters.
#[derive(Debug)]
pub(crate) struct Mlp {
    hidden: Linear,
    output: Linear,
}

impl Mlp {
    const HIDDEN: usize = 100;

    pub(crate) fn new(vb: VarBuilder<'_>) -> Result<Self> {
        let hidden = linear(PIXELS, Self::HIDDEN, vb.pp("hidden"))?;
        let output = linear(Self::HIDDEN, CLASSES, vb.pp("output"))?;
        Ok(Self { hidden, output })
    }
}

impl Module for Mlp {
    /// `[batch, PIXELS]` pixels to `[batch, CLASSES]` logits.
    fn forward(&self, images: &Tensor) -> Result<Tensor> {
        self.output.forward(&self.hidden.forward(images)?.relu()?)
    }
}
