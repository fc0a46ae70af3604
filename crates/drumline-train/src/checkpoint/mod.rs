//! Checkpoints: training that stops can go on from one, and ends as if it had never stopped.
//!
//! A [`Checkpoint`] is a set of named tensors and a few lines of text. Its file is a [safetensors]
//! file, which many tools can open. A file with the final name is always whole: until it is complete
//! it has another name. Damage is always noticed: the metadata holds a digest of the whole content. A
//! [`CheckpointDirectory`] keeps the last checkpoints.
//!
//! Training that is resumed ends with the same bits as training that was never interrupted if the
//! checkpoint holds everything that a step depends on:
//!
//! | what | how it is kept |
//! |---|---|
//! | parameters and buffers | tensors, named with a prefix: `model.fc.bias` |
//! | the optimizer: momenta, moments, counts of steps | tensors; a scalar is one without dimensions |
//! | the place in the data | the text of a [`SamplerState`](crate::sampler::SamplerState) in the metadata |
//! | random generators | [`Tensor::from_words`] |
//! | settings that must not change, notes | metadata |
//!
//! ```
//! use drumline::{
//!     ProcessGroup,
//!     checkpoint::{Checkpoint, CheckpointDirectory, Tensor},
//!     sampler::DistributedSampler,
//! };
//!
//! /// Trains one weight for one epoch; stops after a number of steps, as if the power failed.
//! fn train(group: &ProcessGroup, out: &CheckpointDirectory, stop: usize) -> drumline::Result<f32> {
//!     let (mut weight, mut momentum) = (1.0_f32, 0.0_f32);
//!     let (rank, world_size) = (group.rank(), group.world_size());
//!     let mut sampler = DistributedSampler::builder(100, world_size, rank).build()?;
//!     let mut step = 0;
//!     if let Some(found) = out.newest_on_root(group)? {
//!         let scalar = |name: &str| found.checkpoint.tensor(name).unwrap().values::<f32>();
//!         weight = scalar("model.weight")?[0];
//!         momentum = scalar("optimizer.weight.momentum")?[0];
//!         sampler.resume(&found.checkpoint.metadata["sampler"].parse()?)?;
//!         step = found.step;
//!     }
//!     out.prepare_on_root(group)?;
//!     let indices: Vec<usize> = sampler.iter().collect();
//!     for batch in indices.chunks(4).take(stop) {
//!         for sample in batch {
//!             momentum = 0.9 * momentum + 0.001 * (weight - *sample as f32);
//!             weight -= momentum;
//!         }
//!         sampler.advance(batch.len());
//!         step += 1;
//!         out.save_on_root(group, step, || {
//!             let mut checkpoint = Checkpoint::default();
//!             checkpoint.insert(Tensor::from_values("model.weight", [], &[weight])?);
//!             checkpoint.insert(Tensor::from_values("optimizer.weight.momentum", [], &[momentum])?);
//!             checkpoint.metadata.insert("sampler".into(), sampler.state().to_string());
//!             Ok::<_, drumline::Error>(checkpoint)
//!         })?;
//!     }
//!     Ok(weight)
//! }
//!
//! # fn main() -> drumline::Result<()> {
//! # let temporary = tempfile::tempdir().unwrap();
//! # let path = |name: &str| temporary.path().join(name);
//! let group = ProcessGroup::alone();
//! let whole = train(&group, &CheckpointDirectory::new(path("whole")), usize::MAX)?;
//! let parts = CheckpointDirectory::new(path("parts"));
//! train(&group, &parts, 7)?;
//! train(&group, &parts, 1)?;
//! assert_eq!(train(&group, &parts, usize::MAX)?, whole);
//! # Ok(())
//! # }
//! ```
//!
//! [safetensors]: https://huggingface.co/docs/safetensors

mod content;
mod directory;
mod disk;
mod file;
mod format;
mod lock;
mod memory;
mod misfit;
mod on_root;
mod replace;
mod share;
mod tensor;
#[cfg(test)]
mod tests;

pub use self::{
    content::Checkpoint,
    directory::{CheckpointDirectory, Found, Skipped},
    misfit::Misfit,
    tensor::Tensor,
};
