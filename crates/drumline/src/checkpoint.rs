//! What training needs to go on after a stop, in one file.
//!
//! A [`Checkpoint`] is a set of named tensors and a few lines of text. Its file is a
//! [safetensors] file, which many tools can open. It is never half-written, because it is put under
//! another name until it is complete, and never silently damaged, because a digest of everything
//! in it is kept in its metadata.
//!
//! ```
//! use drumline::checkpoint::{Checkpoint, Tensor};
//!
//! # fn main() -> drumline::Result<()> {
//! # let directory = tempfile::tempdir().unwrap();
//! # let path = directory.path().join("checkpoint.safetensors");
//! let mut checkpoint = Checkpoint::default();
//! checkpoint.insert(Tensor::from_values("fc.bias", &[3], &[0.5_f32, -1.0, 2.0])?);
//! checkpoint.metadata.insert("epoch".into(), "3".into());
//! checkpoint.write(&path)?;
//!
//! let same = Checkpoint::read(&path)?;
//! assert_eq!(same.tensor("fc.bias").unwrap().values::<f32>()?, [0.5, -1.0, 2.0]);
//! assert_eq!(same.metadata["epoch"], "3");
//! # Ok(())
//! # }
//! ```
//!
//! [safetensors]: https://huggingface.co/docs/safetensors

mod format;
mod on_root;
mod replace;
mod tensor;

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, BufReader, BufWriter, Read, Write},
    path::Path,
};

pub use self::tensor::Tensor;
use crate::{Error, Result};

/// Named tensors and lines of text.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Checkpoint {
    tensors: BTreeMap<String, Tensor>,
    /// Whatever else must be kept, by name. `drumline.digest` is reserved.
    pub metadata: BTreeMap<String, String>,
}

/// The entry of a file's metadata that holds [`Checkpoint::digest`], in hexadecimal.
const DIGEST_KEY: &str = "drumline.digest";

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

    /// XXH3-64 over everything in it: equal for equal checkpoints.
    ///
    /// It finds damage, not forgery: anyone can compute it.
    pub fn digest(&self) -> u64 {
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
        hash.0.digest()
    }

    /// Writes it to `path`, replacing what was there only when all of it is on the disk.
    ///
    /// Equal checkpoints make equal files. Until it is complete the file is called
    /// `.NAME.partial`; a process that is killed may leave that behind, and the next write
    /// overwrites it.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] when a file cannot be written there, or when the metadata uses the
    /// reserved name. `path` is then as it was.
    pub fn write(&self, path: &Path) -> Result<()> {
        let fail = |problem| Error::Checkpoint { path: path.to_owned(), problem };
        let (header, tensors) = self.to_parts().map_err(fail)?;
        replace::atomically(path, |file| {
            let mut file = BufWriter::with_capacity(1 << 20, file);
            file.write_all(&header)?;
            for tensor in tensors {
                file.write_all(tensor.bytes())?;
            }
            file.flush()
        })
        .map_err(|error| fail(format!("cannot be written: {error}")))
    }

    /// Reads the file that [`Checkpoint::write`] wrote.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] when there is no such file, or when it is cut short, damaged, or of
    /// another origin. Nothing is allocated beyond what the file's own size justifies.
    pub fn read(path: &Path) -> Result<Self> {
        let fail = |problem| Error::Checkpoint { path: path.to_owned(), problem };
        let unreadable = |error: io::Error| {
            fail(match error.kind() {
                io::ErrorKind::NotFound => {
                    "there is no such file; check the path, or start without a checkpoint".into()
                }
                _ => format!("cannot be read: {error}"),
            })
        };
        let file = File::open(path).map_err(unreadable)?;
        let about = file.metadata().map_err(unreadable)?;
        if !about.is_file() {
            return Err(fail("is not a file".into()));
        }
        Self::parse(&mut BufReader::new(file), about.len())
            .map_err(|problem| fail(format!("{problem}; delete it or resume from an earlier one")))
    }

    /// The file's header, and the tensors in the order in which they follow. The error says what
    /// is wrong.
    fn to_parts(&self) -> Result<(Vec<u8>, Vec<&Tensor>), String> {
        let mut metadata = self.metadata.clone();
        let digest = format!("{:016x}", self.digest());
        if metadata.insert(DIGEST_KEY.into(), digest).is_some() {
            return Err(format!("the metadata uses the reserved name {DIGEST_KEY}"));
        }
        let tensors = format::file_order(self.tensors());
        Ok((format::header(&tensors, &metadata)?, tensors))
    }

    /// Reads `length` bytes that [`Checkpoint::write`] wrote. The error says what is wrong.
    fn parse(input: &mut impl Read, length: u64) -> Result<Self, String> {
        let (entries, metadata) = format::parse_header(input, length)?;
        let mut checkpoint = Checkpoint { metadata, ..Default::default() };
        for entry in entries {
            checkpoint.insert(entry.read_tensor(input)?);
        }
        let Some(recorded) = checkpoint.metadata.remove(DIGEST_KEY) else {
            return Err(format!(
                "it has no {DIGEST_KEY} in its metadata, so Drumline did not write it"
            ));
        };
        let digest = format!("{:016x}", checkpoint.digest());
        if recorded != digest {
            return Err(format!(
                "it is damaged: its content has digest {digest}, but {recorded} was written"
            ));
        }
        Ok(checkpoint)
    }
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
