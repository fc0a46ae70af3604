//! The map behind every store: what set, add and compare-and-set do, said once.

use std::collections::BTreeMap;

/// Keys and values, without waiting and without threads.
#[derive(Debug, Default)]
pub(super) struct Values(BTreeMap<Vec<u8>, Vec<u8>>);

/// Why a number could not be added to a value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum AddError {
    #[error("the present value {0:?} is not a decimal number")]
    NotANumber(String),
    #[error("{0} + {1} does not fit into 64 bits")]
    Overflow(i64, i64),
}

impl Values {
    pub(super) fn get(&self, key: &[u8]) -> Option<&[u8]> {
        self.0.get(key).map(Vec::as_slice)
    }

    pub(super) fn contains(&self, key: &[u8]) -> bool {
        self.0.contains_key(key)
    }

    pub(super) fn set(&mut self, key: &[u8], value: &[u8]) {
        self.0.insert(key.to_vec(), value.to_vec());
    }

    /// Puts `value` behind the present one and returns the new length.
    pub(super) fn append(&mut self, key: &[u8], value: &[u8]) -> usize {
        let whole = self.0.entry(key.to_vec()).or_default();
        whole.extend_from_slice(value);
        whole.len()
    }

    /// Numbers are kept as decimal text, so that a `get` shows them.
    pub(super) fn add(&mut self, key: &[u8], amount: i64) -> Result<i64, AddError> {
        let present = self.get(key).map_or(Ok(0), parse_number)?;
        let sum = present.checked_add(amount).ok_or(AddError::Overflow(present, amount))?;
        self.set(key, sum.to_string().as_bytes());
        Ok(sum)
    }

    /// Returns the value afterwards, or `expected` where an absent key was left absent.
    pub(super) fn compare_set(&mut self, key: &[u8], expected: &[u8], desired: &[u8]) -> Vec<u8> {
        match self.get(key) {
            None if !expected.is_empty() => expected.to_vec(),
            Some(present) if present != expected => present.to_vec(),
            _ => {
                self.set(key, desired);
                desired.to_vec()
            }
        }
    }

    /// Whether the key was there.
    pub(super) fn delete(&mut self, key: &[u8]) -> bool {
        self.0.remove(key).is_some()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &[u8]> {
        self.0.keys().map(Vec::as_slice)
    }
}

/// Reads a value that [`Values::add`] accepts.
pub(super) fn parse_number(value: &[u8]) -> Result<i64, AddError> {
    str::from_utf8(value).ok().and_then(|text| text.parse().ok()).ok_or_else(|| {
        let shown = String::from_utf8_lossy(value).chars().take(40).collect();
        AddError::NotANumber(shown)
    })
}
