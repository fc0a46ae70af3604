use std::io;

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
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The kernel said no.
    #[error("cannot {action}: {source}")]
    Os {
        /// What was being done.
        action: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// A segment of this size cannot be.
    #[error("a segment with {what} of {bytes} bytes is refused: {why}")]
    Size {
        /// Which part of the segment.
        what: &'static str,
        /// Its size, in bytes.
        bytes: u64,
        /// What stands against it.
        why: String,
    },
    /// A range does not lie within its part of the segment.
    #[error("bytes {start}..{end} are not in the {what}, which has {bytes} bytes")]
    OutOfRange {
        /// Which part of the segment.
        what: &'static str,
        /// First byte asked for.
        start: u128,
        /// The byte after the last one asked for.
        end: u128,
        /// Bytes there are.
        bytes: usize,
    },
    /// An offset does not suit the type of the elements.
    #[error("byte {offset} is no place for elements that are aligned to {align} bytes")]
    Misaligned {
        /// The offset asked for, in bytes.
        offset: usize,
        /// The alignment of the elements, in bytes.
        align: usize,
    },
    /// No free stretch of the arena is long enough.
    #[error(
        "no room for a registered buffer of {asked} bytes: {used} of {allowed} bytes are used, \
         the largest free stretch has {largest_free}; use fewer or smaller buffers, or make \
         the segment with a larger arena"
    )]
    ArenaFull {
        /// Bytes wanted, in whole pages.
        asked: u128,
        /// Bytes that buffers hold, or that were given up by `detach`.
        used: usize,
        /// Bytes of the arena.
        allowed: usize,
        /// Bytes of the longest stretch that is free.
        largest_free: usize,
    },
    /// A slice is not part of a registered buffer of this arena.
    #[error("the slice is not in this arena: only registered buffers can be detached")]
    NotRegistered,
    /// A process made by `fork` used the arena of its parent.
    #[error(
        "this arena belongs to process {owner}, and a process forked from it cannot allocate \
         there: create a segment of its own"
    )]
    Forked {
        /// The process that created the segment.
        owner: u32,
    },
    /// A peer handed over something else than a segment with its doorbell.
    #[error("refused {what} that a peer handed over: {why}")]
    Refused {
        /// Which of the things.
        what: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// The process at the other end of a socket belongs to another user.
    #[error(
        "refused process {}, which runs as user {theirs}: this one runs as user {ours}, and only \
         processes of the same user or of root may share memory with it",
        pid.map_or_else(|| "of another PID namespace".to_owned(), |pid| pid.to_string())
    )]
    Stranger {
        /// The peer's process, if it has a number here.
        pid: Option<u32>,
        /// The peer's user.
        theirs: u32,
        /// Our user.
        ours: u32,
    },
    /// The peer closed its socket.
    #[error("the peer closed its socket before {missing}")]
    Closed {
        /// What had not happened yet.
        missing: &'static str,
    },
    /// The deadline went by.
    #[error("the deadline went by before {missing}")]
    Timeout {
        /// What had not happened yet.
        missing: &'static str,
    },
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// For `map_err`: the kernel said no to `action`.
    pub(crate) fn os<E: Into<io::Error>>(action: &'static str) -> impl FnOnce(E) -> Error {
        move |source| Error::Os { action, source: source.into() }
    }

    /// For `map_err` and checks: `what` came from a peer and is not as it should be.
    pub(crate) fn refused(what: &'static str, why: impl Into<String>) -> Error {
        Error::Refused { what, why: why.into() }
    }
}
