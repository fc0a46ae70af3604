//! What stands for TLS in a build without the feature `tls`: there is never one.

use std::io::{self, ErrorKind, Read, Write};

/// One end of a TLS connection. Nothing makes one.
#[derive(Debug)]
pub(crate) enum Tls {}

fn not_built<T>() -> io::Result<T> {
    Err(io::Error::new(ErrorKind::Unsupported, "this program is built without the feature `tls`"))
}

/// The end that opened the connection.
pub(crate) fn caller() -> io::Result<Tls> {
    not_built()
}

/// The end that accepted the connection.
pub(crate) fn answerer() -> io::Result<Tls> {
    not_built()
}

impl Tls {
    pub(crate) fn is_handshaking(&self) -> bool {
        match *self {}
    }

    pub(crate) fn binding(&self) -> io::Result<[u8; 32]> {
        match *self {}
    }

    pub(super) fn holds_input(&self) -> bool {
        match *self {}
    }

    pub(crate) fn holds_output(&self) -> bool {
        match *self {}
    }

    pub(crate) fn seal(&mut self, _bytes: &[u8]) -> io::Result<()> {
        match *self {}
    }

    pub(super) fn seal_end(&mut self) {
        match *self {}
    }

    pub(crate) fn push(&mut self, _stream: &mut impl Write) -> io::Result<()> {
        match *self {}
    }

    pub(crate) fn pull(&mut self, _stream: &mut impl Read) -> io::Result<usize> {
        match *self {}
    }

    pub(crate) fn open(&mut self, _bytes: &mut [u8]) -> io::Result<Option<usize>> {
        match *self {}
    }
}
