//! A whole training in a checkpoint: model, optimizer and the place in the data.

use candle_nn::{Optimizer, SGD, VarMap};
use drumline::{
    checkpoint::{Checkpoint, Tensor},
    sampler::DistributedSampler,
};

use crate::{
    Result,
    failure::{self, OrFail},
    host,
    variables::{carried, sorted},
};

const MODEL: &str = "model.";
pub(crate) const OPTIMIZER: &str = "optimizer.";
const SAMPLER: &str = "sampler";

/// An optimizer whose state a checkpoint can hold: [`AdamW`](crate::AdamW), and candle's `SGD`, which has none.
///
/// `candle_nn::AdamW` keeps its moments to itself, so it has no place here.
#[diagnostic::on_unimplemented(
    message = "the state of `{Self}` cannot be saved",
    note = "use `drumline_candle::AdamW`, which gives the same bits as candle's"
)]
pub trait Resumable: Optimizer {
    /// Adds the state to a checkpoint, as tensors whose names begin with `prefix`. `varmap` has the names of the
    /// variables.
    ///
    /// # Errors
    ///
    /// The optimizer has a variable that `varmap` does not have, or its state cannot be read.
    fn save(&self, prefix: &str, varmap: &VarMap, checkpoint: &mut Checkpoint) -> Result<()>;

    /// Takes the state from a checkpoint: the reverse of [`save`](Self::save).
    ///
    /// # Errors
    ///
    /// The tensors with that prefix are not exactly those of this optimizer. Then nothing was loaded.
    fn load(&mut self, prefix: &str, varmap: &VarMap, checkpoint: &Checkpoint) -> Result<()>;
}

/// candle's SGD has no state but its learning rate, which the program sets.
impl Resumable for SGD {
    fn save(&self, _: &str, _: &VarMap, _: &mut Checkpoint) -> Result<()> {
        Ok(())
    }

    fn load(&mut self, prefix: &str, _: &VarMap, checkpoint: &Checkpoint) -> Result<()> {
        Ok(checkpoint.check(prefix, [])?)
    }
}

/// A whole training: the variables of the model, the state of the optimizer, and the place in the data.
///
/// The variables are called `model.` and their name. For other tools, the file is one of safetensors. Call
/// [`sync_buffers`](crate::DataParallel::sync_buffers) before, if the model has buffers.
///
/// ```
/// use anyhow::Result;
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, VarBuilder, VarMap, linear};
/// use drumline::{ProcessGroup, checkpoint::CheckpointDirectory, sampler::DistributedSampler};
/// use drumline_candle::{AdamW, DataParallel, checkpoint, resume};
///
/// fn train(group: &ProcessGroup, out: &CheckpointDirectory, stop: usize) -> Result<f32> {
///     let varmap = VarMap::new();
///     let model = linear(1, 1, VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu))?;
///     let mut ddp = DataParallel::wrap(&varmap, group)?;
///     let mut optimizer = AdamW::new_lr(varmap.all_vars(), 0.1)?;
///     let mut sampler =
///         DistributedSampler::builder(100, group.world_size(), group.rank()).build()?;
///     out.prepare_on_root(group)?; // can anything be saved there?
///     let mut step = 0;
///     if let Some(found) = out.newest_on_root(group)? {
///         resume(&found.checkpoint, &varmap, &mut optimizer, &mut sampler)?;
///         step = found.step;
///     }
///     let indices: Vec<usize> = sampler.iter().collect();
///     for batch in indices.chunks(4).take(stop) {
///         let batch: Vec<f32> = batch.iter().map(|&sample| sample as f32 / 100.0).collect();
///         let input = Tensor::from_slice(&batch, (batch.len(), 1), &Device::Cpu)?;
///         let loss = (model.forward(&input)? - &input)?.sqr()?.mean_all()?;
///         ddp.backward_step(&mut optimizer, &loss)?;
///         sampler.advance(batch.len());
///         step += 1;
///         out.save_on_root(group, step, || checkpoint(&varmap, &optimizer, &sampler))?;
///     }
///     Ok(model.weight().flatten_all()?.to_vec1::<f32>()?[0])
/// }
///
/// # fn main() -> Result<()> {
/// # let temporary = tempfile::tempdir().unwrap();
/// let group = ProcessGroup::alone();
/// let out = CheckpointDirectory::new(temporary.path().join("parts"));
/// train(&group, &out, 3)?; // stopped after three steps
/// # let whole = CheckpointDirectory::new(temporary.path().join("whole"));
/// # whole.prepare()?;
/// # whole.save(3, &out.newest()?.unwrap().checkpoint)?;
/// train(&group, &out, 1)?;
/// let end = train(&group, &out, usize::MAX)?;
/// # assert_eq!(out.newest()?.unwrap().step, 25);
/// # assert_eq!(end, train(&group, &whole, usize::MAX)?);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// A variable cannot be read, or the optimizer has one that `varmap` does not have.
pub fn checkpoint(
    varmap: &VarMap,
    optimizer: &impl Resumable,
    sampler: &DistributedSampler,
) -> Result<Checkpoint> {
    let mut checkpoint = Checkpoint::default();
    optimizer.save(OPTIMIZER, varmap, &mut checkpoint)?;
    add_the_rest(varmap, sampler, &mut checkpoint)?;
    Ok(checkpoint)
}

