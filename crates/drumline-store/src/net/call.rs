//! Opens a connection to a [`Gate`](super::gate::Gate).

use std::{
    fmt,
    io::{self, ErrorKind, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    os::{fd::OwnedFd, unix::net::UnixStream},
    thread,
    time::{Duration, Instant},
};

use drumline_shm::{Credentials, Unforked, named};
use rustix::{
    event::PollFlags,
    io::Errno,
    net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with,
        sockopt::socket_error,
    },
    process::geteuid,
};

use super::{owner, sleep_until, stream::Stream};
use crate::auth::{Handshake, Hello, Refusal};

/// Where a socket listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A TCP address.
    Tcp(SocketAddr),
    /// The name of an abstract Unix socket.
    Unix(String),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(address) => address.fmt(f),
            Address::Unix(name) => write!(f, "unix:@{name}"),
        }
    }
}

/// Why a call failed.
#[derive(thiserror::Error)]
pub enum CallError {
    /// The system's error.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The other end is not the expected one. Calling again will not help.
    #[error("{0}")]
    Refused(String),
    /// The other end hung up before the handshake was over: it has died, or has too many callers. With the
    /// system's error, if there was one.
    #[error("it closed the connection during the handshake{}", after_colon(.0.as_ref()))]
    HungUp(Option<io::Error>),
}

impl fmt::Debug for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

fn after_colon(error: Option<&io::Error>) -> String {
    error.map_or_else(String::new, |error| format!(": {error}"))
}

impl From<Refusal> for CallError {
    fn from(refusal: Refusal) -> CallError {
        CallError::Refused(refusal.to_string())
    }
}

/// How long to wait before another attempt to connect to a busy Unix socket.
const PAUSE: Duration = Duration::from_millis(2);

/// Opens a connection. The connection does not block once it is open.
pub fn open(address: &Address, deadline: Instant) -> io::Result<Stream> {
    let stream = match address {
        Address::Tcp(address) => {
            let stream = tcp_socket(address)?;
            connect_tcp(&stream, address, deadline)?;
            // If nothing listens there, a connection from an ephemeral port can connect to itself.
            if stream.local_addr()? == stream.peer_addr()? {
                return Err(ErrorKind::ConnectionRefused.into());
            }
            Stream::Tcp(stream)
        }
        Address::Unix(name) => {
            let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
            let socket = Unforked::open(|| Ok(UnixStream::from(socket(AddressFamily::UNIX)?)))?;
            loop {
                match connect(&*socket, &address) {
                    Ok(()) => break,
                    Err(Errno::INTR) => {}
                    // Too many connections wait to be accepted. The system does not tell when there is room.
                    Err(Errno::AGAIN) => thread::sleep(PAUSE.min(time_left(deadline)?)),
                    Err(error) => return Err(named("connect")(error)),
                }
            }
            Stream::Unix(socket)
        }
    };
    stream.tune()?;
    Ok(stream)
}

/// Whether a process of this user listens at an abstract Unix socket, which only processes of this host and network reach.
/// Returns the connection, unless too many others wait to be accepted.
pub fn reach(name: &str) -> io::Result<Option<Option<Stream>>> {
    match open(&Address::Unix(name.to_owned()), Instant::now()) {
        Ok(stream) => Ok(check_answerer(&stream, false).is_ok().then_some(Some(stream))),
        Err(error) => match error.kind() {
            ErrorKind::TimedOut => Ok(Some(None)),
            ErrorKind::ConnectionRefused | ErrorKind::PermissionDenied => Ok(None),
            _ => Err(error),
        },
    }
}

/// A non-blocking socket for a connection to `address`.
pub(super) fn tcp_socket(address: &SocketAddr) -> io::Result<Unforked<TcpStream>> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    Unforked::open(|| Ok(TcpStream::from(socket(family)?)))
}

fn socket(family: AddressFamily) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(family, SocketType::STREAM, flags, None).map_err(named("socket"))
}

fn connect_tcp(stream: &TcpStream, address: &SocketAddr, deadline: Instant) -> io::Result<()> {
    loop {
        match connect(stream, address) {
            Ok(()) | Err(Errno::ISCONN) => return Ok(()),
            Err(Errno::INPROGRESS | Errno::ALREADY) => break,
            Err(Errno::INTR) => {}
            Err(error) => return Err(named("connect")(error)),
        }
    }
    loop {
        sleep_until(stream, PollFlags::OUT, deadline);
        socket_error(stream)??;
        match stream.peer_addr() {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == ErrorKind::NotConnected => time_left(deadline)?,
            Err(error) => return Err(error),
        };
    }
}

