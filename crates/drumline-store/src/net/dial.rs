//! Opens a connection without blocking, as the counterpart of a [`Gate`](super::gate::Gate).

use std::{
    io::{self, ErrorKind},
    net::SocketAddr,
    os::fd::{AsFd, BorrowedFd},
};

use drumline_shm::named;
use rustix::{
    io::Errno,
    net::{connect, sockopt::socket_error},
};

use super::{
    call::{CallError, check_answerer, shake, tcp_socket},
    pacing,
    stream::Stream,
};
use crate::auth::Handshake;

/// A TCP connection that is being opened.
///
/// Call [`Dial::progress`] when its descriptor can be written, if it [writes](Dial::writes); otherwise when
/// it can be read.
#[derive(Debug)]
pub struct Dial {
    stream: Stream,
    handshake: Handshake,
    has_secret: bool,
    is_connecting: bool,
}

impl Dial {
    /// Begins to connect. The handshake follows.
    pub fn begin(address: SocketAddr, handshake: Handshake, has_secret: bool) -> io::Result<Dial> {
        let socket = tcp_socket(&address)?;
        pacing::begin_without(&*socket);
        match connect(&*socket, &address) {
            Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => {}
            Err(error) => return Err(named("connect")(error)),
        }
        let stream = Stream::Tcp(socket);
        Ok(Dial { stream, handshake, has_secret, is_connecting: true })
    }

    /// Whether the other host has not answered yet.
    pub fn is_connecting(&self) -> bool {
        self.is_connecting
    }

    /// Whether it waits until it can write.
    pub fn writes(&self) -> bool {
        self.is_connecting || !self.handshake.output().is_empty()
    }

    /// Goes on. Returns whether the connection is open and both ends have proven themselves.
    pub fn progress(&mut self) -> Result<bool, CallError> {
        if self.is_connecting && !self.connected()? {
            return Ok(false);
        }
        shake(&mut self.stream, &mut self.handshake)
    }

    fn connected(&mut self) -> Result<bool, CallError> {
        let Stream::Tcp(stream) = &self.stream else { return Ok(true) };
        match socket_error(stream).map_err(io::Error::from)? {
            Ok(()) => {}
            // The other end, which was there, has closed the connection.
            Err(error @ Errno::CONNRESET) => return Err(CallError::HungUp(Some(error.into()))),
            Err(error) => return Err(io::Error::from(error).into()),
        }
        let peer = match stream.peer_addr() {
            Ok(peer) => peer,
            Err(error) if error.kind() == ErrorKind::NotConnected => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        // If nothing listens there, a connection from an ephemeral port can connect to itself.
        if stream.local_addr()? == peer {
            return Err(io::Error::from(ErrorKind::ConnectionRefused).into());
        }
        self.stream.tune()?;
        check_answerer(&self.stream, self.has_secret)?;
        self.is_connecting = false;
        Ok(true)
    }

    /// The open connection.
    pub fn into_stream(mut self) -> io::Result<Stream> {
        self.stream.under(self.handshake.take_layer())
    }
}

impl AsFd for Dial {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
