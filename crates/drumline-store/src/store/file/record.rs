//! The format of a file store: one record after another, as torch writes them.
//!
//! ```text
//! 02 00 00 00  2f 6b  01 00 00 00  76        "/k" is "v"
//! 03 00 00 00  2d 2f 6b  00 00 00 00         "/k" is deleted
//! ```
//!
//! A record is the length of its key, the key, the length of its value, and the value. Lengths are
//! little-endian `u32`. The last record of a key counts. The keys of users begin with `/`.
//!
//! | key | meaning of the record |
//! |---|---|
//! | `/K` | K has this value |
//! | `-/K` | K is deleted |
//! | `refcount/` | the number of open handles |
//! | `cleanup/` | the number of handles that were closed |
//! | `push/K` | ours: this item was put at the end of K's queue |
//! | `pop/K` | ours: the first item of K's queue was taken |
//! | empty, or only `~` | ours: no meaning, it fills a gap |
//!
//! For torch, our records are keys that no program asks for. (An empty key makes its `list_keys` fail.)

use crate::store::values::Values;

/// The number of open handles, and the number of closed ones.
pub(super) const REFERENCES: &[u8] = b"refcount/";
pub(super) const CLOSED: &[u8] = b"cleanup/";

const DELETED: &[u8] = b"-";
const PUSH: &[u8] = b"push";
const POP: &[u8] = b"pop";
const FILLER: u8 = b'~';

/// The length of a [`cover`].
pub(super) const COVER_BYTES: usize = 9;

/// The header of a filler. It makes the bytes after it meaningless, up to `length` bytes including the
/// header.
pub(super) fn cover(length: usize) -> [u8; COVER_BYTES] {
    let mut cover = [1, 0, 0, 0, FILLER, 0, 0, 0, 0];
    cover[5..].copy_from_slice(&((length - COVER_BYTES) as u32).to_le_bytes());
    cover
}

/// A change, by its record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Record<'a> {
    Set(&'a [u8], &'a [u8]),
    Delete(&'a [u8]),
    Push(&'a [u8], &'a [u8]),
    Pop(&'a [u8]),
    /// Fills a gap of this many bytes, plus eight for the lengths.
    Filler(usize),
}

impl<'a> Record<'a> {
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        let mut parts = |prefix: &[u8], key: &[u8], value: &[u8]| {
            // The store's limits are far below 2^32.
            out.extend(((prefix.len() + key.len()) as u32).to_le_bytes());
            out.extend_from_slice(prefix);
            out.extend_from_slice(key);
            out.extend((value.len() as u32).to_le_bytes());
            out.extend_from_slice(value);
        };
        match *self {
            Record::Set(key, value) => parts(b"", key, value),
            Record::Delete(key) => parts(DELETED, key, b""),
            Record::Push(key, value) => parts(PUSH, key, value),
            Record::Pop(key) => parts(POP, key, b""),
            Record::Filler(bytes) => parts(b"", &vec![FILLER; bytes], b""),
        }
    }

    /// The first record of `bytes` and its length; `None` if it is incomplete.
    pub(super) fn decode(bytes: &'a [u8]) -> Option<(Record<'a>, usize)> {
        let (key, rest) = take_prefixed(bytes)?;
        let (value, rest) = take_prefixed(rest)?;
        let with = |prefix| key.strip_prefix(prefix).filter(|key| key.first() == Some(&b'/'));
        let record = if key.iter().all(|&byte| byte == FILLER) {
            Record::Filler(key.len() + value.len())
        } else if let Some(key) = with(DELETED) {
            Record::Delete(key)
        } else if let Some(key) = with(PUSH) {
            Record::Push(key, value)
        } else if let Some(key) = with(POP) {
            Record::Pop(key)
        } else {
            Record::Set(key, value)
        };
        Some((record, bytes.len() - rest.len()))
    }

    /// Applies the change. No limit is checked, because the record is in the file already.
    pub(super) fn apply(&self, values: &mut Values) {
        match *self {
            Record::Set(key, value) => values.put(key, value),
            Record::Delete(key) => drop(values.delete(key)),
            Record::Push(key, value) => values.put_in_queue(key, value),
            Record::Pop(key) => drop(values.pop(key)),
            Record::Filler(_) => {}
        }
    }

    /// Whether the software of a store writes such records.
    fn is_known(&self) -> bool {
        match self {
            Record::Set(key, _) => key.first() == Some(&b'/') || [REFERENCES, CLOSED].contains(key),
            Record::Delete(_) | Record::Push(..) | Record::Pop(_) | Record::Filler(_) => true,
        }
    }
}

