//! Messages from rank to rank.

use std::{fmt, time::Instant};

use drumline_schedule::step::Rank;

/// Length of a [`Label`] as it travels.
pub const LABEL_BYTES: usize = 40;

/// What a message holds: type and number of elements, or an object. It travels with the message;
/// the library compares it with what the receiver expects.
///
/// ```
/// use drumline::backend::{LABEL_BYTES, Label};
///
/// assert_eq!(Label([0; LABEL_BYTES]).0.len(), 40);
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Label(pub [u8; LABEL_BYTES]);

impl fmt::Debug for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Label").field(&self.0.escape_ascii().to_string()).finish()
    }
}

/// A message to be sent.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing<'a> {
    /// To whom; this rank itself, perhaps.
    pub to: Rank,
    /// Meets receives with the same tag.
    pub tag: u64,
    /// What it holds.
    pub label: Label,
    /// What it holds, as bytes.
    pub bytes: &'a [u8],
    /// When it must be sent.
    pub deadline: Instant,
}

/// A message to be received.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// From whom; from whoever sends first, if it does not matter.
    pub from: Option<Rank>,
    /// The tag that it must have.
    pub tag: u64,
    /// When it must have come.
    pub deadline: Instant,
}

/// A message that has been received.
#[derive(Clone, Debug)]
pub struct Arrived {
    /// Who has sent it.
    pub from: Rank,
    /// As it was sent.
    pub label: Label,
    /// As they were sent.
    pub bytes: Vec<u8>,
}
