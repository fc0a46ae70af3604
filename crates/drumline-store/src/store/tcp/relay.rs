//! A door on this host to a store of another one.

use std::{
    io::{self, ErrorKind, Read as _, Write as _},
    net::SocketAddr,
    os::unix::net::UnixStream,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags};

use super::{
    connection::{Connection, Proof, Server, reach},
    door::Door,
    protocol::OPENING,
    service::Service,
};
use crate::{
    Error, Result,
    auth::{Level, Secret},
    net::{
        Endpoint,
        gate::Gate,
        poll::{Deadline, wait},
        stream::Stream,
    },
    store::interface::deadline_after,
};

/// Takes clients that know no secret at a door of this host, and carries what they say to a server that asks for
/// one.
///
/// A client of torch can prove nothing. So it must not meet a server that other hosts can reach. Every host of a job
/// opens such a door on loopback for it.
///
/// ```
/// # use drumline_store as drumline;
/// use std::time::Duration;
///
/// use drumline::{
///     auth::{Level, Secret},
///     store::{Store, tcp::{Door, Relay, TcpStore, TcpStoreServer}},
/// };
///
/// let secret = Secret::random()?;
/// let server = TcpStoreServer::bind_secured(&"tcp://127.0.0.1:0".parse().unwrap(), &secret)?;
///
/// let door = Door::Loopback { host: "127.0.0.1".into(), port: 0 };
/// let patience = Duration::from_secs(5);
/// let relay = Relay::open(&door, server.endpoint(), (&secret, Level::Auth), patience)?;
/// let port = relay.address().map_or(0, |address| address.port());
/// TcpStore::connect("127.0.0.1", port, patience)?.set("colour", b"green")?;
/// # Ok::<(), drumline::Error>(())
/// ```
#[derive(Debug)]
pub struct Relay {
    address: Option<SocketAddr>,
    /// When it ends, all threads end.
    _service: Service,
}

impl Relay {
    /// Opens `door`, whose clients become clients of the server at `endpoint`, which asks for this secret and has this
    /// level. The server must answer within `timeout`.
    ///
    /// # Errors
    ///
    /// [`Store`](drumline_error::ErrorKind::Store) if the server cannot be reached or does not know the secret, or if
    /// the door cannot be opened. [`Argument`](drumline_error::ErrorKind::Argument) if the door itself asks for a
    /// secret: its clients can connect to the server.
    pub fn open(
        door: &Door,
        endpoint: &Endpoint,
        (secret, level): (&Secret, Level),
        timeout: Duration,
    ) -> Result<Relay> {
        if door.secret().is_some() {
            let problem = "a relay is for clients without a secret".to_owned();
            return Err(Error::argument("Relay::open", problem));
        }
        let server = reach(endpoint, Proof::Secret(secret, level), timeout)?.1;
        let (gate, _) = super::host::open_door(door)?;
        let address = gate.address();
        let failed = |error| Error::io(format!("carry clients to {endpoint}"), error);
        let prepare = |stopped| {
            let work = Work { gate, server, stopped: Arc::new(stopped) };
            Ok(|| work.run())
        };
        let service = Service::start("drumline-relay", prepare).map_err(failed)?;
        Ok(Relay { address, _service: service })
    }

    /// The address of the door.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }
}

/// The thread at the door. It has a thread for each client: a host has few.
struct Work {
    gate: Gate,
    server: Server,
    /// Readable once everything must end.
    stopped: Arc<UnixStream>,
}

/// How long the server may take to answer a new client.
const ANSWER_MAX: Duration = Duration::from_secs(30);

