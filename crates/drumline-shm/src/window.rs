//! A part of a peer's arena that stays mapped for a device.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::mapping::Mapping;

/// Bytes of a peer's arena, mapped here for as long as this value or a clone of it lives.
///
/// A device copies from their [address](PeerWindow::address). The peer may write there at any time, so there is
/// no slice of them. Made by [`PeerSegment::window`](crate::PeerSegment::window).
#[derive(Clone)]
pub struct PeerWindow {
    mapping: Arc<Mapping>,
    /// Bytes of the segment, within its arena.
    bytes: Range<usize>,
}

impl PeerWindow {
    pub(crate) fn new(mapping: Arc<Mapping>, offset: usize, bytes: usize) -> Result<PeerWindow> {
        let arena = mapping.layout().arena();
        match offset.checked_add(bytes) {
            Some(end) if end <= arena.len() => {
                let bytes = arena.start + offset..arena.start + end;
                Ok(PeerWindow { mapping, bytes })
            }
            _ => Err(out_of_range(arena.len(), offset, bytes)),
        }
    }

    /// Where the bytes begin in this process.
    pub fn address(&self) -> *const u8 {
        self.mapping.address(self.bytes.start)
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// A copy of some of the bytes, as they are now. If the peer writes there meanwhile, old and new bytes mix.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfRange`] when the window has no such bytes.
    pub fn to_vec(&self, range: Range<usize>) -> Result<Vec<u8>> {
        if range.start > range.end || range.end > self.len() {
            return Err(out_of_range(self.len(), range.start, range.len()));
        }
        let start = self.mapping.address(self.bytes.start + range.start);
        let mut copied = vec![0; range.len()];
        let (head, rest) = copied.split_at_mut(start.align_offset(WORD).min(range.len()));
        let (words, tail) = rest.as_chunks_mut::<WORD>();
        let (at_words, at_tail) = (head.len(), head.len() + words.len() * WORD);
        // SAFETY: the three parts are the range, one behind the other. It lies within the window, which is mapped while
        // `self` lives, and the words are aligned. All are read as volatiles, since another process may write to them.
        unsafe {
            read(start, head);
            for (at, word) in words.iter_mut().enumerate() {
                let there = start.add(at_words + at * WORD).cast::<u64>();
                *word = there.read_volatile().to_ne_bytes();
            }
            read(start.add(at_tail), tail);
        }
        Ok(copied)
    }
}

/// What a window is read by.
const WORD: usize = size_of::<u64>();

/// Reads single bytes.
///
/// # Safety
///
/// As many bytes are mapped at `from`.
unsafe fn read(from: *const u8, into: &mut [u8]) {
    for (at, byte) in into.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        *byte = unsafe { from.add(at).read_volatile() };
    }
}

impl fmt::Debug for PeerWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerWindow").field("bytes", &self.bytes).finish()
    }
}

fn out_of_range(whole: usize, offset: usize, bytes: usize) -> Error {
    let start = offset as u128;
    Error::OutOfRange { what: "arena", start, end: start + bytes as u128, bytes: whole }
}

#[cfg(test)]
mod tests {
    use crate::{PeerSegment, Segment, SegmentSize};

    #[test]
    fn every_part_of_a_window_is_copied_as_it_is() {
        let own = Segment::create(SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 }).unwrap();
        let bytes: Vec<u8> = (0..100_u32).map(|at| (at * 7 % 251) as u8).collect();
        let mut buffer = own.arena().allocate::<u8>(bytes.len()).unwrap();
        buffer.copy_from_slice(&bytes);
        let peer = PeerSegment::map(own.handles().unwrap()).unwrap();
        let offset = own.arena().offset_of(&buffer).unwrap();
        for shift in 0..9 {
            let window = peer.window(offset + shift, 100 - shift).unwrap();
            for (start, end) in (0..30).flat_map(|start| (start..60).map(move |end| (start, end))) {
                let found = window.to_vec(start..end).unwrap();
                assert_eq!(found, bytes[shift + start..shift + end], "{shift}: {start}..{end}");
            }
        }
    }
}
