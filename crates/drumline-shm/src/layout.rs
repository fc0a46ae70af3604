//! Where the parts of a segment are: the numbers behind the drawing in the crate's documentation.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::flag::{FLAGS_BYTES, PAYLOAD_BYTES, payload_offset};
use crate::forbidden::memory_of_host;

/// How large the parts of a segment are.
///
/// Sizes are rounded up to 64 KiB. A page of the arena takes memory only once a buffer is allocated
/// there, so the arena may be much larger than all buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentSize {
    /// Bytes of each of the two staging slots, from 1 byte to 1 GiB.
    pub slot_bytes: usize,
    /// Bytes of the arena, from 0 to 16 TiB.
    pub arena_bytes: usize,
}

impl SegmentSize {
    /// Slots of 1 MiB and an arena of half the memory of this host.
    pub fn of_host() -> SegmentSize {
        let memory = memory_of_host().unwrap_or(0);
        let half = usize::try_from(memory / 2).unwrap_or(usize::MAX);
        SegmentSize { slot_bytes: 1 << 20, arena_bytes: half.min(ARENA_BYTES_MAX) }
    }
}

const MAGIC: [u8; 8] = *b"DRUMSHM\n";
const VERSION: u32 = 3;
/// Bytes of line 0.
pub(crate) const HEADER_BYTES: usize = 64;

const SLOT_BYTES_MAX: usize = 1 << 30;
const ARENA_BYTES_MAX: usize = 1 << 44;
/// All sizes are multiples of the largest page of common kernels.
const GRANULE: usize = 64 << 10;
/// The arena starts at a multiple of this size, that of a huge page.
const HUGE: usize = 2 << 20;

/// A checked [`SegmentSize`], and the places of the parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    slot_bytes: usize,
    arena_bytes: usize,
}

impl Layout {
    /// Rounds the sizes up and checks them.
    pub(crate) fn new(size: SegmentSize) -> Result<Layout> {
        let round = |what, bytes: usize, max: usize| match bytes.checked_next_multiple_of(GRANULE) {
            Some(rounded) if rounded <= max => Ok(rounded),
            _ => Err(Error::Size {
                what,
                bytes: bytes as u64,
                why: format!("at most {max} bytes are allowed"),
            }),
        };
        Ok(Layout {
            slot_bytes: round("slots", size.slot_bytes.max(1), SLOT_BYTES_MAX)?,
            arena_bytes: round("an arena", size.arena_bytes, ARENA_BYTES_MAX)?,
        })
    }

    /// Where the flag lines are.
    pub(crate) const FLAGS: Range<usize> = HEADER_BYTES..HEADER_BYTES + FLAGS_BYTES;

    /// Where the payload of a parity is.
    pub(crate) fn payload(parity: usize) -> Range<usize> {
        let start = Layout::FLAGS.start + payload_offset(parity);
        start..start + PAYLOAD_BYTES
    }

    /// Where the staging slot of a parity is.
    pub(crate) fn slot(&self, parity: usize) -> Range<usize> {
        let start = GRANULE + parity * self.slot_bytes;
        start..start + self.slot_bytes
    }

    /// Where the arena is.
    pub(crate) fn arena(&self) -> Range<usize> {
        let start = self.slot(1).end.next_multiple_of(HUGE);
        start..start + self.arena_bytes
    }

    /// Bytes of the whole segment.
    pub(crate) fn total_bytes(&self) -> usize {
        self.arena().end
    }

    /// Line 0.
    pub(crate) fn header(&self) -> [u8; HEADER_BYTES] {
        let mut line = [0; HEADER_BYTES];
        line[0..8].copy_from_slice(&MAGIC);
        line[8..12].copy_from_slice(&VERSION.to_ne_bytes());
        line[16..24].copy_from_slice(&(self.slot_bytes as u64).to_ne_bytes());
        line[24..32].copy_from_slice(&(self.arena_bytes as u64).to_ne_bytes());
        line
    }

