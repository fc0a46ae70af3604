//! What travels between a rank and the hub, all numbers little-endian:
//!
//! ```text
//! 0      1        5          13        21
//! ┌──────┬────────┬──────────┬─────────┬──────────
//! │ kind │  rank  │  number  │ length  │ body ...
//! └──────┴────────┴──────────┴─────────┴──────────
//! ```

use std::io::{self, Read, Write};

use drumline::Reason;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// Rank to hub: its number, with the token as body. Hub to rank: all ranks have connected.
    Hello = 1,
    /// A call: its signature, and a part for all ranks or one for each.
    Call,
    /// The part of each rank for this one.
    Answer,
    /// To or from `rank`, with the tag as number: label and bytes.
    Message,
    /// The time limit of this rank's call has passed.
    Late,
    /// `rank` has left in good order.
    Left,
    /// `rank` has left in good order but is needed.
    Needed,
    /// `rank` has gone without leaving in good order.
    Exited,
    /// The ranks in the body (4 bytes each) have not made the call.
    Missing,
    /// `rank` has made the call in the body.
    Mismatch,
    /// `rank` has failed; see [`Frame::failed`].
    Failed,
}

impl Kind {
    const ALL: [Kind; 11] = [
        Kind::Hello,
        Kind::Call,
        Kind::Answer,
        Kind::Message,
        Kind::Late,
        Kind::Left,
        Kind::Needed,
        Kind::Exited,
        Kind::Missing,
        Kind::Mismatch,
        Kind::Failed,
    ];
}

#[derive(Clone, Debug)]
pub(crate) struct Frame {
    pub(crate) kind: Kind,
    pub(crate) rank: usize,
    pub(crate) number: u64,
    pub(crate) body: Vec<u8>,
}

/// Stands for no rank in a number.
pub(crate) const NOBODY: u64 = u64::MAX;

/// The longest body.
pub(crate) const BODY_BYTES_MAX: u64 = 16 << 30;

const HEAD_BYTES: usize = 21;

impl Frame {
    pub(crate) fn new(kind: Kind, rank: usize, body: impl Into<Vec<u8>>) -> Frame {
        Frame { kind, rank, number: 0, body: body.into() }
    }

    /// The number is the rank at fault. The body is one byte of the reason, and the text.
    pub(crate) fn failed(rank: usize, culprit: Option<usize>, reason: Reason, text: &str) -> Frame {
        let body = [&[reason.code()], text.as_bytes()].concat();
        let number = culprit.map_or(NOBODY, |rank| rank as u64);
        Frame { number, ..Frame::new(Kind::Failed, rank, body) }
    }

    pub(crate) fn write(&self, mut to: impl Write) -> io::Result<()> {
        let mut head = Vec::with_capacity(HEAD_BYTES);
        head.push(self.kind as u8);
        head.extend((self.rank as u32).to_le_bytes());
        head.extend(self.number.to_le_bytes());
        head.extend((self.body.len() as u64).to_le_bytes());
        to.write_all(&head)?;
        to.write_all(&self.body)
    }

    /// Allocates memory as the body arrives, not by the length in the head.
    pub(crate) fn read(mut from: impl Read, body_bytes_max: u64) -> io::Result<Frame> {
        let mut head = [0; HEAD_BYTES];
        from.read_exact(&mut head)?;
        let mut rest = &head[1..];
        let (rank, number, length) =
            (number(&mut rest, 4), number(&mut rest, 8), number(&mut rest, 8));
        let kind = Kind::ALL.into_iter().find(|kind| *kind as u8 == head[0]);
        let Some(kind) = kind.filter(|_| length <= body_bytes_max) else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "no frame of a hub"));
        };
        let mut body = Vec::new();
        if from.take(length).read_to_end(&mut body)? as u64 != length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(Frame { kind, rank: rank as usize, number, body })
    }
}

/// Takes a number of `len` bytes from the front; 0 if there are too few.
pub(crate) fn number(bytes: &mut &[u8], len: usize) -> u64 {
    let mut wide = [0; 8];
    wide[..len].copy_from_slice(bytes.split_off(..len).unwrap_or(&[0; 8][..len]));
    u64::from_le_bytes(wide)
}

/// Concatenates parts, each after its length.
pub(crate) fn join<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut all = Vec::new();
    for part in parts {
        all.extend((part.len() as u64).to_le_bytes());
        all.extend(part);
    }
    all
}

/// The inverse of [`join`]. A truncated part is left out.
pub(crate) fn split(mut all: &[u8]) -> Vec<&[u8]> {
    let mut parts = Vec::new();
    while !all.is_empty() {
        let length = number(&mut all, 8) as usize;
        match all.split_off(..length) {
            Some(part) => parts.push(part),
            None => break,
        }
    }
    parts
}
