//! Bytes in which elements of any type can lie.

use std::{
    fmt,
    ops::{Deref, DerefMut},
};

/// Bytes that are aligned for elements of any type.
#[derive(Clone, Default)]
pub struct Bytes {
    words: Vec<Word>,
    len: usize,
}

/// A word with the size and the alignment of the largest element.
type Word = [u64; 2];

impl Bytes {
    /// `len` zeros.
    pub fn zeroed(len: usize) -> Bytes {
        Bytes { words: vec![[0; 2]; len.div_ceil(size_of::<Word>())], len }
    }

    /// At least `len` bytes, with whatever they hold.
    pub(crate) fn grow(&mut self, len: usize) {
        if self.len < len {
            self.words.resize(len.div_ceil(size_of::<Word>()), [0; 2]);
            self.len = len;
        }
    }
}

impl From<&[u8]> for Bytes {
    fn from(bytes: &[u8]) -> Bytes {
        let mut copy = Bytes::zeroed(bytes.len());
        copy.copy_from_slice(bytes);
        copy
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }
}

impl DerefMut for Bytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.len]
    }
}

impl AsRef<[u8]> for Bytes {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl AsMut<[u8]> for Bytes {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bytes({})", self.len)
    }
}
