//! What training needs to go on after a stop, so that it ends as if it had never stopped.
//!
//! A [`Checkpoint`] is a set of named tensors and a few lines of text. Its file is a
//! [safetensors] file, which many tools can open. It is never half-written, because it has another
//! name until it is complete, and never silently damaged, because a digest of everything in it is
//! kept in its metadata. A [`CheckpointDirectory`] keeps the last ones.
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
//! fn train(group: &ProcessGroup, out: &CheckpointDirectory, stop: usize) -> drumline::train::Result<f32> {
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
//!             Ok::<_, drumline::train::Error>(checkpoint)
//!         })?;
//!     }
//!     Ok(weight)
//! }
//!
//! # fn main() -> drumline::train::Result<()> {
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

mod directory;
mod disk;
mod format;
mod misfit;
mod on_root;
mod replace;
mod tensor;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    io::{self, Read, Write},
    path::Path,
};

use self::disk::{Disk, SystemDisk};
pub use self::{
    directory::{CheckpointDirectory, Found, Skipped},
    misfit::Misfit,
    tensor::Tensor,
};
use crate::{Error, Result};

/// Named tensors and lines of text.
///
/// ```
/// use drumline::checkpoint::{Checkpoint, Tensor};
///
/// let mut checkpoint = Checkpoint::default();
/// checkpoint.insert(Tensor::from_values("model.bias", [2], &[0.5_f32, -1.0])?);
/// checkpoint.metadata.insert("epoch".into(), "3".into());
///
/// let path = std::env::temp_dir().join(format!("drumline-doc-{}", std::process::id()));
/// checkpoint.write(&path)?;
/// let read = Checkpoint::read(&path)?;
/// assert_eq!(read.digest(), checkpoint.digest());
/// let (name, bias) = read.section("model.").next().expect("one tensor");
/// assert_eq!((name, bias.shape(), bias.values::<f32>()?), ("bias", &[2][..], vec![0.5, -1.0]));
/// # std::fs::remove_file(&path).expect("it was written");
/// # Ok::<(), drumline::train::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Checkpoint {
    tensors: BTreeMap<String, Tensor>,
    /// Whatever else must be kept, by name. Names that begin with `drumline.` are reserved.
    pub metadata: BTreeMap<String, String>,
}

/// Names in a file's metadata that are not the user's begin with this.
const RESERVED: &str = "drumline.";
/// Holds [`Checkpoint::digest`], in hexadecimal.
const DIGEST_KEY: &str = "drumline.digest";
/// Holds [`FORMAT`].
const FORMAT_KEY: &str = "drumline.format";
/// Counts the changes that older versions of this crate cannot read.
const FORMAT: u32 = 1;

