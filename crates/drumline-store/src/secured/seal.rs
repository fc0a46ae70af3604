//! What both layers share.

use std::{
    fmt::Display,
    io::{Error, ErrorKind},
};

/// The most bytes of the user that a layer seals at a time.
pub const BLOCK_BYTES: usize = 64 << 10;

/// The error for bytes that the other end has not sealed.
pub(super) fn forged(what: impl Display) -> Error {
    Error::new(ErrorKind::InvalidData, format!("somebody changed bytes on the way ({what})"))
}