/// Whether `bytes` can be the beginning of a store's file.
pub(super) fn is_plausible(bytes: &[u8]) -> bool {
    if let Some((record, _)) = Record::decode(bytes) {
        return record.is_known();
    }
    // It may be the first record, of the first handle, cut off.
    let mut first = Vec::new();
    Record::Set(REFERENCES, b"1").encode(&mut first);
    first.starts_with(bytes)
}

/// The position where complete records begin again behind a torn record at the beginning of `bytes`: a torch
/// process may have written there. The length of `bytes` if there are none.
pub(super) fn next_whole(bytes: &[u8]) -> usize {
    // Goes from the end to the front: whether records are complete from a position on follows from later
    // positions. So a file of many records takes no longer than it takes to read them.
    let mut are_whole = vec![false; bytes.len() + 1];
    are_whole[bytes.len()] = true;
    for start in (1..bytes.len()).rev() {
        are_whole[start] = Record::decode(&bytes[start..]).is_some_and(|(record, length)| {
            let is_ours = record.is_known() && !matches!(record, Record::Filler(_));
            is_ours && are_whole[start + length]
        });
    }
    (1..bytes.len()).find(|&start| are_whole[start]).unwrap_or(bytes.len())
}

/// Takes a length and that many bytes. Also returns the bytes behind them.
fn take_prefixed(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk()?;
    rest.split_at_checked(usize::try_from(u32::from_le_bytes(*length)).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(records: &[Record<'_>]) -> Vec<u8> {
        let mut bytes = Vec::new();
        records.iter().for_each(|record| record.encode(&mut bytes));
        bytes
    }

    const RECORDS: [Record<'static>; 7] = [
        Record::Set(REFERENCES, b"1"),
        Record::Set(b"/k", b"v"),
        Record::Set(b"/", b""),
        Record::Delete(b"/k"),
        Record::Push(b"/q", b"item"),
        Record::Pop(b"/q"),
        Record::Filler(3),
    ];

    #[test]
    fn records_have_their_bytes() {
        assert_eq!(encoded(&RECORDS[1..2]), b"\x02\0\0\0/k\x01\0\0\0v");
        assert_eq!(encoded(&RECORDS[3..4]), b"\x03\0\0\0-/k\0\0\0\0");
        assert_eq!(encoded(&RECORDS[6..7]), b"\x03\0\0\0~~~\0\0\0\0");
        for record in RECORDS {
            let bytes = encoded(&[record]);
            assert_eq!(Record::decode(&bytes), Some((record, bytes.len())));
            for end in 0..bytes.len() {
                assert_eq!(Record::decode(&bytes[..end]), None);
            }
        }
    }

    #[test]
    fn a_cover_hides_what_is_written_under_it() {
        for length in COVER_BYTES..200 {
            let hidden = [&cover(length)[..], &vec![7; length - COVER_BYTES]].concat();
            assert_eq!(Record::decode(&hidden), Some((Record::Filler(length - 8), length)));
        }
        assert_eq!(Record::decode(&[0; 24]), Some((Record::Filler(0), 8)));
    }

    #[test]
    fn what_stands_behind_a_torn_record_is_found() {
        let torn = encoded(&[Record::Set(b"/key", &[7; 40])]);
        let whole = encoded(&RECORDS[1..6]);
        for end in 1..torn.len() {
            assert_eq!(next_whole(&torn[..end]), end, "nothing is there");
            let bytes = [&torn[..end], &whole].concat();
            // The torn value may swallow some of the following bytes, which only its length could tell.
            if Record::decode(&bytes).is_none() {
                assert_eq!(next_whole(&bytes), end);
            }
        }
    }

    #[test]
    fn a_torn_record_before_many_others_takes_no_longer_than_they() {
        let torn = encoded(&[Record::Set(b"/key", &[7; 40])])[..20].to_vec();
        let many = encoded(&[Record::Set(b"/k", b"")]).repeat(500_000);
        assert_eq!(next_whole(&[&torn[..], &many].concat()), torn.len());
        // The bytes end in the middle of a record, so no position has complete records up to the end.
        let bytes = [&torn[..], &many, &[5, 0, 0, 0, b'/']].concat();
        assert_eq!(next_whole(&bytes), bytes.len());
    }

    #[test]
    fn only_a_store_is_taken_for_one() {
        assert!(is_plausible(b""));
        assert!(is_plausible(&encoded(&RECORDS)));
        assert!(is_plausible(&encoded(&RECORDS)[..7]));
        for other in [&b"rank,loss\n0,1.5\n"[..], b"\x7fELF\x02\x01\x01", b"a", &[0xff; 100]] {
            assert!(!is_plausible(other));
        }
    }
}
