//! An optimizer's state as tensors named after parameters: `optimizer.fc.weight.momentum.velocity`.
//!
//! burn keeps the state by parameter id, and ids differ from process to process.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use burn::{
    module::{Module, ModuleVisitor, Param},
    optim::{ModuleOptimizer, OptimizerRecord},
    tensor::{Bytes, DType, Tensor},
};
use burn_pack::{Reader, Scalar, Writer};
use drumline::checkpoint::{self, Checkpoint};

const PREFIX: &str = "optimizer.";

/// Adds the state of `optimizer`, which trains `model`, to a checkpoint.
pub(crate) fn save<M: Module>(
    optimizer: &ModuleOptimizer,
    model: &M,
    checkpoint: &mut Checkpoint,
) -> Result<()> {
    let names: BTreeMap<u64, String> = parameters(model).map(|(name, id)| (id, name)).collect();
    let rename = |key: &str| -> Result<String> {
        let (id, field) = key.split_once('.').unwrap_or((key, ""));
        let name = id.parse().ok().and_then(|id: u64| names.get(&id));
        let name =
            name.with_context(|| format!("the optimizer trains {id}, the model does not"))?;
        Ok(format!("{PREFIX}{name}.{field}"))
    };
    let record = Reader::from_bytes(optimizer.into_bytes()?)?;
    for (key, scalar) in record.scalars() {
        checkpoint.insert(match *scalar {
            Scalar::UInt(value) => {
                checkpoint::Tensor::from_values(rename(key)?, [], &[value as i64])
            }
            other => bail!("{key} is {other:?}, which has no place in a checkpoint"),
        }?);
    }
    for tensor in record.into_tensors()? {
        let (key, dtype, shape, _, bytes) = tensor.into_parts()?;
        ensure!(dtype == DType::F32, "{key} is {dtype:?}, which has no place in a checkpoint");
        checkpoint.insert(checkpoint::Tensor::new(
            rename(&key)?,
            drumline::DType::F32,
            shape.to_vec(),
            bytes.to_vec(),
        )?);
    }
    Ok(())
}

/// Gives `optimizer`, which trains `model`, the state in a checkpoint.
pub(crate) fn load<M: Module>(
    optimizer: ModuleOptimizer,
    model: &M,
    checkpoint: &Checkpoint,
) -> Result<ModuleOptimizer> {
    let ids: BTreeMap<String, u64> = parameters(model).collect();
    let mut tensors = Vec::new();
    let mut scalars = Vec::new();
    for tensor in checkpoint.tensors() {
        let Some(key) = tensor.name().strip_prefix(PREFIX) else { continue };
        // The names of parameters and of fields may contain dots, so look for the dot that ends a known
        // parameter.
        let (id, field) = key
            .match_indices('.')
            .find_map(|(dot, _)| Some((*ids.get(&key[..dot])?, &key[dot + 1..])))
            .with_context(|| format!("{} belongs to no parameter of the model", tensor.name()))?;
        let key = format!("{id}.{field}");
        match tensor.dtype() {
            drumline::DType::I64 => {
                let value = tensor.values::<i64>()?;
                let [value] = value[..] else { bail!("{} is no scalar", tensor.name()) };
                scalars.push((key, Scalar::UInt(value as u64)));
            }
            drumline::DType::F32 => tensors.push(burn_pack::Tensor::new(
                key,
                DType::F32,
                tensor.shape().to_vec(),
                Some(id),
                Bytes::from_bytes_vec(tensor.bytes().to_vec()),
            )),
            other => bail!("{} is {other}, which no optimizer has", tensor.name()),
        }
    }
    let writer = Writer::new(tensors);
    let writer = scalars.into_iter().fold(writer, |w, (key, value)| w.with_scalar(&key, value));
    let optimizer = optimizer.load_record(OptimizerRecord::from_bytes(writer.into_bytes()?)?);

    // burn ignores values that it does not know, so check that all were loaded.
    let mut loaded = Checkpoint::default();
    save(&optimizer, model, &mut loaded)?;
    for tensor in checkpoint.tensors().filter(|tensor| tensor.name().starts_with(PREFIX)) {
        ensure!(
            loaded.tensor(tensor.name()) == Some(tensor),
            "this optimizer has no use for {}",
            tensor.name()
        );
    }
    Ok(optimizer)
}

/// The paths and ids of the floating-point parameters.
fn parameters<M: Module>(model: &M) -> impl Iterator<Item = (String, u64)> {
    #[derive(Default)]
    struct Parameters {
        path: Vec<String>,
        found: Vec<(String, u64)>,
    }

    impl ModuleVisitor for Parameters {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.found.push((self.path.join("."), param.id.val()));
        }

        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.path.push(name.to_owned());
        }

        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.path.pop();
        }
    }

    let mut parameters = Parameters::default();
    model.visit(&mut parameters);
    parameters.found.into_iter()
}
