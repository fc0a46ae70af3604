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
        for (at, byte) in copied.iter_mut().enumerate() {
            // SAFETY: the byte lies within the window, which is mapped while `self` lives. It is read as a
            // volatile, since another process may write to it.
            *byte = unsafe { start.add(at).read_volatile() };
        }
        Ok(copied)
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
