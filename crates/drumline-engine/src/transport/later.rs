//! A stream that may not be there yet.

use std::io::{self, ErrorKind, IoSlice, Read, Write};

use super::duplex::Duplex;

/// A stream that can neither be read nor written before it is there. That is no error, so its user need not
/// know.
#[derive(Debug)]
pub(crate) struct Later<S>(Option<S>);

impl<S> Later<S> {
    pub(crate) const NOT_YET: Later<S> = Later(None);

    /// Uses `stream` from now on. Closes a stream that was there.
    pub(crate) fn set(&mut self, stream: S) {
        self.0 = Some(stream);
    }

    pub(crate) fn get(&self) -> Option<&S> {
        self.0.as_ref()
    }

    pub(crate) fn is_there(&self) -> bool {
        self.0.is_some()
    }
}

impl<S: Duplex> Later<S> {
    /// Ends this side of the stream: nothing more will be written.
    pub(crate) fn end(&mut self) -> io::Result<()> {
        self.0.as_mut().map_or(Ok(()), Duplex::end)
    }

    /// Passes on bytes that the stream holds, as many as can be written now.
    pub(crate) fn flush_held(&mut self) -> io::Result<()> {
        match &mut self.0 {
            Some(stream) if stream.holds_output() => stream.flush(),
            _ => Ok(()),
        }
    }
}

impl<S: Read> Read for Later<S> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.as_mut().ok_or(ErrorKind::WouldBlock)?.read(bytes)
    }
}

impl<S: Write> Write for Later<S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.as_mut().ok_or(ErrorKind::WouldBlock)?.write(bytes)
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.as_mut().ok_or(ErrorKind::WouldBlock)?.write_vectored(parts)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.as_mut().map_or(Ok(()), Write::flush)
    }
}
