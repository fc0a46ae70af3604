//! Sets of small numbers that travel between ranks.

use std::ops::Range;

/// A set of numbers below a limit, in words of 64 bits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bitmap(Vec<u64>);

impl Bitmap {
    /// An empty set, with room for the numbers below `limit`.
    pub fn new(limit: usize) -> Bitmap {
        Bitmap(vec![0; limit.div_ceil(64)])
    }

    pub(super) fn from_words(words: &[u64]) -> Bitmap {
        Bitmap(words.to_vec())
    }

    pub(super) fn words(&self) -> &[u64] {
        &self.0
    }

    pub fn insert(&mut self, number: usize) {
        self.0[number / 64] |= 1 << (number % 64);
    }

    pub fn contains(&self, number: usize) -> bool {
        self.0[number / 64] >> (number % 64) & 1 == 1
    }

    pub fn clear(&mut self) {
        self.0.fill(0);
    }

    pub(super) fn keep_common(&mut self, other: &[u64]) {
        self.0.iter_mut().zip(other).for_each(|(word, other)| *word &= other);
    }

    /// The numbers of `range` that are not in the set.
    pub(super) fn missing(&self, range: Range<usize>) -> Vec<usize> {
        range.filter(|&number| !self.contains(number)).collect()
    }
}
