//! The error of this crate.

use std::{fmt, io};

use crate::forbidden::advice;

/// What can go wrong with shared memory.
///
/// ```
/// use drumline_shm::{Error, Parity, Segment, SegmentSize};
///
/// let own = Segment::create(SegmentSize { slot_bytes: 1 << 16, arena_bytes: 0 })?;
/// let error = own.slot::<u8>(Parity::Even, 0..(1 << 16) + 1).unwrap_err();
/// assert!(matches!(error, Error::OutOfRange { end: 65_537, bytes: 65_536, .. }), "{error}");
/// # Ok::<(), drumline_shm::Error>(())
/// ```
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A system call failed.
    #[error("cannot {action}: {error}{}", advice(error))]
    Os {
        /// What this process tried to do.
        action: &'static str,
        /// The error of the system call.
        error: io::Error,
    },
    /// A segment of this size is not allowed.
    #[error("a segment with {what} of {bytes} bytes is refused: {why}")]
    Size {
        /// Which part of the segment.
        what: &'static str,
        /// Its size, in bytes.
        bytes: u64,
        /// Which limit it exceeds.
        why: String,
    },
    /// A range does not lie within its part of the segment.
    #[error("bytes {start}..{end} are not in the {what}, which has {bytes} bytes")]
    OutOfRange {
        /// Which part of the segment.
        what: &'static str,
        /// The first byte asked for.
        start: u128,
        /// The byte after the last one asked for.
        end: u128,
        /// The size of that part, in bytes.
        bytes: usize,
    },
    /// An offset is not aligned for the type of the elements.
    #[error("byte offset {offset} is not a multiple of the elements' alignment of {align} bytes")]
    Misaligned {
        /// The offset asked for, in bytes.
        offset: usize,
        /// The alignment of the elements, in bytes.
        align: usize,
    },
    /// No free range of the arena is long enough.
    #[error(
        "no room for a registered buffer of {asked} bytes: {used} of {allowed} bytes are used, \
         the longest free range has {largest_free}; use fewer or smaller buffers, or make \
         the segment with a larger arena"
    )]
    ArenaFull {
        /// Bytes asked for, in whole pages.
        asked: u128,
        /// Bytes that buffers hold or that `detach` gave up.
        used: usize,
        /// Bytes of the arena.
        allowed: usize,
        /// Bytes of the longest free range.
        largest_free: usize,
    },
    /// A slice is not part of a registered buffer of this arena.
    #[error("the slice is not in this arena: only registered buffers can be detached")]
    NotRegistered,
    /// A process created by `fork` used the arena of its parent.
    #[error(
        "this arena belongs to process {owner}, and a process forked from it cannot allocate \
         there: create a segment in that process"
    )]
    Forked {
        /// The process that created the segment.
        owner: u32,
    },
    /// A peer handed over something other than a segment and its doorbell.
    #[error("refused {what} that a peer handed over: {why}")]
    Refused {
        /// What it should have been: a message, a segment or a doorbell.
        what: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// The process at the other end of a socket belongs to another user.
    #[error(
        "refused process {}, which runs as user {theirs}: this process runs as user {ours} and \
         shares memory only with processes of the same user or of root",
        pid.map_or_else(|| "of another PID namespace".to_owned(), |pid| pid.to_string())
    )]
    Stranger {
        /// The number of the peer's process, if it has one in this PID namespace.
        pid: Option<u32>,
        /// The peer's user.
        theirs: u32,
        /// The user of this process.
        ours: u32,
    },
    /// The peer closed its socket.
    #[error("the peer closed its socket before {missing}")]
    Closed {
        /// The event that had not yet happened.
        missing: &'static str,
    },
    /// The deadline passed.
    #[error("the deadline passed before {missing}")]
    Timeout {
        /// The event that had not yet happened.
        missing: &'static str,
    },
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// For `map_err`: a system call failed that was part of `action`.
    pub(crate) fn os<E: Into<io::Error>>(action: &'static str) -> impl FnOnce(E) -> Error {
        move |error| Error::Os { action, error: error.into() }
    }

    /// Something that came from a peer is not the `what` that it should be.
    pub(crate) fn refused(what: &'static str, why: impl Into<String>) -> Error {
        Error::Refused { what, why: why.into() }
    }
}
