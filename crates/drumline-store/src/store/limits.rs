//! The limits for keys, values and requests. All stores have the same, so a program that works with one store
//! works with all.

pub(super) use super::tcp::protocol::{
    KEY_BYTES_MAX, KEYS_PER_REQUEST_MAX, REQUEST_BYTES_MAX, VALUE_BYTES_MAX,
};
use crate::{Error, Result};

/// `key` as stores hold it: with a `/` in front, as in torch. A key without a `/` is internal.
pub(super) fn raw_key(operation: &'static str, key: &str) -> Result<String> {
    if key.len() >= KEY_BYTES_MAX {
        let problem = format!("a key of {} bytes exceeds {}", key.len(), KEY_BYTES_MAX - 1);
        return Err(Error::argument(operation, problem));
    }
    Ok(format!("/{key}"))
}

/// [`raw_key`] for a list.
pub(super) fn raw_keys(operation: &'static str, keys: &[&str]) -> Result<Vec<String>> {
    check_size(operation, keys.len(), keys.iter().map(|key| 9 + key.len()).sum())?;
    keys.iter().map(|key| raw_key(operation, key)).collect()
}

/// [`raw_keys`] with values.
pub(super) fn raw_pairs<'v>(
    operation: &'static str,
    pairs: &[(&str, &'v [u8])],
) -> Result<Vec<(String, &'v [u8])>> {
    let bytes = pairs.iter().map(|(key, value)| 17 + key.len() + value.len()).sum();
    check_size(operation, pairs.len(), bytes)?;
    let pair = |&(key, value): &(&str, &'v [u8])| {
        check_value(operation, value)?;
        Ok((raw_key(operation, key)?, value))
    };
    pairs.iter().map(pair).collect()
}

pub(super) fn check_value(operation: &'static str, value: &[u8]) -> Result<()> {
    if value.len() > VALUE_BYTES_MAX {
        let problem = format!("a value of {} bytes exceeds {VALUE_BYTES_MAX}", value.len());
        return Err(Error::argument(operation, problem));
    }
    Ok(())
}

/// The world size of a barrier. A barrier of no callers has no meaning.
pub(super) fn check_world_size(world_size: usize) -> Result<i64> {
    i64::try_from(world_size).ok().filter(|&size| size > 0).ok_or_else(|| {
        Error::argument("barrier", format!("a world size of {world_size}; it must be at least 1"))
    })
}

/// Checks a call with `items` items, which take `bytes` bytes together, with their lengths.
fn check_size(operation: &'static str, items: usize, bytes: usize) -> Result<()> {
    // The opcode and the count.
    let bytes = 9 + bytes;
    let problem = if items > KEYS_PER_REQUEST_MAX {
        format!("{items} keys exceed {KEYS_PER_REQUEST_MAX}")
    } else if bytes > REQUEST_BYTES_MAX {
        format!("{bytes} bytes in one call exceed {REQUEST_BYTES_MAX}")
    } else {
        return Ok(());
    };
    Err(Error::argument(operation, problem))
}

/// A raw key as the user gave it.
pub(super) fn shown(raw: &[u8]) -> String {
    String::from_utf8_lossy(raw.strip_prefix(b"/").unwrap_or(raw)).into_owned()
}
