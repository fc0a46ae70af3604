//! The map behind every store: defines what each operation does to keys, values and queues.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
};

use super::limits::VALUE_BYTES_MAX;

/// Keys with values, and keys with queues. It does not wait and knows no threads.
#[derive(Debug)]
pub(super) struct Values {
    values: BTreeMap<Vec<u8>, Vec<u8>>,
    /// The queues, in a name space of their own. Never holds an empty queue.
    queues: BTreeMap<Vec<u8>, VecDeque<Vec<u8>>>,
    /// The number of bytes held, as [`footprint`] counts them.
    bytes: usize,
    bytes_max: usize,
}

/// Why something cannot be stored. Then nothing has changed.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Misfit {
    #[error("the present value {0:?} is not a decimal number")]
    NotANumber(String),
    #[error("{0} + {1} does not fit into 64 bits")]
    Overflow(i64, i64),
    #[error("the value would be longer than {VALUE_BYTES_MAX} bytes")]
    TooLong,
    #[error(
        "the store would hold more than {0} bytes, its limit; delete keys that nobody needs, or \
         open the store with a larger limit"
    )]
    Full(usize),
}

impl fmt::Debug for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The size of a map's node without its bytes. It counts, so that many empty values are not free.
const OVERHEAD_BYTES: usize = 64;

fn footprint(key: &[u8], value: &[u8]) -> usize {
    OVERHEAD_BYTES + key.len() + value.len()
}

impl Values {
    /// An empty map that holds at most `bytes_max` bytes.
    pub(super) fn new(bytes_max: usize) -> Values {
        Values { values: BTreeMap::new(), queues: BTreeMap::new(), bytes: 0, bytes_max }
    }

    pub(super) fn get(&self, key: &[u8]) -> Option<&[u8]> {
        self.values.get(key).map(Vec::as_slice)
    }

    /// Whether `key` has a value, or a queue that is not empty.
    pub(super) fn is_present(&self, key: &[u8]) -> bool {
        self.values.contains_key(key) || self.queues.contains_key(key)
    }

    pub(super) fn set(&mut self, key: &[u8], value: &[u8]) -> Result<(), Misfit> {
        self.check_room(key, value)?;
        self.put(key, value);
        Ok(())
    }

    /// [`Values::set`] without a limit.
    pub(super) fn put(&mut self, key: &[u8], value: &[u8]) {
        self.delete(key);
        self.bytes += footprint(key, value);
        self.values.insert(key.to_vec(), value.to_vec());
    }

    /// Checks that there is room for `value` in place of the present value of `key`.
    pub(super) fn check_room(&self, key: &[u8], value: &[u8]) -> Result<(), Misfit> {
        let freed = self.get(key).map_or(0, |present| footprint(key, present));
        self.check_bytes(self.bytes - freed + footprint(key, value))
    }

    /// Checks that there is room for another item `value` in the queue `key`.
    pub(super) fn check_room_in_queue(&self, key: &[u8], value: &[u8]) -> Result<(), Misfit> {
        self.check_bytes(self.bytes + footprint(key, value))
    }

    fn check_bytes(&self, bytes: usize) -> Result<(), Misfit> {
        if bytes > self.bytes_max { Err(Misfit::Full(self.bytes_max)) } else { Ok(()) }
    }

    /// Appends `value` to the present value.
    pub(super) fn append(&mut self, key: &[u8], value: &[u8]) -> Result<(), Misfit> {
        let present = self.get(key).unwrap_or_default().len();
        if present + value.len() > VALUE_BYTES_MAX {
            return Err(Misfit::TooLong);
        }
        let is_new = !self.values.contains_key(key);
        let added = if is_new { footprint(key, value) } else { value.len() };
        self.check_bytes(self.bytes + added)?;
        self.bytes += added;
        self.values.entry(key.to_vec()).or_default().extend_from_slice(value);
        Ok(())
    }

    /// Adds `amount` to a number. Numbers are kept as decimal text, so that a `get` shows them.
    pub(super) fn add(&mut self, key: &[u8], amount: i64) -> Result<i64, Misfit> {
        let sum = self.sum(key, amount)?;
        self.set(key, sum.to_string().as_bytes())?;
        Ok(sum)
    }

    /// The sum that [`Values::add`] would store.
    pub(super) fn sum(&self, key: &[u8], amount: i64) -> Result<i64, Misfit> {
        let present = self.get(key).map_or(Ok(0), parse_number)?;
        present.checked_add(amount).ok_or(Misfit::Overflow(present, amount))
    }

