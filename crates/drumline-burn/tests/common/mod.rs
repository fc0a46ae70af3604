//! What the tests share: ranks as threads, and data that is the same everywhere.

#![allow(dead_code, clippy::unwrap_used, reason = "each test program uses its share of this file")]

pub(crate) mod probe;

use burn::{
    module::{Module, Param},
    nn::{Linear, LinearConfig},
    optim::{AdamConfig, GradientsParams, ModuleOptimizer, SgdConfig},
    tensor::{Device, Shape, Tensor, TensorData, activation::tanh},
};
use drumline::ProcessGroup;

/// Runs `rank` on a thread per rank and returns what each gave, by rank.
pub(crate) fn on_ranks<T: Send>(
    world_size: usize,
    rank: impl Fn(ProcessGroup) -> T + Sync,
) -> Vec<T> {
    drumline::local(world_size, |group| Ok(rank(group))).unwrap()
}

/// Numbers between -1 and 1 that depend on `seed`, in the device's float dtype.
pub(crate) fn tensor<const D: usize>(shape: [usize; D], seed: usize, device: &Device) -> Tensor<D> {
    let count = Shape::from(shape).num_elements();
    let value = |i: usize| ((seed * 7919 + i) as f64 * 0.618 + 0.3).sin();
    Tensor::from_data(TensorData::new((0..count).map(value).collect(), shape), device)
}

/// Layers of equal width, then one output.
#[derive(Module, Debug)]
pub(crate) struct Mlp {
    pub(crate) layers: Vec<Linear>,
    pub(crate) head: Linear,
}

impl Mlp {
    pub(crate) fn new(width: usize, depth: usize, device: &Device) -> Self {
        let layer = |outputs| LinearConfig::new(width, outputs).init(device);
        Self { layers: (0..depth).map(|_| layer(width)).collect(), head: layer(1) }
    }

    pub(crate) fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        let hidden = self.layers.iter().fold(input, |x, layer| tanh(layer.forward(x)));
        self.head.forward(hidden)
    }

    pub(crate) fn loss(&self, input: Tensor<2>, target: Tensor<2>) -> Tensor<1> {
        (self.forward(input) - target).square().mean()
    }
}

/// A layer of one weight and nothing else.
pub(crate) fn single_weight(weight: f32, device: &Device) -> Linear {
    let mut linear = LinearConfig::new(1, 1).with_bias(false).init(device);
    linear.weight = Param::from_data([[weight]], device);
    linear
}

/// By name, for messages.
pub(crate) fn optimizers() -> [(&'static str, ModuleOptimizer, f64); 2] {
    [("SGD", SgdConfig::new().init(), 0.05), ("Adam", AdamConfig::new().init(), 0.01)]
}

/// The gradients as raw numbers, by parameter.
pub(crate) fn gradients_of(model: &Mlp, gradients: &GradientsParams) -> Vec<Vec<f32>> {
    let linear = |linear: &Linear| {
        let bias = linear.bias.as_ref().unwrap();
        let weight = gradients.get::<2>(linear.weight.id).unwrap().into_data();
        let bias = gradients.get::<1>(bias.id).unwrap().into_data();
        [weight.try_into_vec().unwrap(), bias.try_into_vec().unwrap()]
    };
    model.layers.iter().chain([&model.head]).flat_map(linear).collect()
}
