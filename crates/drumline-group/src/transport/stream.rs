//! Makes a connection of `drumline-store` a stream for `drumline-engine`.

use std::{
    io::{self, IoSlice, IoSliceMut, Read, Write},
    ops::{Deref, DerefMut},
    os::fd::{AsFd, BorrowedFd},
};

use drumline_engine::transport::Duplex;
use drumline_store::net::stream::Stream;

/// One of the connections to a peer.
#[derive(Debug)]
pub(crate) struct PeerStream(pub(crate) Stream);

impl Duplex for PeerStream {
    fn end(&mut self) -> io::Result<()> {
        self.0.end()
    }

    fn holds_output(&self) -> bool {
        self.0.holds_output()
    }
}

impl Deref for PeerStream {
    type Target = Stream;

    fn deref(&self) -> &Stream {
        &self.0
    }
}

impl DerefMut for PeerStream {
    fn deref_mut(&mut self) -> &mut Stream {
        &mut self.0
    }
}

impl Read for PeerStream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.read(bytes)
    }

    fn read_vectored(&mut self, bytes: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.0.read_vectored(bytes)
    }
}

impl Write for PeerStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn write_vectored(&mut self, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.write_vectored(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl AsFd for PeerStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
