//! Opening a connection to a [`Gate`](super::gate::Gate).

use std::{
    fmt,
    io::{self, ErrorKind, Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs as _},
    os::{fd::OwnedFd, unix::net::UnixStream},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use drumline_shm::Unforked;
use rustix::{
    event::PollFlags,
    io::Errno,
    net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with,
        sockopt::socket_error,
    },
};

use super::{sleep_until, stream::Stream};
use crate::auth::{Handshake, Hello, Refusal};

/// Where a socket listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// An address of TCP.
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
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The system said so.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The other end is not who it should be. Calling again will not help.
    #[error("{0}")]
    Refused(String),
    /// It ended the call before the handshake was over: it has died, or has too many guests.
    #[error("it closed the connection during the handshake")]
    HungUp,
}

impl From<Refusal> for CallError {
    fn from(refusal: Refusal) -> CallError {
        CallError::Refused(refusal.to_string())
    }
}

/// How long to wait before another attempt to connect to a busy Unix socket.
const PAUSE: Duration = Duration::from_millis(2);

/// Opens a connection, without blocking once it is open.
pub fn open(address: &Address, deadline: Instant) -> io::Result<Stream> {
    let stream = match address {
        Address::Tcp(address) => {
            let stream = tcp_socket(address)?;
            connect_tcp(&stream, address, deadline)?;
            // Without a listener, a connection from an ephemeral port can meet itself.
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
                    // Too many are waiting to be accepted. Nothing tells when they are not.
                    Err(Errno::AGAIN) => thread::sleep(PAUSE.min(time_left(deadline)?)),
                    Err(error) => return Err(error.into()),
                }
            }
            Stream::Unix(socket)
        }
    };
    stream.tune()?;
    Ok(stream)
}

/// A socket for a connection to `address`, which does not block.
pub(super) fn tcp_socket(address: &SocketAddr) -> io::Result<Unforked<TcpStream>> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    Unforked::open(|| Ok(TcpStream::from(socket(family)?)))
}

fn socket(family: AddressFamily) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(family, SocketType::STREAM, flags, None)?)
}

fn connect_tcp(stream: &TcpStream, address: &SocketAddr, deadline: Instant) -> io::Result<()> {
    loop {
        match connect(stream, address) {
            Ok(()) | Err(Errno::ISCONN) => return Ok(()),
            Err(Errno::INPROGRESS | Errno::ALREADY) => break,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
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

/// Goes through a handshake over a connection that does not block, and returns the connection under
/// what protects it from then on.
pub fn shake_hands(
    mut stream: Stream,
    mut handshake: Handshake,
    has_secret: bool,
    deadline: Instant,
) -> Result<Stream, CallError> {
    if let Some(suspicion) = stream.suspicion(has_secret) {
        return Err(CallError::Refused(suspicion));
    }
    while !shake(&mut stream, &mut handshake)? {
        time_left(deadline)?;
        let writes = !handshake.output().is_empty();
        sleep_until(&stream, if writes { PollFlags::OUT } else { PollFlags::IN }, deadline);
    }
    Ok(stream.under(handshake.take_layer())?)
}

/// Brings a handshake as far as it goes without waiting. Whether it is over. If not, it waits until it can
/// write what it has to say, or else read.
pub(super) fn shake(stream: &mut Stream, handshake: &mut Handshake) -> Result<bool, CallError> {
    let mut bytes = [0; Hello::BYTES];
    loop {
        let hears = match say(stream, handshake) {
            Ok(true) => true,
            Ok(false) => return Ok(false),
            // It has hung up; what it said before is still to be read.
            Err(error) if is_end(&error) => false,
            Err(error) => return Err(error.into()),
        };
        let wanted = handshake.wanted().min(bytes.len());
        if wanted == 0 {
            return if hears { Ok(true) } else { Err(CallError::HungUp) };
        }
        match stream.read(&mut bytes[..wanted]) {
            Ok(0) => return Err(CallError::HungUp),
            Ok(count) => {
                handshake.receive(&bytes[..count])?;
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock && hears => return Ok(false),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Err(CallError::HungUp),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if is_end(&error) => return Err(CallError::HungUp),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Writes what the handshake has to say. Whether all is written; if not, the socket takes no more now.
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

/// The addresses that `host` stands for. Resolving has no time-out of its own: it runs aside, and
/// is left behind at the deadline.
pub fn resolve(host: &str, port: u16, deadline: Instant) -> io::Result<Vec<SocketAddr>> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(vec![(ip, port).into()]);
    }
    let (sender, receiver) = mpsc::channel();
    let name = host.to_owned();
    thread::Builder::new().name("drumline-resolve".into()).spawn(move || {
        let addresses = (name.as_str(), port).to_socket_addrs().map(Iterator::collect);
        // Nobody listens any more if it took too long.
        let _ = sender.send(addresses);
    })?;
    match receiver.recv_timeout(time_left(deadline)?) {
        Ok(addresses) => addresses,
        Err(_) => Err(io::Error::new(
            ErrorKind::TimedOut,
            format!("the name {host} could not be resolved in time"),
        )),
    }
}

/// What is left until `deadline`: an error if that is nothing.
pub fn time_left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}
