//! A plain stream between two ranks, to measure what a link carries.

use std::{
    fs::File,
    io::{self, ErrorKind, Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    os::{
        fd::OwnedFd,
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr as UnixAddress, UnixListener, UnixStream},
    },
    time::{Duration, Instant},
};

use drumline::{Config, Objects, ProcessGroup};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::{Errno, ioctl_fionbio},
};

use super::choice::Transport;
use crate::{Error, Result};

/// The time limit for the next bytes, far longer than any stream needs.
const PATIENCE: Duration = Duration::from_secs(20);

/// One end of a plain stream.
#[derive(Debug)]
pub(super) struct PlainStream {
    /// A connected socket that does not block. `File` reads and writes a socket of either family.
    socket: File,
    outgoing: Vec<u8>,
    incoming: Vec<u8>,
}

impl PlainStream {
    /// Connects rank 0 and `other`; all other ranks get `None`. Rank 0 sends a random word through
    /// `group` and accepts the stream that begins with this word.
    pub(super) fn open(
        group: &ProcessGroup,
        other: usize,
        transport: Transport,
    ) -> Result<Option<PlainStream>> {
        let (listener, address) = match (group.rank(), transport) {
            (0, Transport::Unix) => Listener::unix(),
            (0, _) => Listener::tcp(group.config()),
            _ => Ok((Listener::Nowhere, String::new())),
        }
        .map_err(Error::system("listen for a plain stream"))?;
        let mut invitation = (address, word());
        group.broadcast_object(&mut invitation, 0).map_err(Error::Measure)?;
        let (address, word) = invitation;
        let socket = match group.rank() {
            0 => Some(listener.accept(word).map_err(Error::system("accept a plain stream"))?),
            rank if rank == other => {
                let failed = Error::system(format!("call {address} for a plain stream"));
                Some(call(&address, word, transport).map_err(failed)?)
            }
            _ => None,
        };
        group.barrier().map_err(Error::Measure)?;
        let stream = |socket| PlainStream { socket, outgoing: Vec::new(), incoming: Vec::new() };
        Ok(socket.map(stream))
    }

    /// Sends and receives `bytes` bytes at the same time.
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
                let mut flags = PollFlags::empty();
                flags.set(PollFlags::OUT, sent < bytes);
                flags.set(PollFlags::IN, received < bytes);
                wait(&self.socket, flags, PATIENCE)?;
            }
        }
        Ok(start.elapsed())
    }
}

/// Makes one step unless everything is done. Returns whether bytes moved.
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

fn wait(socket: &File, flags: PollFlags, patience: Duration) -> io::Result<()> {
    let patience = Timespec::try_from(patience).ok();
    match poll(&mut [PollFd::new(socket, flags)], patience.as_ref()) {
        Ok(0) => Err(ErrorKind::TimedOut.into()),
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
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
    /// Listens where the group does, or on loopback, if it is on one host.
    fn tcp(config: &Config) -> io::Result<(Listener, String)> {
        let address = config.bind_addresses.first().copied();
        let address = address.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let ports = config.port_range.clone().unwrap_or(0..=0);
        let mut tried = ports.map(|port| TcpListener::bind((address, port)));
        let listener = tried.find(|it| it.is_ok()).unwrap_or(Err(ErrorKind::AddrInUse.into()))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?.to_string();
        Ok((Listener::Tcp(listener), address))
    }

    /// Listens at an abstract name, which is not in the file system.
    fn unix() -> io::Result<(Listener, String)> {
        let name = format!("drumline-bench-{}", std::process::id());
        let listener = UnixListener::bind_addr(&UnixAddress::from_abstract_name(&name)?)?;
        listener.set_nonblocking(true)?;
        Ok((Listener::Unix(listener), name))
    }

    /// The first caller that sends `word`.
    fn accept(self, word: Word) -> io::Result<File> {
        let start = Instant::now();
        loop {
            let caller = match &self {
                Listener::Tcp(listener) => listener.accept().and_then(|(it, _)| tcp(it)),
                Listener::Unix(listener) => listener.accept().and_then(|(it, _)| socket(it)),
                Listener::Nowhere => Err(ErrorKind::NotConnected.into()),
            };
            match caller {
                Ok(mut socket) => {
                    if says(&mut socket, word) {
                        return Ok(socket);
                    }
                }
                Err(error)
                    if error.kind() == ErrorKind::WouldBlock && start.elapsed() < PATIENCE =>
                {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(error) => return Err(error),
            }
        }
    }
}

fn tcp(stream: TcpStream) -> io::Result<File> {
    stream.set_nodelay(true)?;
    socket(stream)
}

fn socket(stream: impl Into<OwnedFd>) -> io::Result<File> {
    let socket = File::from(stream.into());
    ioctl_fionbio(&socket, true)?;
    Ok(socket)
}

/// Whether the caller sends `word`, with at most a second between two bytes.
fn says(caller: &mut File, word: Word) -> bool {
    let mut said = Word::default();
    let mut len = 0;
    while len < said.len() {
        let ready = wait(caller, PollFlags::IN, Duration::from_secs(1));
        match ready.and_then(|()| advance(&mut len, word.len(), |at| caller.read(&mut said[at..])))
        {
            Ok(_) => {}
            Err(_) => return false,
        }
    }
    said == word
}

fn call(address: &str, word: Word, transport: Transport) -> io::Result<File> {
    let mut socket = match (transport, address.parse::<SocketAddr>()) {
        (Transport::Unix, _) => {
            socket(UnixStream::connect_addr(&UnixAddress::from_abstract_name(address)?)?)?
        }
        (_, Ok(address)) => tcp(TcpStream::connect_timeout(&address, PATIENCE)?)?,
        (_, Err(_)) => return Err(ErrorKind::InvalidInput.into()),
    };
    // The socket buffer is empty, so the word goes in one piece.
    socket.write_all(&word)?;
    Ok(socket)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn streams(transport: Transport) -> Vec<Option<PlainStream>> {
        let groups = drumline::rendezvous::local_world(3).unwrap();
        std::thread::scope(|threads| {
            let ranks: Vec<_> = groups
                .into_iter()
                .map(|group| {
                    threads.spawn(move || {
                        let mut stream = PlainStream::open(&group, 2, transport).unwrap();
                        if let Some(stream) = &mut stream {
                            // More than the buffers of the system hold, both ways.
                            stream.both_ways(8 << 20).unwrap();
                            assert!(stream.incoming.iter().all(|byte| *byte == 1));
                        }
                        stream
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn a_stream_joins_two_ranks_and_carries_both_ways_at_once() {
        for transport in [Transport::Unix, Transport::Tcp] {
            let ends: Vec<bool> = streams(transport).iter().map(Option::is_some).collect();
            assert_eq!(ends, [true, false, true], "{transport}");
        }
    }

    #[test]
    fn strangers_are_turned_away() {
        let hears = |said: &[u8]| {
            let (caller, door) = UnixStream::pair().unwrap();
            (&caller).write_all(said).unwrap();
            drop(caller);
            says(&mut socket(door).unwrap(), [8; 16])
        };
        assert!(hears(&[8; 16]) && !hears(&[7; 16]) && !hears(&[8; 15]));
    }
}
