//! A plain stream between two ranks, to measure what a link carries.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr as UnixAddress, UnixListener, UnixStream},
    },
    time::{Duration, Instant},
};

use drumline::{Config, ProcessGroup};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::choice::Transport;
use crate::Error;

/// More than any stream needs for its next bytes.
const PATIENCE: Duration = Duration::from_secs(20);

/// One end of a plain stream.
#[derive(Debug)]
pub(super) struct PlainStream {
    socket: Socket,
    outgoing: Vec<u8>,
    incoming: Vec<u8>,
}

#[derive(Debug)]
enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl PlainStream {
    /// Connects rank 0 and `other`; all other ranks get `None`. Rank 0 sends a random word through
    /// `group` and accepts the stream that begins with this word.
    pub(super) fn open(
        group: &ProcessGroup,
        other: usize,
        transport: Transport,
        config: &Config,
    ) -> crate::Result<Option<PlainStream>> {
        let (listener, address) = match (group.rank(), transport) {
            (0, Transport::Unix) => Listener::unix()?,
            (0, _) => Listener::tcp(config)?,
            _ => (Listener::Nowhere, String::new()),
        };
        let mut invitation = (address, word());
        group.broadcast_object(&mut invitation, 0).map_err(Error::Measure)?;
        let (address, word) = invitation;
        let socket = match group.rank() {
            0 => Some(listener.accept(word)?),
            rank if rank == other => Some(call(&address, word, transport)?),
            _ => None,
        };
        group.barrier().map_err(Error::Measure)?;
        let stream = |socket| PlainStream { socket, outgoing: Vec::new(), incoming: Vec::new() };
        Ok(socket.map(stream))
    }

    /// Sends and receives that many bytes at once.
    pub(super) fn both_ways(&mut self, bytes: usize) -> io::Result<Duration> {
        self.outgoing.resize(bytes.max(self.outgoing.len()), 1);
        self.incoming.resize(self.outgoing.len(), 0);
        let start = Instant::now();
        let (mut sent, mut received) = (0, 0);
        while sent < bytes || received < bytes {
            let progress =
                advance(&mut sent, bytes, |at| self.socket.write(&self.outgoing[at..bytes]))?
                    | advance(&mut received, bytes, |at| {
                        self.socket.read(&mut self.incoming[at..bytes])
                    })?;
            if !progress {
                self.socket.wait(sent < bytes, received < bytes)?;
            }
        }
        Ok(start.elapsed())
    }
}

/// Makes one step unless all is done, and returns whether bytes moved.
fn advance(
    done: &mut usize,
    all: usize,
    mut step: impl FnMut(usize) -> io::Result<usize>,
) -> io::Result<bool> {
    if *done == all {
        return Ok(false);
    }
    match step(*done) {
        Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
        Ok(count) => {
            *done += count;
            Ok(true)
        }
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

impl Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(stream) => stream.write(bytes),
            Socket::Unix(stream) => stream.write(bytes),
        }
    }

    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(stream) => stream.read(bytes),
            Socket::Unix(stream) => stream.read(bytes),
        }
    }

    fn wait(&self, to_write: bool, to_read: bool) -> io::Result<()> {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::OUT, to_write);
        flags.set(PollFlags::IN, to_read);
        let mut ready = [match self {
            Socket::Tcp(stream) => PollFd::new(stream, flags),
            Socket::Unix(stream) => PollFd::new(stream, flags),
        }];
        let patience = Timespec::try_from(PATIENCE).ok();
        match poll(&mut ready, patience.as_ref()) {
            Ok(0) => Err(ErrorKind::TimedOut.into()),
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn unblocked(self) -> io::Result<Socket> {
        match &self {
            Socket::Tcp(stream) => {
                stream.set_nodelay(true)?;
                stream.set_nonblocking(true)?;
            }
            Socket::Unix(stream) => stream.set_nonblocking(true)?,
        }
        Ok(self)
    }
}

/// The first bytes of the right caller. All other callers are turned away.
type Word = [u8; 16];

/// Where rank 0 waits for the other end; `Nowhere` on other ranks.
enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
    Nowhere,
}

impl Listener {
    fn tcp(config: &Config) -> crate::Result<(Listener, String)> {
        let failed = || Error::system("listen for a plain stream");
        let socket = TcpListener::bind((own_address(config), 0)).map_err(failed())?;
        socket.set_nonblocking(true).map_err(failed())?;
        let address = socket.local_addr().map_err(failed())?.to_string();
        Ok((Listener::Tcp(socket), address))
    }

    /// At an abstract name, which is no file.
    fn unix() -> crate::Result<(Listener, String)> {
        let failed = || Error::system("listen for a plain stream");
        let name = format!("drumline-bench-{}", std::process::id());
        let address = UnixAddress::from_abstract_name(&name).map_err(failed())?;
        let socket = UnixListener::bind_addr(&address).map_err(failed())?;
        socket.set_nonblocking(true).map_err(failed())?;
        Ok((Listener::Unix(socket), name))
    }

