//! A small GPT: a transformer that says which character is next. The same one, in torch, is
//! `examples/python/gpt/model.py`.

use burn::{
    module::Module,
    nn::{Embedding, Gelu, Initializer, LayerNorm, LayerNormConfig, Linear},
    tensor::{
        Device, Distribution, Int, Tensor, TensorData, module::attention,
        ops::AttentionModuleOptions,
    },
};

/// What the model looks like.
#[derive(Clone, Debug)]
pub(crate) struct GptConfig {
    /// Size of the alphabet.
    pub(crate) characters: usize,
    /// Characters that the model sees at once.
    pub(crate) places: usize,
    pub(crate) layers: usize,
    /// Numbers for each place; a multiple of `heads`.
    pub(crate) width: usize,
    pub(crate) heads: usize,
}

/// `[batch, places]` characters to `[batch, places, characters]` scores of the next ones.
#[derive(Module, Debug)]
pub(crate) struct Gpt {
    character: Embedding,
    place: Embedding,
    blocks: Vec<Block>,
    scores: (LayerNorm, Linear),
}

/// Attention to what came before, and a layer on each place by itself.
#[derive(Module, Debug)]
struct Block {
    before_attention: LayerNorm,
    before_layer: LayerNorm,
    queries_keys_values: Linear,
    attended: Linear,
    layer: (Linear, Gelu, Linear),
    heads: usize,
}

impl Gpt {
    /// A model with random weights, which `seed` decides.
    pub(crate) fn new(config: &GptConfig, seed: u64, device: &Device) -> Self {
        device.seed(seed);
        let &GptConfig { characters, places, layers, width, heads } = config;
        let norm = || LayerNormConfig::new(width).init(device);
        let linear = |from, to| linear(from, to, device);
        let block = |_| Block {
            before_attention: norm(),
            before_layer: norm(),
            queries_keys_values: linear(width, 3 * width),
            attended: linear(width, width),
            layer: (linear(width, 4 * width), Gelu::new(), linear(4 * width, width)),
            heads,
        };
        // burn draws a weight when it is first used. `wrap` uses all of them in their order.
        Self {
            character: Embedding { weight: WEIGHTS.init([characters, width], device) },
            place: Embedding { weight: WEIGHTS.init([places, width], device) },
            blocks: (0..layers).map(block).collect(),
            scores: (norm(), linear(width, characters)),
        }
    }

    pub(crate) fn forward(&self, characters: Tensor<2, Int>) -> Tensor<3> {
        let [_, places] = characters.dims();
        let place = Tensor::arange(0..places as i64, &characters.device()).unsqueeze();
        let mut x = self.character.forward(characters) + self.place.forward(place);
        for block in &self.blocks {
            x = block.forward(x);
        }
        self.scores.1.forward(self.scores.0.forward(x))
    }

    /// The characters with `count` more, drawn by their scores.
    pub(crate) fn continued(&self, mut characters: Vec<i32>, count: usize, seed: u64) -> Vec<i32> {
        let model = self.valid();
        let device = model.place.weight.device();
        let [places, _] = model.place.weight.dims();
        device.seed(seed);
        for _ in 0..count {
            let seen = characters[characters.len().saturating_sub(places)..].to_vec();
            let seen = TensorData::new(seen.clone(), [1, seen.len()]);
            let scores: Tensor<3> = model.forward(Tensor::from_data(seen, &device));
            let [_, last, alphabet] = scores.dims();
            let scores = scores.narrow(1, last - 1, 1).reshape([alphabet]) / 0.8;
            // With Gumbel's noise, the largest score is a draw from the softmax of the scores.
            let uniform =
                Tensor::<1>::random([alphabet], Distribution::Uniform(1e-9, 1.0), &device);
            let drawn = (scores - (-uniform.log()).log()).argmax(0);
            characters.push(drawn.into_scalar());
        }
        characters
    }
}

impl Block {
    /// `[batch, places, width]` both.
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [batch, places, width] = x.dims();
        let parts = self.queries_keys_values.forward(self.before_attention.forward(x.clone()));
        // Each is [batch, heads, places, width of a head].
        let [queries, keys, values] = [0, 1, 2].map(|part| {
            let part = parts.clone().narrow(2, part * width, width);
            part.reshape([batch, places, self.heads, width / self.heads]).swap_dims(1, 2)
        });
        let causal = AttentionModuleOptions { is_causal: true, ..Default::default() };
        let seen = attention(queries, keys, values, None, None, causal);
        let x = x + self.attended.forward(seen.swap_dims(1, 2).reshape([batch, places, width]));
        let (widen, gelu, narrow) = &self.layer;
        let inner = gelu.forward(widen.forward(self.before_layer.forward(x.clone())));
        x + narrow.forward(inner)
    }
}

const WEIGHTS: Initializer = Initializer::Normal { mean: 0.0, std: 0.02 };

fn linear(from: usize, to: usize, device: &Device) -> Linear {
    let bias = Some(Initializer::Zeros.init([to], device));
    Linear { weight: WEIGHTS.init([from, to], device), bias }
}