    /// Reads line 0 of a peer's segment, whose file has `file_bytes`.
    pub(crate) fn from_header(line: &[u8; HEADER_BYTES], file_bytes: u64) -> Result<Layout> {
        let refused = |why: String| Err(Error::refused("a segment", why));
        let number = |at: usize| {
            let (words, _) = line.as_chunks::<8>();
            u64::from_ne_bytes(words[at / 8])
        };
        if line[0..8] != MAGIC {
            return refused("it does not begin with the signature of a segment".into());
        }
        let version = number(8);
        if version != u64::from(VERSION) {
            return refused(format!(
                "it has layout version {version}, and this build knows version {VERSION}: \
                 run the same build of drumline on all ranks"
            ));
        }
        let (slot_bytes, arena_bytes) = (number(16), number(24));
        let size = usize::try_from(slot_bytes).ok().zip(usize::try_from(arena_bytes).ok());
        let layout = size
            .and_then(|(slot_bytes, arena_bytes)| {
                let layout = Layout::new(SegmentSize { slot_bytes, arena_bytes }).ok()?;
                (layout == Layout { slot_bytes, arena_bytes }).then_some(layout)
            })
            .ok_or_else(|| {
                let why = format!(
                    "its header gives the slots {slot_bytes} bytes and the arena {arena_bytes}; \
                     no segment has such sizes"
                );
                Error::refused("a segment", why)
            })?;
        if layout.total_bytes() as u64 != file_bytes {
            return refused(format!(
                "its header says {} bytes, but its file has {file_bytes}",
                layout.total_bytes()
            ));
        }
        Ok(layout)
    }
}

/// Decodes a header and encodes it again, for `drumline-fuzz`; not part of the API.
pub fn header_again(line: &[u8; 64], file_bytes: u64) -> Option<[u8; 64]> {
    Some(Layout::from_header(line, file_bytes).ok()?.header())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parts_do_not_overlap_and_the_header_gives_the_layout(
            slot_bytes in 0..=SLOT_BYTES_MAX,
            arena_bytes in 0..=ARENA_BYTES_MAX,
        ) {
            let layout = Layout::new(SegmentSize { slot_bytes, arena_bytes }).unwrap();
            let parts = [0..HEADER_BYTES, Layout::FLAGS, layout.slot(0), layout.slot(1), layout.arena()];
            for pair in parts.windows(2) {
                prop_assert!(pair[0].end <= pair[1].start);
            }
            for part in &parts[2..] {
                prop_assert_eq!(part.start % GRANULE, 0);
            }
            prop_assert!(layout.slot(0).len() >= slot_bytes && layout.slot(1).len() >= slot_bytes);
            prop_assert!(layout.arena().len() >= arena_bytes);
            for parity in 0..2 {
                let payload = Layout::payload(parity);
                prop_assert_eq!((payload.start % 8, payload.end % 64), (0, 0));
                prop_assert!(payload.end <= Layout::FLAGS.end);
            }
            let total = layout.total_bytes() as u64;
            prop_assert_eq!(Layout::from_header(&layout.header(), total).unwrap(), layout);
            prop_assert!(Layout::from_header(&layout.header(), total - 1).is_err());
        }

        #[test]
        fn any_other_header_is_refused(line: [u8; HEADER_BYTES], file_bytes: u64) {
            prop_assert!(Layout::from_header(&line, file_bytes).is_err());
        }

        #[test]
        fn sizes_from_a_peer_are_never_trusted(slot: u64, arena: u64, file_bytes: u64) {
            let mut line = Layout { slot_bytes: 0, arena_bytes: 0 }.header();
            line[16..24].copy_from_slice(&slot.to_ne_bytes());
            line[24..32].copy_from_slice(&arena.to_ne_bytes());
            if let Ok(layout) = Layout::from_header(&line, file_bytes) {
                prop_assert_eq!(layout.total_bytes() as u64, file_bytes);
            }
        }
    }

    #[test]
    fn sizes_beyond_the_caps_are_refused() {
        let too_large = |slot_bytes, arena_bytes| {
            Layout::new(SegmentSize { slot_bytes, arena_bytes }).unwrap_err().to_string()
        };
        assert!(too_large(SLOT_BYTES_MAX + 1, 0).contains("slots of 1073741825 bytes"));
        assert!(too_large(1, ARENA_BYTES_MAX + 1).contains("an arena of"));
        assert!(too_large(usize::MAX, 0).contains("at most 1073741824"));
    }
}
