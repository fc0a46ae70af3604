//! A connection, whatever carries it.

use std::{
    io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    time::Duration,
};

use drumline_shm::Unforked;
use rustix::{net::sockopt, process::geteuid};

use super::pacing;
use crate::{
    auth::Level,
    secured::{Layer, Secured},
};

/// A connection to another process. A fork of this process has no part in it: while it lives, the other
/// end would not see that this one has died.
#[derive(Debug)]
pub enum Stream {
    /// Over TCP.
    Tcp(Unforked<TcpStream>),
    /// Over a Unix socket.
    Unix(Unforked<UnixStream>),
    /// Over TCP, at a level above `auth`.
    Secured(Box<Secured<Unforked<TcpStream>>>),
}

/// What one call of the same name on any kind of stream returns.
macro_rules! each {
    ($stream:expr, $inner:ident => $call:expr) => {
        match $stream {
            Stream::Tcp($inner) => $call,
            Stream::Unix($inner) => $call,
            Stream::Secured($inner) => $call,
        }
    };
}

/// The same on the socket itself.
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
    /// At which level such a stream is used where `wanted` is set: a Unix socket needs none above
    /// `auth`, since the kernel keeps other users out.
    pub fn level(&self, wanted: Level) -> Level {
        match self {
            Stream::Unix(_) => Level::Auth,
            Stream::Tcp(_) | Stream::Secured(_) => wanted,
        }
    }

    /// The same under the layer that its handshake has made, if it has made one.
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

    /// Nothing more will be written.
    pub fn end(&mut self) -> io::Result<()> {
        if let Stream::Secured(secured) = self {
            secured.end()?;
            if !secured.has_ended() {
                // A flush says the rest.
                return Ok(());
            }
        }
        self.shutdown(Shutdown::Write)
    }

    /// Whether a flush has something to move.
    pub fn holds_output(&self) -> bool {
        matches!(self, Stream::Secured(secured) if secured.holds_output())
    }

    /// Whether a read finds something that has left the socket already.
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

    /// Once it is connected: small messages leave at once, as they always do over Unix sockets.
    pub fn tune(&self) -> io::Result<()> {
        let Some(stream) = self.tcp() else { return Ok(()) };
        pacing::settle(stream);
        stream.set_nodelay(true)
    }

    /// The address at the other end of a TCP connection.
    pub fn peer_address(&self) -> Option<SocketAddr> {
        self.tcp().and_then(|stream| stream.peer_addr().ok())
    }

    /// The other end, for people.
    pub fn peer(&self) -> String {
        match (self, self.peer_address()) {
            (Stream::Tcp(_) | Stream::Secured(_), Some(address)) => address.to_string(),
            (Stream::Tcp(_) | Stream::Secured(_), None) => "a connection that is gone".to_owned(),
            (Stream::Unix(stream), _) => match sockopt::socket_peercred(stream) {
                Ok(peer) => format!("process {} of this host", peer.pid),
                Err(_) => "a process of this host".to_owned(),
            },
        }
    }

    /// Why the other end cannot belong to this job, as far as the kernel knows who it is.
    ///
    /// A Unix socket must be held by this process's user or by root. Without a secret, a TCP
    /// connection must not leave this host.
    pub fn suspicion(&self, has_secret: bool) -> Option<String> {
        match self {
            Stream::Unix(stream) => match sockopt::socket_peercred(stream) {
                Ok(peer) if peer.uid == geteuid() || peer.uid.is_root() => None,
                Ok(peer) => Some(format!(
                    "it runs as user {}, this process as user {}; one job runs as one user",
                    peer.uid.as_raw(),
                    geteuid().as_raw()
                )),
                Err(error) => Some(format!("the kernel does not say whose it is: {error}")),
            },
            Stream::Tcp(_) | Stream::Secured(_) if has_secret => None,
            Stream::Tcp(_) | Stream::Secured(_) => match self.peer_address() {
                Some(address) if address.ip().is_loopback() => None,
                _ => Some(
                    "it is on another host, and there is no secret: set DRUMLINE_SECRET or \
                     DRUMLINE_SECRET_FILE for all processes of the job"
                        .to_owned(),
                ),
            },
        }
    }

    /// Lets the kernel find out that the peer's host is silent although nothing is being sent.
    ///
    /// The kernel asks after 1 s of silence and again 1 s later, and gives up 1 s after that: 3 s
    /// after the last sign of life, or up to a tenth of a second more, as its timers are coarse. The
    /// peer's kernel answers, so a process that is stopped or busy does not count as silent. Every
    /// answer starts the time anew, so a cable that is pulled is noticed 2 to 3.1 s later. With one
    /// question less, a single lost packet would end a job.
    ///
    /// While something is unacknowledged the kernel asks no such questions, so that has a limit of
    /// its own, 2.25 s after the first repetition: so a rank that waits sends a beat ten times a second,
    /// and notices within 2.6 s. (With 2 s or less, the kernel would give up after one unanswered
    /// question.) The limit is for control connections only, because Linux also applies it to a
    /// peer that acknowledges but takes nothing (a window of zero), and being held up in this way
    /// is normal for data.
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

/// Whether `error` on a connection that was up means that the other host no longer answers, as
/// opposed to a process that has ended.
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

    /// Moves what [`Stream::holds_output`].
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