/// Adds all but the optimizer.
pub(crate) fn add_the_rest(
    varmap: &VarMap,
    sampler: &DistributedSampler,
    checkpoint: &mut Checkpoint,
) -> Result<()> {
    save_variables(varmap, checkpoint)?;
    checkpoint.metadata.insert(SAMPLER.into(), sampler.state().to_string());
    Ok(())
}

/// Goes on from a checkpoint that [`checkpoint`] has made: the training ends with the same bits as one that was
/// never interrupted.
///
/// Make `varmap`, `optimizer` and `sampler` as they were. The order of this call and of
/// [`wrap`](crate::DataParallel::wrap) does not matter, if every rank resumes from the same checkpoint:
/// [`newest_on_root`](drumline::checkpoint::CheckpointDirectory::newest_on_root) gives it to all ranks.
///
/// What draws random numbers, such as candle's dropout, gives other bits: candle's generator on the CPU cannot be
/// seeded or saved.
///
/// # Errors
///
/// The checkpoint is of another model, optimizer or data set. The error names the first difference, and nothing was
/// loaded.
pub fn resume(
    checkpoint: &Checkpoint,
    varmap: &VarMap,
    optimizer: &mut impl Resumable,
    sampler: &mut DistributedSampler,
) -> Result<()> {
    let state = checkpoint.metadata.get(SAMPLER);
    let state = state.ok_or_else(|| failure::checkpoint("has no state of a sampler"))?;
    let mut resumed = sampler.clone();
    resumed.resume(&state.parse()?)?;
    check_variables(checkpoint, varmap)?;
    optimizer.load(OPTIMIZER, varmap, checkpoint)?;
    load_variables(checkpoint, varmap)?;
    *sampler = resumed;
    Ok(())
}

/// Adds the variables of `varmap` to a checkpoint, as `model.` and their names: for programs that keep more, or less,
/// than [`checkpoint`] does.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_nn::{VarBuilder, VarMap, linear};
/// use drumline::checkpoint::Checkpoint;
/// use drumline_candle::{load_variables, save_variables, variables_digest};
///
/// fn new() -> candle_core::Result<VarMap> {
///     let varmap = VarMap::new();
///     linear(3, 2, VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu))?; // random
///     Ok(varmap)
/// }
/// let (one, other) = (new()?, new()?);
/// let mut checkpoint = Checkpoint::default();
/// save_variables(&one, &mut checkpoint)?;
/// assert_eq!(checkpoint.tensor("model.weight").unwrap().shape(), [2, 3]);
/// load_variables(&checkpoint, &other)?;
/// assert_eq!(variables_digest(&one)?, variables_digest(&other)?);
/// # Ok::<_, anyhow::Error>(())
/// ```
///
/// # Errors
///
/// A variable has a type that drumline does not carry, or cannot be read from its device.
pub fn save_variables(varmap: &VarMap, checkpoint: &mut Checkpoint) -> Result<()> {
    for variable in sorted(varmap) {
        let spec = carried(&variable)?;
        let bytes = host::to_bytes(&variable.var).or_fail()?;
        let name = format!("{MODEL}{}", spec.name);
        checkpoint.insert(Tensor::new(name, spec.dtype, spec.shape, bytes)?);
    }
    Ok(())
}

/// Sets the variables of `varmap` to those of a checkpoint: the reverse of [`save_variables`].
///
/// # Errors
///
/// The variables in the checkpoint are not exactly those of `varmap`, with the same shapes and types. Then nothing was
/// loaded.
pub fn load_variables(checkpoint: &Checkpoint, varmap: &VarMap) -> Result<()> {
    check_variables(checkpoint, varmap)?;
    for variable in sorted(varmap) {
        if let Some(saved) = checkpoint.tensor(&format!("{MODEL}{}", variable.name)) {
            let values = host::from_bytes(saved.bytes(), &variable.var).or_fail()?;
            variable.var.set(&values).or_fail()?;
        }
    }
    Ok(())
}

fn check_variables(checkpoint: &Checkpoint, varmap: &VarMap) -> Result<()> {
    let wanted = sorted(varmap).iter().map(carried).collect::<Result<Vec<_>>>()?;
    Ok(checkpoint.check(MODEL, wanted)?)
}