/// Goes through a handshake on a non-blocking connection. Returns the connection under the layer that
/// protects it from then on.
pub fn shake_hands(
    mut stream: Stream,
    mut handshake: Handshake,
    has_secret: bool,
    deadline: Instant,
) -> Result<Stream, CallError> {
    check_answerer(&stream, has_secret)?;
    while !shake(&mut stream, &mut handshake)? {
        time_left(deadline)?;
        let writes = !handshake.output().is_empty();
        sleep_until(&stream, if writes { PollFlags::OUT } else { PollFlags::IN }, deadline);
    }
    Ok(stream.under(handshake.take_layer())?)
}

/// Whether the other end can belong to this job, judging by what the kernel knows of it.
///
/// A Unix socket must be held by this process's user or by root. Without a secret, a TCP
/// connection must not leave this host.
///
/// # Errors
///
/// [`CallError::Refused`] says why it cannot. [`CallError::HungUp`] says that a TCP connection is gone
/// already, so the kernel no longer knows the other end.
pub(super) fn check_peer(stream: &Stream, has_secret: bool) -> Result<(), CallError> {
    let refusal = match stream {
        Stream::Unix(unix) => match Credentials::of_peer(unix) {
            Ok(peer) if peer.check().is_ok() => return Ok(()),
            Ok(peer) => format!(
                "it runs as user {}, this process as user {}; one job runs as one user",
                peer.uid,
                geteuid().as_raw()
            ),
            Err(error) => format!("the kernel does not say whose it is: {error}"),
        },
        Stream::Tcp(_) | Stream::Secured(_) if has_secret => return Ok(()),
        Stream::Tcp(_) | Stream::Secured(_) => match stream.peer_address() {
            Some(address) if address.ip().is_loopback() => return Ok(()),
            Some(_) => "it is on another host, and there is no secret: set DRUMLINE_SECRET or \
                        DRUMLINE_SECRET_FILE for all processes of the job"
                .to_owned(),
            None => return Err(CallError::HungUp(None)),
        },
    };
    Err(CallError::Refused(refusal))
}

/// Whether the process that has answered a call can belong to this job, as [`check_peer`] judges. Without a secret, the
/// port at which a TCP connection on loopback was answered must be held by this process's user or by root: any other user
/// may have been first to listen there.
///
/// # Errors
///
/// As for [`check_peer`]. [`CallError::Refused`] says which user holds the port.
pub(crate) fn check_answerer(stream: &Stream, has_secret: bool) -> Result<(), CallError> {
    check_peer(stream, has_secret)?;
    match stream {
        Stream::Tcp(tcp) if !has_secret => check_owner(tcp),
        _ => Ok(()),
    }
}

/// Whether a port of this host, at which a call was answered, is held by this process's user or by root.
pub(crate) fn check_owner(stream: &TcpStream) -> Result<(), CallError> {
    match owner::check_answerer(stream) {
        Ok(true) => Ok(()),
        Ok(false) => Err(CallError::HungUp(None)),
        Err(refusal) => Err(CallError::Refused(refusal)),
    }
}

/// Brings a handshake as far as possible without waiting. Returns whether it is over. If not, wait until the
/// stream can be written if the handshake has output, otherwise until it can be read.
pub(super) fn shake(stream: &mut Stream, handshake: &mut Handshake) -> Result<bool, CallError> {
    let mut bytes = [0; Hello::BYTES];
    loop {
        let end = match say(stream, handshake) {
            Ok(true) => None,
            Ok(false) => return Ok(false),
            // The other end has hung up. What it said before must still be read.
            Err(error) if is_end(&error) => Some(error),
            Err(error) => return Err(error.into()),
        };
        let wanted = handshake.wanted().min(bytes.len());
        if wanted == 0 {
            return if end.is_none() { Ok(true) } else { Err(CallError::HungUp(end)) };
        }
        match stream.read(&mut bytes[..wanted]) {
            Ok(0) => return Err(CallError::HungUp(end)),
            Ok(count) => {
                handshake.receive(&bytes[..count])?;
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock && end.is_none() => {
                return Ok(false);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                return Err(CallError::HungUp(end));
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if is_end(&error) => return Err(CallError::HungUp(Some(error))),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Writes the output of the handshake. Returns whether all of it is written; if not, the socket takes no more
/// now.
pub(super) fn say(stream: &mut Stream, handshake: &mut Handshake) -> io::Result<bool> {
    while !handshake.output().is_empty() {
        match stream.write(handshake.output()) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(bytes) => handshake.wrote(bytes),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => {
                handshake.take_output();
                return Err(error);
            }
        }
    }
    Ok(true)
}

fn is_end(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe)
}

/// The time until `deadline`. An error if none is left.
pub fn time_left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}