    /// Returns the value afterwards, or `expected` if an absent key stays absent.
    pub(super) fn compare_set(
        &mut self,
        key: &[u8],
        expected: &[u8],
        desired: &[u8],
    ) -> Result<Vec<u8>, Misfit> {
        match self.objection(key, expected) {
            Some(value) => Ok(value.to_vec()),
            None => self.set(key, desired).map(|()| desired.to_vec()),
        }
    }

    /// What [`Values::compare_set`] returns if it would store nothing. `None`: it would store `desired`.
    pub(super) fn objection<'a>(&'a self, key: &[u8], expected: &'a [u8]) -> Option<&'a [u8]> {
        match self.get(key) {
            None if !expected.is_empty() => Some(expected),
            Some(present) if present != expected => Some(present),
            _ => None,
        }
    }

    /// Deletes the value of `key`. Returns whether there was one. Queues stay, as in torch.
    pub(super) fn delete(&mut self, key: &[u8]) -> bool {
        let Some(value) = self.values.remove(key) else { return false };
        self.bytes -= footprint(key, &value);
        true
    }

    /// How many keys have a value.
    pub(super) fn len(&self) -> usize {
        self.values.len()
    }

    /// The keys that have a value, in order.
    pub(super) fn keys(&self) -> impl Iterator<Item = &[u8]> {
        self.values.keys().map(Vec::as_slice)
    }

    pub(super) fn push(&mut self, key: &[u8], value: &[u8]) -> Result<(), Misfit> {
        self.check_room_in_queue(key, value)?;
        self.put_in_queue(key, value);
        Ok(())
    }

    /// [`Values::push`] without a limit.
    pub(super) fn put_in_queue(&mut self, key: &[u8], value: &[u8]) {
        self.bytes += footprint(key, value);
        self.queues.entry(key.to_vec()).or_default().push_back(value.to_vec());
    }

    pub(super) fn pop(&mut self, key: &[u8]) -> Option<Vec<u8>> {
        let queue = self.queues.get_mut(key)?;
        let first = queue.pop_front()?;
        self.bytes -= footprint(key, &first);
        if queue.is_empty() {
            self.queues.remove(key);
        }
        Some(first)
    }

    /// The item that [`Values::pop`] would take.
    pub(super) fn first(&self, key: &[u8]) -> Option<&[u8]> {
        self.queues.get(key)?.front().map(Vec::as_slice)
    }

    pub(super) fn queue_len(&self, key: &[u8]) -> usize {
        self.queues.get(key).map_or(0, VecDeque::len)
    }
}

/// Reads a value that [`Values::add`] accepts.
pub(super) fn parse_number(value: &[u8]) -> Result<i64, Misfit> {
    str::from_utf8(value).ok().and_then(|text| text.parse().ok()).ok_or_else(|| {
        let shown = String::from_utf8_lossy(value).chars().take(40).collect();
        Misfit::NotANumber(shown)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_is_counted_and_limited() {
        let mut values = Values::new(3 * OVERHEAD_BYTES + 20);
        values.set(b"/a", b"12345").unwrap();
        values.push(b"/q", b"12345").unwrap();
        values.append(b"/b", b"1").unwrap();
        let (held, full) = (values.bytes, Misfit::Full(values.bytes_max));
        assert_eq!(held, 3 * OVERHEAD_BYTES + 17);
        // Each of these would exceed the limit, and changes nothing.
        assert_eq!(values.set(b"/c", b""), Err(full.clone()));
        assert_eq!(values.set(b"/a", b"123456789"), Err(full.clone()));
        assert_eq!(values.append(b"/b", b"2345"), Err(full.clone()));
        assert_eq!(values.append(b"/c", b""), Err(full.clone()));
        assert_eq!(values.push(b"/q", b""), Err(full.clone()));
        assert_eq!(values.add(b"/c", 1), Err(full.clone()));
        assert_eq!(values.compare_set(b"/c", b"", b""), Err(full));
        assert_eq!((values.bytes, values.len(), values.queue_len(b"/q")), (held, 2, 1));
        // Replacing or removing something makes room.
        values.set(b"/a", b"12345678").unwrap();
        assert_eq!(values.pop(b"/q").as_deref(), Some(&b"12345"[..]));
        values.set(b"/c", b"12").unwrap();
        assert!(values.delete(b"/a") && values.delete(b"/b") && values.delete(b"/c"));
        assert_eq!(values.bytes, 0);
    }
}