impl Checkpoint {
    /// Adds a tensor, and returns the one that had its name.
    pub fn insert(&mut self, tensor: Tensor) -> Option<Tensor> {
        self.tensors.insert(tensor.name().to_owned(), tensor)
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)
    }

    /// All tensors, sorted by name.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &Tensor> {
        self.tensors.values()
    }

    /// The tensors whose names begin with `prefix`, and the rest of those names: with the prefix
    /// `model.`, the tensor `model.fc.bias` is `fc.bias`.
    pub fn section<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = (&'a str, &'a Tensor)> {
        let named = self.tensors().map(move |tensor| (tensor.name().strip_prefix(prefix), tensor));
        named.filter_map(|(name, tensor)| Some((name?, tensor)))
    }

    /// XXH3-128 over everything in it: equal for equal checkpoints.
    ///
    /// It finds damage, not forgery: anyone can compute it.
    pub fn digest(&self) -> u128 {
        let mut hash = Hash(xxhash_rust::xxh3::Xxh3::new());
        hash.number(self.metadata.len());
        for (key, value) in &self.metadata {
            hash.text(key);
            hash.text(value);
        }
        hash.number(self.tensors.len());
        for tensor in self.tensors() {
            hash.text(tensor.name());
            hash.text(tensor.dtype().name());
            hash.number(tensor.shape().len());
            tensor.shape().iter().for_each(|&length| hash.number(length));
            hash.0.update(tensor.bytes());
        }
        hash.0.digest128()
    }

    /// Writes it to `path`, replacing what was there only when all of it is on the disk.
    ///
    /// Equal checkpoints make equal files. Until it is complete the file has a name that begins
    /// with a dot and ends with `.partial`; a process that is killed may leave that behind, and the
    /// next write to `path` deletes it. For more than one file see [`CheckpointDirectory`].
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] when a file cannot be written there, or when the metadata uses a
    /// reserved name. `path` is then as it was.
    pub fn write(&self, path: &Path) -> Result<()> {
        if let Ok((directory, name)) = replace::split(path) {
            replace::remove_leftovers(&SystemDisk, directory, &format!("{}.", name.display()));
        }
        self.write_on(&SystemDisk, path)
    }

    /// Reads the file that [`Checkpoint::write`] wrote.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] when there is no such file, or when it is cut short, damaged, or of
    /// another origin. Nothing is allocated beyond what the file's own size justifies.
    pub fn read(path: &Path) -> Result<Self> {
        Self::read_on(&SystemDisk, path).map_err(|refusal| refusal.into_error(path))
    }

    fn write_on(&self, disk: &impl Disk, path: &Path) -> Result<()> {
        let fail = |problem| Error::Checkpoint { path: path.to_owned(), problem };
        let (header, tensors) = self.to_parts().map_err(fail)?;
        replace::atomically(disk, path, |file| {
            file.write_all(&header)?;
            tensors.iter().try_for_each(|tensor| file.write_all(tensor.bytes()))
        })
        .map_err(|error| fail(format!("cannot be written: {}", why_not_written(&error))))
    }

    fn read_on(disk: &impl Disk, path: &Path) -> Result<Self, Refusal> {
        let (mut file, length) = disk.open(path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Refusal::Missing,
            _ => Refusal::Unusable(format!("cannot be read: {error}")),
        })?;
        Self::parse(&mut file, length)
    }

    /// The file's header, and the tensors in the order in which they follow. The error says what
    /// is wrong.
    fn to_parts(&self) -> Result<(Vec<u8>, Vec<&Tensor>), String> {
        if let Some(name) = self.metadata.keys().find(|name| name.starts_with(RESERVED)) {
            return Err(format!("the metadata uses the reserved name {name}"));
        }
        let mut metadata = self.metadata.clone();
        metadata.insert(DIGEST_KEY.into(), format!("{:032x}", self.digest()));
        metadata.insert(FORMAT_KEY.into(), FORMAT.to_string());
        let tensors = format::file_order(self.tensors());
        Ok((format::header(&tensors, &metadata)?, tensors))
    }

    /// Reads `length` bytes that [`Checkpoint::write`] wrote.
    fn parse(input: &mut impl Read, length: u64) -> Result<Self, Refusal> {
        let header = format::parse_header(input, length).map_err(Refusal::Unusable)?;
        let mut metadata = header.metadata;
        let mut reserved = |key: &str| {
            metadata.remove(key).ok_or_else(|| {
                let problem =
                    format!("it has no {key} in its metadata, so Drumline did not write it");
                Refusal::Unusable(problem)
            })
        };
        let (format, recorded) = (reserved(FORMAT_KEY)?, reserved(DIGEST_KEY)?);
        if format.parse().is_ok_and(|format: u32| format > FORMAT) {
            return Err(Refusal::Newer(format));
        }
        let mut checkpoint = Checkpoint { metadata, ..Default::default() };
        for entry in header.entries {
            checkpoint.insert(entry.read_tensor(input).map_err(Refusal::Unusable)?);
        }
        let digest = format!("{:032x}", checkpoint.digest());
        if recorded != digest {
            return Err(Refusal::Unusable(format!(
                "it is damaged: its content has digest {digest}, but {recorded} was written"
            )));
        }
        // The digest does not see how the header is written down; but there is only one way.
        if checkpoint.to_parts().is_ok_and(|(bytes, _)| bytes == header.bytes) {
            return Ok(checkpoint);
        }
        Err(Refusal::Unusable("it is damaged: its header is not as it was written".into()))
    }
}

/// Why a file is no checkpoint to go on from.
#[derive(Debug)]
enum Refusal {
    /// It is not there.
    Missing,
    /// It has this format, which a later version of this crate has made up.
    Newer(String),
    /// It cannot be read, is damaged, or something else altogether.
    Unusable(String),
}

impl Refusal {
    /// What is wrong, and what to do.
    fn problem(self) -> String {
        match self {
            Refusal::Missing => {
                "there is no such file; check the path, or start without a checkpoint".into()
            }
            Refusal::Newer(format) => format!(
                "it has format {format}, this program reads up to {FORMAT}; resume with the newer \
                 program that wrote it, or delete it"
            ),
            Refusal::Unusable(problem) => {
                format!("{problem}; delete it or resume from an earlier one")
            }
        }
    }

    fn into_error(self, path: &Path) -> Error {
        Error::Checkpoint { path: path.to_owned(), problem: self.problem() }
    }
}

/// What the system said, and what to do about it.
fn why_not_written(error: &io::Error) -> String {
    let advice = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; free some space there, or keep fewer checkpoints"
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "; choose a directory that this user may write to"
        }
        io::ErrorKind::NotFound => "; make the directory first",
        io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
            "; choose a path that is not taken by a file"
        }
        _ => "",
    };
    format!("{error}{advice}")
}

/// Feeds a digest so that different contents give different bytes.
struct Hash(xxhash_rust::xxh3::Xxh3);

impl Hash {
    fn number(&mut self, number: usize) {
        self.0.update(&(number as u64).to_le_bytes());
    }

    fn text(&mut self, text: &str) {
        self.number(text.len());
        self.0.update(text.as_bytes());
    }
}