impl Work {
    fn run(mut self) {
        let mut clients: Vec<JoinHandle<()>> = Vec::new();
        while let Ok(arrivals) = self.gate.admit(Instant::now()) {
            clients.retain(|client| !client.is_finished());
            for arrival in arrivals {
                let (server, stopped) = (self.server.clone(), Arc::clone(&self.stopped));
                let peer = arrival.stream.peer();
                let thread = thread::Builder::new().name("drumline-relay".into());
                match thread.spawn(move || carry(arrival.stream, &server, &stopped)) {
                    Ok(client) => clients.push(client),
                    Err(error) => tracing::warn!(peer, %error, "cannot carry a client"),
                }
            }
            let mut ready = [
                PollFd::new(&*self.stopped, PollFlags::IN),
                PollFd::new(&self.gate, PollFlags::IN),
            ];
            let deadline = self.gate.deadline().map_or(Deadline::Never, Deadline::At);
            match wait(&mut ready, deadline) {
                Ok(_) if ready[0].revents().is_empty() => {}
                Ok(_) => break,
                Err(error) => {
                    tracing::error!(%error, "a relay ends: the system has no events for it");
                    break;
                }
            }
        }
        for client in clients {
            let _ = client.join();
        }
    }
}

/// Carries bytes between a client and the server until one of them ends.
fn carry(mut client: Stream, server: &Server, stopped: &UnixStream) {
    let peer = client.peer();
    let mut remote = match Connection::reach(server, deadline_after(ANSWER_MAX)) {
        Ok(remote) => remote,
        Err(error) => {
            tracing::warn!(peer, server = %server.address, %error, "a client cannot be carried to its store");
            return;
        }
    };
    // The gate has taken these bytes off the stream.
    let mut there = Direction::holding(&OPENING);
    let mut back = Direction::holding(&[]);
    loop {
        let moved = there
            .advance(&mut client, &mut remote)
            .and_then(|moved| Ok(back.advance(&mut remote, &mut client)? || moved));
        match moved {
            Ok(_) if there.is_over && back.is_over => return,
            Ok(true) => continue,
            Ok(false) => {}
            Err(error) => {
                tracing::debug!(peer, %error, "the connection of a client has ended");
                return;
            }
        }
        let of_client = there.flag_of_source() | back.flag_of_sink(&client);
        let of_remote = back.flag_of_source() | there.flag_of_sink(&remote);
        let mut ready = [
            PollFd::new(stopped, PollFlags::IN),
            PollFd::new(&client, of_client),
            PollFd::new(&remote, of_remote),
        ];
        if wait(&mut ready, Deadline::Never).is_err() || !ready[0].revents().is_empty() {
            return;
        }
    }
}

/// How many bytes are under way in one direction.
const BYTES: usize = 64 << 10;

/// One direction of a connection.
struct Direction {
    bytes: Vec<u8>,
    /// The part of `bytes` that was read and not yet written.
    from: usize,
    to: usize,
    /// The source has ended.
    has_ended: bool,
    /// The end has been passed on.
    is_over: bool,
}

impl Direction {
    fn holding(first: &[u8]) -> Direction {
        let mut bytes = vec![0; BYTES];
        bytes[..first.len()].copy_from_slice(first);
        Direction { bytes, from: 0, to: first.len(), has_ended: false, is_over: false }
    }

    /// Reads once and writes once, as far as that is possible without waiting. Returns whether bytes moved.
    fn advance(&mut self, source: &mut Stream, sink: &mut Stream) -> io::Result<bool> {
        let mut moves = false;
        if self.from == self.to && !self.has_ended {
            match unless_blocked(source.read(&mut self.bytes))? {
                Some(0) => self.has_ended = true,
                Some(count) => (self.from, self.to) = (0, count),
                None => {}
            }
        }
        if self.from < self.to {
            if let Some(count) = unless_blocked(sink.write(&self.bytes[self.from..self.to]))? {
                self.from += count;
                moves = true;
            }
        } else if self.has_ended && !self.is_over {
            sink.end()?;
            self.is_over = true;
        }
        if sink.holds_output() {
            unless_blocked(sink.flush())?;
        }
        Ok(moves)
    }

    /// What to wait for at the source.
    fn flag_of_source(&self) -> PollFlags {
        match self.from == self.to && !self.has_ended {
            true => PollFlags::IN,
            false => PollFlags::empty(),
        }
    }

    /// What to wait for at the sink.
    fn flag_of_sink(&self, sink: &Stream) -> PollFlags {
        match self.from < self.to || sink.holds_output() {
            true => PollFlags::OUT,
            false => PollFlags::empty(),
        }
    }
}

fn unless_blocked<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(done) => Ok(Some(done)),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
