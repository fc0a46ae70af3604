//! A connection over TCP or a Unix socket.

use std::{
    io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    time::Duration,
};

use drumline_shm::{Credentials, Unforked};
use rustix::net::sockopt;

use super::pacing;
use crate::{
    auth::Level,
    secured::{Layer, Secured},
};

/// A connection to another process. A fork of this process does not keep it: otherwise the other end would
/// not see that this process has died.
#[derive(Debug)]
pub enum Stream {
    /// Over TCP.
    Tcp(Unforked<TcpStream>),
    /// Over a Unix socket.
    Unix(Unforked<UnixStream>),
    /// Over TCP, at a level above `auth`.
    Secured(Box<Secured<Unforked<TcpStream>>>),
}

/// Calls a method on the stream of any kind.
macro_rules! each {
    ($stream:expr, $inner:ident => $call:expr) => {
        match $stream {
            Stream::Tcp($inner) => $call,
            Stream::Unix($inner) => $call,
            Stream::Secured($inner) => $call,
        }
    };
}

/// Calls a method on the socket itself.
macro_rules! socket {
    ($stream:expr, $inner:ident => $call:expr) => {
        match $stream {
            Stream::Tcp($inner) => $call,
            Stream::Unix($inner) => $call,
            Stream::Secured(secured) => {
                let $inner = secured.inner();
                $call
            }
        }
    };
}

impl Stream {
    /// The level for this stream if `wanted` is set. A Unix socket always has `auth`, because the kernel
    /// keeps other users out.
    pub fn level(&self, wanted: Level) -> Level {
        match self {
            Stream::Unix(_) => Level::Auth,
            Stream::Tcp(_) | Stream::Secured(_) => wanted,
        }
    }

    /// The same stream under the layer that its handshake has made, if it has made one.
    pub(crate) fn under(self, layer: Option<Layer>) -> io::Result<Stream> {
        match (self, layer) {
            (stream, None) => Ok(stream),
            (Stream::Tcp(stream), Some(layer)) => {
                Ok(Stream::Secured(Box::new(Secured::new(stream, layer))))
            }
            (_, Some(_)) => Err(io::Error::other("only a plain TCP connection takes a layer")),
        }
    }

    pub(crate) fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        socket!(self, stream => stream.set_nonblocking(nonblocking))
    }

    /// Ends one direction, or both.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        socket!(self, stream => stream.shutdown(how))
    }

    /// Ends this side: nothing more will be written.
    pub fn end(&mut self) -> io::Result<()> {
        if let Stream::Secured(secured) = self {
            secured.end()?;
            if !secured.has_ended() {
                // A flush sends the rest.
                return Ok(());
            }
        }
        self.shutdown(Shutdown::Write)
    }

    /// Whether the stream holds bytes that a flush would move.
    pub fn holds_output(&self) -> bool {
        matches!(self, Stream::Secured(secured) if secured.holds_output())
    }

    /// Whether the stream holds bytes that have been read from the socket already.
    pub(crate) fn holds_input(&self) -> bool {
        matches!(self, Stream::Secured(secured) if secured.holds_input())
    }

    fn tcp(&self) -> Option<&TcpStream> {
        match self {
            Stream::Tcp(stream) => Some(stream),
            Stream::Unix(_) => None,
            Stream::Secured(secured) => Some(secured.inner()),
        }
    }

    /// Sets a connected socket to send small messages at once, as Unix sockets always do.
    pub fn tune(&self) -> io::Result<()> {
        let Some(stream) = self.tcp() else { return Ok(()) };
        pacing::settle(stream);
        stream.set_nodelay(true)
    }

    /// The address at the other end of a TCP connection.
    pub fn peer_address(&self) -> Option<SocketAddr> {
        let address = self.tcp()?.peer_addr().ok()?;
        // A socket of both families writes addresses of IPv4 as ::ffff:10.0.0.1.
        Some(SocketAddr::new(address.ip().to_canonical(), address.port()))
    }

    /// The other end, as text.
    pub fn peer(&self) -> String {
        match (self, self.peer_address()) {
            (Stream::Tcp(_) | Stream::Secured(_), Some(address)) => address.to_string(),
            (Stream::Tcp(_) | Stream::Secured(_), None) => "a connection that is gone".to_owned(),
            (Stream::Unix(stream), _) => match Credentials::of_peer(stream) {
                Ok(Credentials { pid: Some(pid), .. }) => format!("process {pid} of this host"),
                _ => "a process of this host".to_owned(),
            },
        }
    }

    /// Lets the kernel find out that the peer's host is silent, even if nothing is being sent.
    ///
    /// The kernel asks after 1 s of silence and again 1 s later, and gives up 1 s after that: 3 s after the
    /// last sign of life, or up to a tenth of a second later, because its timers are coarse. The peer's
    /// kernel answers, so a stopped or busy process does not count as silent. Every answer restarts the time,
    /// so a pulled cable is noticed after 2 to 3.1 s. With one question less, a single lost packet would end
    /// a job.
    ///
    /// While data is unacknowledged the kernel asks no such questions. So that case has a limit of its own,
    /// 2.25 s after the first retransmission. A rank that waits sends a beat ten times a second, and so
    /// notices a silent host within 2.6 s. (With a limit of 2 s or less, the kernel would give up after one
    /// unanswered question.) The limit is for control connections only. Linux applies it also to a peer that
    /// acknowledges but takes no data (a window of zero), which is normal on data connections.
    pub fn watch_host(&self) -> io::Result<()> {
        let Some(stream) = self.tcp() else { return Ok(()) };
        const SECOND: Duration = Duration::from_secs(1);
        const UNACKNOWLEDGED_MS: u32 = 2_250;
        sockopt::set_socket_keepalive(stream, true)?;
        sockopt::set_tcp_keepidle(stream, SECOND)?;
        sockopt::set_tcp_keepintvl(stream, SECOND)?;
        sockopt::set_tcp_keepcnt(stream, 2)?;
        sockopt::set_tcp_user_timeout(stream, UNACKNOWLEDGED_MS)?;
        Ok(())
    }
}

/// Whether `error`, on a connection that was up, means that the other host no longer answers. The alternative
/// is a process that has ended.
pub fn is_silence(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::TimedOut | ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable
    )
}

impl Read for Stream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        each!(self, stream => stream.read(bytes))
    }

    fn read_vectored(&mut self, bytes: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        each!(self, stream => stream.read_vectored(bytes))
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        each!(self, stream => stream.write(bytes))
    }

    fn write_vectored(&mut self, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
        each!(self, stream => stream.write_vectored(bytes))
    }

    /// Moves the bytes of [`Stream::holds_output`].
    fn flush(&mut self) -> io::Result<()> {
        let Stream::Secured(secured) = self else { return Ok(()) };
        if !secured.holds_output() {
            return Ok(());
        }
        secured.flush()?;
        match secured.has_ended() {
            true => self.shutdown(Shutdown::Write),
            false => Ok(()),
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        socket!(self, stream => stream.as_fd())
    }
}
