use std::fmt;

use xxhash_rust::xxh3::Xxh3;

use super::ParameterSpec;

/// One number for the state of a model. It is equal on all ranks as long as they have the same state.
///
/// Covers names, dtypes, shapes and the bits of every element (XXH3, 64 bits), in the order in
/// which tensors are added. It guards against mistakes, not against an adversary.
///
/// ```
/// use drumline::DType;
/// use drumline::ddp::{ParameterSpec, StateDigest};
///
/// let digest = |value: f32| {
///     let mut digest = StateDigest::default();
///     digest.tensor(&ParameterSpec::new("w", [1], DType::F32), &value.to_ne_bytes());
///     digest.finish()
/// };
/// assert_eq!(digest(1.0), digest(1.0));
/// assert_ne!(digest(0.0), digest(-0.0)); // bits, not values
/// ```
#[derive(Clone, Default)]
pub struct StateDigest {
    hash: Xxh3,
}

impl StateDigest {
    /// Adds one tensor; `bytes` are its elements, row-major.
    pub fn tensor(&mut self, spec: &ParameterSpec, bytes: &[u8]) {
        // Lengths come before contents, so that no two lists of tensors give the hash the same bytes.
        self.number(spec.name.len());
        self.hash.update(spec.name.as_bytes());
        self.hash.update(&[spec.dtype as u8]);
        self.number(spec.shape.len());
        spec.shape.iter().for_each(|&length| self.number(length));
        self.number(bytes.len());
        self.hash.update(bytes);
    }

    /// The digest of all tensors added so far.
    pub fn finish(&self) -> u64 {
        self.hash.digest()
    }

    fn number(&mut self, number: usize) {
        self.hash.update(&(number as u64).to_le_bytes());
    }
}

impl fmt::Debug for StateDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StateDigest({:016x})", self.finish())
    }
}
