use std::collections::BTreeMap;

use xxhash_rust::xxh3::Xxh3;

use super::tensor::Tensor;

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
/// # Ok::<(), drumline::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Checkpoint {
    tensors: BTreeMap<String, Tensor>,
    /// Everything else that must be kept, by name. Names that begin with `drumline.` are reserved.
    pub metadata: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Adds a tensor. Returns the tensor that had the same name before.
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

    /// The tensors whose names begin with `prefix`, each under its name without the prefix: in the
    /// section `model.`, the tensor `model.fc.bias` is called `fc.bias`.
    pub fn section<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = (&'a str, &'a Tensor)> {
        let named = self.tensors().map(move |tensor| (tensor.name().strip_prefix(prefix), tensor));
        named.filter_map(|(name, tensor)| Some((name?, tensor)))
    }

    /// XXH3-128 of all tensors and metadata: equal for equal checkpoints.
    ///
    /// It finds damage, not forgery: anyone can compute it.
    pub fn digest(&self) -> u128 {
        let mut hash = ContentHash(Xxh3::new());
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
}

/// Hashes lengths before contents, so that different contents never feed the hash the same bytes.
struct ContentHash(Xxh3);

impl ContentHash {
    fn number(&mut self, number: usize) {
        self.0.update(&(number as u64).to_le_bytes());
    }

    fn text(&mut self, text: &str) {
        self.number(text.len());
        self.0.update(text.as_bytes());
    }
}