    /// The first caller that sends `word`.
    fn accept(self, word: Word) -> crate::Result<Socket> {
        let failed = || Error::system("accept a plain stream");
        let deadline = Instant::now() + PATIENCE;
        loop {
            let stream = match &self {
                Listener::Tcp(socket) => socket.accept().map(|(stream, _)| Socket::Tcp(stream)),
                Listener::Unix(socket) => socket.accept().map(|(stream, _)| Socket::Unix(stream)),
                Listener::Nowhere => Err(ErrorKind::NotConnected.into()),
            };
            match stream {
                Ok(stream) => {
                    if let Some(stream) = hear(stream, word) {
                        return stream.unblocked().map_err(failed());
                    }
                }
                Err(error)
                    if error.kind() == ErrorKind::WouldBlock && Instant::now() < deadline =>
                {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(error) => return Err(failed()(error)),
            }
        }
    }
}

fn hear(mut stream: Socket, word: Word) -> Option<Socket> {
    let patience = Some(Duration::from_secs(1));
    match &stream {
        Socket::Tcp(stream) => {
            stream.set_nonblocking(false).ok()?;
            stream.set_read_timeout(patience).ok()?;
        }
        Socket::Unix(stream) => {
            stream.set_nonblocking(false).ok()?;
            stream.set_read_timeout(patience).ok()?;
        }
    }
    let mut said = Word::default();
    let mut len = 0;
    while len < said.len() {
        match stream.read(&mut said[len..]) {
            Ok(count) if count > 0 => len += count,
            _ => return None,
        }
    }
    (said == word).then_some(stream)
}

fn call(address: &str, word: Word, transport: Transport) -> crate::Result<Socket> {
    let failed = || Error::system(format!("call {address} for a plain stream"));
    let stream = match (transport, address.parse::<SocketAddr>()) {
        (Transport::Unix, _) => UnixAddress::from_abstract_name(address)
            .and_then(|address| UnixStream::connect_addr(&address))
            .map(Socket::Unix),
        (_, Ok(address)) => TcpStream::connect_timeout(&address, PATIENCE).map(Socket::Tcp),
        (_, Err(_)) => Err(ErrorKind::InvalidInput.into()),
    };
    let mut stream = stream.map_err(failed())?;
    // The socket buffer is empty, so the word goes in one piece.
    stream.write(&word).map_err(failed())?;
    stream.unblocked().map_err(failed())
}

/// 128 random bits: the hasher's keys come from the operating system.
fn word() -> Word {
    use std::hash::{BuildHasher, Hasher, RandomState};
    let half = || RandomState::new().build_hasher().finish().to_le_bytes();
    let mut word = Word::default();
    word[..8].copy_from_slice(&half());
    word[8..].copy_from_slice(&half());
    word
}

/// The address at which other ranks reach this one: the configured one, else the local address of the
/// route to `MASTER_ADDR`.
fn own_address(config: &Config) -> IpAddr {
    let towards_master = || {
        let master = std::env::var("MASTER_ADDR").ok()?;
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
        // Sends nothing: the system only looks up the route.
        socket.connect((master.as_str(), 9)).ok()?;
        Some(socket.local_addr().ok()?.ip())
    };
    let configured = config.bind_addresses.first().copied();
    configured.or_else(towards_master).unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(transport: Transport) -> Vec<Option<PlainStream>> {
        let groups = ProcessGroup::local_world(3).unwrap();
        std::thread::scope(|threads| {
            let ranks: Vec<_> = groups
                .into_iter()
                .map(|group| {
                    threads.spawn(move || {
                        let mut line =
                            PlainStream::open(&group, 2, transport, &Config::default()).unwrap();
                        if let Some(line) = &mut line {
                            // More than the buffers of the system hold, both ways.
                            line.both_ways(8 << 20).unwrap();
                            assert!(line.incoming.iter().all(|byte| *byte == 1));
                        }
                        line
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn a_line_joins_two_ranks_and_carries_both_ways_at_once() {
        for transport in [Transport::Unix, Transport::Tcp] {
            let ends: Vec<bool> = lines(transport).iter().map(Option::is_some).collect();
            assert_eq!(ends, [true, false, true], "{transport}");
        }
    }

    #[test]
    fn strangers_are_turned_away() {
        let (stranger, door) = UnixStream::pair().unwrap();
        (&stranger).write_all(&[7; 16]).unwrap();
        assert!(hear(Socket::Unix(door), [8; 16]).is_none());
        let (friend, door) = UnixStream::pair().unwrap();
        (&friend).write_all(&[8; 16]).unwrap();
        assert!(hear(Socket::Unix(door), [8; 16]).is_some());
    }
}
