//! The model under torch's names and in torch's layouts, as safetensors.

use anyhow::{Context, Result};
use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::{Device, Int, Tensor, TensorData},
};
use drumline::checkpoint::{self, Checkpoint};

use crate::model::Gpt;

/// What `load_state_dict` of the same model in torch takes, and the alphabet.
pub(crate) fn to_torch(model: &Gpt, alphabet: &[char]) -> Result<Checkpoint> {
    let mut names = TorchNames::default();
    model.valid().visit(&mut names);
    let mut checkpoint = Checkpoint::default();
    checkpoint.metadata.insert("alphabet".into(), alphabet.iter().collect());
    for (name, tensor) in names.tensors {
        checkpoint.insert(from_data(&name, tensor)?);
    }
    Ok(checkpoint)
}

/// What the model says to one window, so that it can be compared elsewhere: `characters` and `scores`.
pub(crate) fn scores_of(model: &Gpt, window: &[i32]) -> Result<Checkpoint> {
    let characters = TensorData::new(window.to_vec(), [1, window.len()]);
    let input = Tensor::<2, Int>::from_data(characters, &Device::flex());
    let scores = model.valid().forward(input);
    let mut checkpoint = Checkpoint::default();
    let characters: Vec<i64> = window.iter().copied().map(i64::from).collect();
    checkpoint.insert(checkpoint::Tensor::from_values(
        "characters",
        [1, window.len()],
        &characters,
    )?);
    checkpoint.insert(from_data("scores", scores.into_data())?);
    Ok(checkpoint)
}

fn from_data(name: &str, data: TensorData) -> Result<checkpoint::Tensor> {
    let values = data.try_to_vec::<f32>().with_context(|| format!("{name} is not of f32"))?;
    Ok(checkpoint::Tensor::from_values(name, data.shape().to_vec(), &values)?)
}

#[derive(Default)]
struct TorchNames {
    /// The fields that lead to the current one, and the type that each is a field of.
    path: Vec<(String, String)>,
    tensors: Vec<(String, TensorData)>,
}

impl ModuleVisitor for TorchNames {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let mut names: Vec<&str> = self.path.iter().map(|(name, _)| &name[..]).collect();
        let mut tensor = param.val();
        match self.path.last().map(|(name, layer)| (&layer[..], &name[..])) {
            // burn's are [inputs, outputs], torch's are [outputs, inputs].
            Some(("Struct:Linear", "weight")) => tensor = tensor.transpose(),
            Some(("Struct:LayerNorm", "gamma")) => names[self.path.len() - 1] = "weight",
            Some(("Struct:LayerNorm", "beta")) => names[self.path.len() - 1] = "bias",
            _ => {}
        }
        self.tensors.push((names.join("."), tensor.into_data()));
    }

    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.path.push((name.to_owned(), container_type.to_owned()));
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
}
