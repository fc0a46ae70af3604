//! What both layers agree on.

use std::{
    fmt::Display,
    io::{Error, ErrorKind},
};

/// The most bytes of its user that a layer seals at a time.
pub const BLOCK_BYTES: usize = 64 << 10;

/// The error over bytes that nobody at the other end has sealed.
pub(super) fn forged(what: impl Display) -> Error {
    Error::new(ErrorKind::InvalidData, format!("somebody changed bytes on the way ({what})"))
}
