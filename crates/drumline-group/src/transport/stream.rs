//! A connection of the store's kind as a stream of the engine's.

use std::{
    io::{self, IoSlice, IoSliceMut, Read, Write},
    net::Shutdown,
    ops::{Deref, DerefMut},
    os::fd::{AsFd, BorrowedFd},
};

use drumline_engine::transport::{self, Duplex};
use drumline_store::{auth, net::stream::Stream};

/// One of the connections to a peer.
#[derive(Debug)]
pub(crate) struct PeerStream(pub(crate) Stream);

impl Duplex for PeerStream {
    fn end(&mut self) -> io::Result<()> {
        self.0.shutdown(Shutdown::Write)
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

/// What the greeting of a connection says of a stream of this kind.
pub(crate) fn greeted_as(channel: transport::Channel) -> auth::Channel {
    match channel {
        transport::Channel::Control => auth::Channel::Control,
        transport::Channel::Points => auth::Channel::Points,
        transport::Channel::Data(number) => auth::Channel::Data(number),
    }
}

/// What a connection that was greeted so carries between ranks, if it does.
pub(crate) fn carries(channel: auth::Channel) -> Option<transport::Channel> {
    match channel {
        auth::Channel::Control => Some(transport::Channel::Control),
        auth::Channel::Points => Some(transport::Channel::Points),
        auth::Channel::Data(number) => Some(transport::Channel::Data(number)),
        auth::Channel::Store => None,
    }
}
