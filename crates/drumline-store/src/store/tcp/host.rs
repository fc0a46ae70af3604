//! The thread that hosts a store: the server's state machine over non-blocking sockets, behind its
//! doors.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, ErrorKind, Read as _, Write as _},
    net::{Ipv4Addr, Shutdown, SocketAddr},
    os::{fd::OwnedFd, unix::net::UnixStream},
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use rustix::{
    buffer::spare_capacity,
    event::{Timespec, epoll},
    io::Errno,
};

use super::{
    connection,
    door::Door,
    protocol::OPENING,
    server::{ConnectionId, Server},
};
use crate::{
    Error, Result,
    auth::{Level, Secret},
    net::Endpoint,
    net::{
        call::Address,
        gate::{Arrival, Gate},
        stream::Stream,
        warnings::Warnings,
    },
    store::BYTES_MAX,
};

/// A store's server. It serves from a thread of its own until it is dropped.
///
/// ```
/// # use drumline_store as drumline;
/// use std::time::Duration;
///
/// use drumline::store::{Store, tcp::{TcpStore, TcpStoreServer}};
///
/// let server = TcpStoreServer::bind("127.0.0.1", 0)?;
/// let port = server.address().map_or(0, |address| address.port());
/// let store = TcpStore::connect("127.0.0.1", port, Duration::from_secs(5))?;
/// store.set("colour", b"green")?;
/// # Ok::<(), drumline::Error>(())
/// ```
#[derive(Debug)]
pub struct TcpStoreServer {
    /// One for each door.
    places: Vec<Place>,
    ranks: Arc<Ranks>,
    /// The thread ends when this end of the pair is shut.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
    /// The process of the thread. A fork has only a copy of this handle.
    process: u32,
}

/// Where a door is, and what clients must know there.
#[derive(Debug)]
struct Place {
    endpoint: Endpoint,
    address: Address,
    secret: Option<Secret>,
    level: Level,
}

impl TcpStoreServer {
    /// Starts a server for drumline's and torch's clients, who need no secret: therefore `host`
    /// must be loopback. Port 0 lets the system choose; [`TcpStoreServer::address`] tells which.
    ///
    /// ```
    /// # use drumline_store as drumline;
    /// use drumline::{store::tcp::TcpStoreServer};
    ///
    /// let server = TcpStoreServer::bind("127.0.0.1", 0)?;
    /// assert!(server.address().is_some());
    /// // Other machines could reach that one.
    /// assert!(TcpStoreServer::bind("0.0.0.0", 0).is_err());
    /// # Ok::<(), drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Store`] if `host` cannot be resolved or is not loopback, or if the port is in
    /// use. [`Error::Io`] if the system has no thread or descriptor left.
    pub fn bind(host: &str, port: u16) -> Result<TcpStoreServer> {
        TcpStoreServer::open(&[Door::Loopback { host: host.to_owned(), port }], BYTES_MAX)
    }

    /// As [`TcpStoreServer::bind`], on any one address of this machine: everybody who reaches it can
    /// read and write every key.
    ///
    /// It listens on exactly the address that `host` stands for, on no other interface. Of several
    /// addresses behind a name the first is taken that belongs to this machine.
    ///
    /// ```
    /// # use drumline_store as drumline;
    /// use drumline::{store::tcp::TcpStoreServer};
    ///
    /// let server = TcpStoreServer::bind_exposed("127.0.0.1", 0)?;
    /// assert!(server.address().is_some());
    /// # Ok::<(), drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`TcpStoreServer::bind`]; [`Error::Store`] if `host` is another machine.
    pub fn bind_exposed(host: &str, port: u16) -> Result<TcpStoreServer> {
        TcpStoreServer::open(&[Door::Exposed { host: host.to_owned(), port }], BYTES_MAX)
    }

    /// Starts a server for drumline's clients who know `secret`, on one address of this machine
    /// or on an abstract Unix socket.
    ///
    /// ```
    /// # use drumline_store as drumline;
    /// use std::time::Duration;
    ///
    /// use drumline::{
    ///     Endpoint,
    ///     auth::Secret,
    ///     store::{Store, tcp::{TcpStore, TcpStoreServer}},
    /// };
    ///
    /// let secret = Secret::random()?;
    /// let endpoint = Endpoint::Unix(format!("doc-example-{}", std::process::id()));
    /// let server = TcpStoreServer::bind_secured(&endpoint, &secret)?;
    /// let store = TcpStore::connect_secured(&endpoint, &secret, Duration::from_secs(5))?;
    /// store.set("colour", b"green")?;
    /// # Ok::<(), drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`TcpStoreServer::bind_exposed`]; [`Error::Store`] if the name is in use.
    pub fn bind_secured(endpoint: &Endpoint, secret: &Secret) -> Result<TcpStoreServer> {
        let (endpoint, secret) = (endpoint.clone(), secret.clone());
        let door = Door::Secured { endpoint, secret, level: Level::Auth };
        TcpStoreServer::open(&[door], BYTES_MAX)
    }

    /// Starts a server with several doors to one store, whose keys, values and queues may take
    /// `bytes_max` bytes together. See [`Door`].
    ///
    /// ```
    /// # use drumline_store as drumline;
    /// use drumline::{store::tcp::{Door, TcpStoreServer}};
    ///
    /// let doors = [
    ///     Door::Loopback { host: "127.0.0.1".into(), port: 0 },
    ///     Door::Loopback { host: "127.0.0.2".into(), port: 0 },
    /// ];
    /// let server = TcpStoreServer::open(&doors, 64 << 20)?;
    /// assert!(server.address().is_some());
    /// # Ok::<(), drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`TcpStoreServer::bind`], for any of the doors; none is open then.
    /// [`Error::InvalidArgument`] if there are no doors.
    pub fn open(doors: &[Door], bytes_max: usize) -> Result<TcpStoreServer> {
        if doors.is_empty() {
            let problem = "a store without a door; name at least one".to_owned();
            return Err(Error::InvalidArgument { operation: "TcpStoreServer::open", problem });
        }
        let mut gates = Vec::with_capacity(doors.len());
        let mut places = Vec::with_capacity(doors.len());
        for door in doors {
            let (gate, place) = open_door(door)?;
            gates.push(gate);
            places.push(place);
        }
        let failed = |error| Error::io(format!("host {}", places[0].endpoint), error);
        let (stop, stopped) = UnixStream::pair().map_err(failed)?;
        let ranks = Arc::new(Ranks::default());
        let server = Server::with_limit(bytes_max);
        let host = Host::new(gates, stopped, server, Arc::clone(&ranks)).map_err(failed)?;
        let thread = thread::Builder::new().name("drumline-store".into());
        let thread = Some(thread.spawn(|| host.run()).map_err(failed)?);
        Ok(TcpStoreServer { places, ranks, stop: Some(stop), thread, process: std::process::id() })
    }

    /// Where the server listens on TCP: at the first of its doors that does.
    ///
    /// ```
    /// # use drumline_store as drumline;
    /// use drumline::{store::tcp::TcpStoreServer};
    ///
    /// let server = TcpStoreServer::bind("127.0.0.1", 0)?;
    /// assert!(server.address().is_some_and(|address| address.port() != 0));
    /// # Ok::<(), drumline::Error>(())
    /// ```
    pub fn address(&self) -> Option<SocketAddr> {
        self.places.iter().find_map(|place| match place.address {
            Address::Tcp(address) => Some(address),
            Address::Unix(_) => None,
        })
    }

    /// What its first door was asked to listen on, with the port that it has got.
    ///
    /// ```
    /// # use drumline_store as drumline;
    /// use drumline::{store::tcp::TcpStoreServer};
    ///
    /// let server = TcpStoreServer::bind("127.0.0.1", 0)?;
    /// assert!(server.endpoint().to_string().starts_with("tcp://127.0.0.1:"));
    /// # Ok::<(), drumline::Error>(())
    /// ```
    pub fn endpoint(&self) -> &Endpoint {
        // There is always one.
        &self.places[0].endpoint
    }

    /// How a client in this process connects.
    pub(super) fn as_target(&self) -> connection::Server {
        let Place { address, secret, level, .. } = &self.places[0];
        let (address, secret) = (address.clone(), secret.clone());
        connection::Server { address, secret, level: *level, open: Arc::default() }
    }

    /// Waits until at most `count` connections of ranks are open, or until `deadline`. Tells
    /// which. After `warn_after` it says in the log who is awaited.
    pub(super) fn wait_for_departure(
        &self,
        count: impl Fn() -> usize,
        deadline: Instant,
        warn_after: Duration,
    ) -> bool {
        let start = Instant::now();
        let soon = start.checked_add(warn_after).map_or(deadline, |at| at.min(deadline));
        let Some(left) = self.ranks.wait_until_left(&count, soon) else { return true };
        if soon < deadline {
            tracing::warn!(
                store = %self.endpoint(),
                waited = ?start.elapsed(),
                left = left[..left.len().min(NAMED_MAX)].join(", "),
                connections = left.len(),
                "this process hosts the store and waits until those who still use it have left it \
                 (its own connections are among them)"
            );
            return self.ranks.wait_until_left(count, deadline).is_none();
        }
        false
    }
}

/// Opens the listening socket of `door`.
fn open_door(door: &Door) -> Result<(Gate, Place)> {
    let endpoint = door.endpoint();
    let listener = door.listen().map_err(|problem| Error::Store {
        store: endpoint.to_string(),
        operation: "listen".into(),
        problem,
    })?;
    let gate = Gate::new(listener, door.admission())
        .map_err(|error| Error::io(format!("host {endpoint}"), error))?;
    let (endpoint, address) = match endpoint {
        Endpoint::Unix(name) => (Endpoint::Unix(name.clone()), Address::Unix(name)),
        Endpoint::Tcp { host, port } => {
            let address = gate.address().unwrap_or((Ipv4Addr::UNSPECIFIED, port).into());
            (Endpoint::Tcp { host, port: address.port() }, Address::Tcp(address))
        }
    };
    let secret = door.secret().cloned();
    if let (Address::Tcp(address), None) = (&address, &secret)
        && !address.ip().is_loopback()
    {
        tracing::warn!(
            %address,
            "the store has no authentication: whoever can reach this address can read and change \
             what the ranks tell each other"
        );
    }
    Ok((gate, Place { endpoint, address, secret, level: door.level() }))
}

impl Drop for TcpStoreServer {
    /// Stops serving: every connection closes.
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // The parent's thread serves on, and there is none to wait for here.
            return;
        }
        // A fork may hold a copy of this end: closing it alone would tell the thread nothing.
        if let Some(stop) = self.stop.take() {
            let _ = stop.shutdown(Shutdown::Both);
        }
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!(store = %self.endpoint(), "the store's thread has panicked");
        }
    }
}

/// The open connections of ranks, for those who wait for them to end.
#[derive(Debug, Default)]
struct Ranks {
    /// Each with the name of its other end.
    present: Mutex<BTreeMap<ConnectionId, String>>,
    changed: Condvar,
}

impl Ranks {
    fn update(&self, ranks: &BTreeSet<ConnectionId>, name: impl Fn(ConnectionId) -> String) {
        let mut present = self.present.lock().unwrap_or_else(PoisonError::into_inner);
        if !present.keys().eq(ranks) {
            present.retain(|id, _| ranks.contains(id));
            for &id in ranks {
                present.entry(id).or_insert_with(|| name(id));
            }
            self.changed.notify_all();
        }
    }

    /// Waits until at most `count` are left, or until `deadline`. Who is left then.
    fn wait_until_left(&self, count: impl Fn() -> usize, deadline: Instant) -> Option<Vec<String>> {
        let present = self.present.lock().unwrap_or_else(PoisonError::into_inner);
        let patience = deadline.saturating_duration_since(Instant::now());
        let (present, _) = self
            .changed
            .wait_timeout_while(present, patience, |present| present.len() > count())
            .unwrap_or_else(PoisonError::into_inner);
        (present.len() > count()).then(|| present.values().cloned().collect())
    }
}

/// So many of those who are awaited are named.
const NAMED_MAX: usize = 16;

/// The most connections that a server has from people without a secret.
const STRANGERS_MAX: usize = 4096;

/// How many bytes are taken from one connection before the others have their turn.
const READ_BYTES: usize = 64 << 10;

/// How many events are taken from the kernel at once.
const EVENTS_MAX: usize = 256;

/// Stands for the wish to stop among the connections' numbers. The doors count down from here.
const STOP: u64 = u64::MAX;

/// What the thread owns. The kernel tells which connections have something to say, so that idle
/// ones cost nothing.
struct Host {
    epoll: OwnedFd,
    gates: Vec<Gate>,
    /// Open for as long as the thread is to live.
    _stopped: UnixStream,
    server: Server,
    streams: BTreeMap<ConnectionId, Stream>,
    /// Connections that take no more bytes at the moment.
    full: BTreeSet<ConnectionId>,
    ranks: Arc<Ranks>,
    /// Connections of those who have shown no secret.
    strangers: BTreeSet<ConnectionId>,
    warnings: Warnings,
    buffer: Vec<u8>,
}

/// What the kernel found.
#[derive(Default)]
struct Ready {
    stop: bool,
    gates: BTreeSet<usize>,
    readable: Vec<ConnectionId>,
    writable: BTreeSet<ConnectionId>,
}

impl Host {
    fn new(
        gates: Vec<Gate>,
        stopped: UnixStream,
        server: Server,
        ranks: Arc<Ranks>,
    ) -> io::Result<Host> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let token = epoll::EventData::new_u64;
        epoll::add(&epoll, &stopped, token(STOP), epoll::EventFlags::IN)?;
        for (gate, number) in gates.iter().zip((0..STOP).rev()) {
            epoll::add(&epoll, gate, token(number), epoll::EventFlags::IN)?;
        }
        Ok(Host {
            epoll,
            gates,
            _stopped: stopped,
            server,
            streams: BTreeMap::new(),
            full: BTreeSet::new(),
            ranks,
            strangers: BTreeSet::new(),
            warnings: Warnings::default(),
            buffer: vec![0; READ_BYTES],
        })
    }

    fn run(mut self) {
        if let Err(error) = self.serve() {
            tracing::error!(%error, "the store stops serving: the system has no events for it");
        }
    }

    /// Returns when it is to stop.
    fn serve(&mut self) -> io::Result<()> {
        loop {
            let ready = self.wait()?;
            if ready.stop {
                return Ok(());
            }
            for id in ready.readable {
                self.read(id);
            }
            for index in ready.gates {
                for arrival in self.gates[index].admit(Instant::now())? {
                    self.receive(arrival);
                }
            }
            // Before the replies leave, so that a client that has one is counted, and again
            // after, because writing closes what is broken.
            self.count_ranks();
            for id in ready.writable.union(&self.server.take_answered()) {
                self.write(*id)?;
            }
            for (id, refusal) in self.server.take_refused() {
                self.full.remove(&id);
                self.strangers.remove(&id);
                if let Some(stream) = self.streams.remove(&id)
                    && let Some(held_back) = self.warnings.admit(Instant::now())
                {
                    let (peer, refusal) = (stream.peer(), refusal.to_string());
                    tracing::warn!(peer, refusal, held_back, "the store closes a connection");
                }
            }
            self.count_ranks();
        }
    }

    fn wait(&self) -> io::Result<Ready> {
        let deadline = self.gates.iter().filter_map(Gate::deadline).min();
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        let mut events = Vec::with_capacity(EVENTS_MAX);
        match epoll::wait(&self.epoll, spare_capacity(&mut events), timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let mut ready = Ready::default();
        for event in events {
            let (number, flags) = (event.data.u64(), event.flags);
            let doors = STOP - self.gates.len() as u64..STOP;
            if number == STOP {
                ready.stop = true;
            } else if doors.contains(&number) {
                ready.gates.insert((STOP - 1 - number) as usize);
            } else {
                let id = ConnectionId(number);
                if flags.contains(epoll::EventFlags::OUT) {
                    ready.writable.insert(id);
                }
                if flags.difference(epoll::EventFlags::OUT) != epoll::EventFlags::empty() {
                    ready.readable.push(id);
                }
            }
        }
        // Guests may be out of time although nothing has arrived.
        let now = Instant::now();
        let is_late = |gate: &Gate| gate.deadline().is_some_and(|at| now >= at);
        let late = self.gates.iter().enumerate().filter(|(_, gate)| is_late(gate));
        ready.gates.extend(late.map(|(index, _)| index));
        Ok(ready)
    }

    fn receive(&mut self, Arrival { stream, hello }: Arrival) {
        let is_stranger = hello.is_none();
        if is_stranger && self.strangers.len() >= STRANGERS_MAX {
            if let Some(held_back) = self.warnings.admit(Instant::now()) {
                let peer = stream.peer();
                tracing::warn!(
                    peer,
                    held_back,
                    "the store takes no more than {STRANGERS_MAX} connections"
                );
            }
            return;
        }
        let id = match is_stranger {
            true => self.server.connect_stranger(),
            false => self.server.connect(),
        };
        if let Err(error) = epoll::add(&self.epoll, &stream, token(id), epoll::EventFlags::IN) {
            tracing::warn!(peer = stream.peer(), %error, "the store cannot take a connection");
            return self.server.disconnect(id);
        }
        self.streams.insert(id, stream);
        if is_stranger {
            self.strangers.insert(id);
            // The gate has heard it.
            self.server.receive(id, &OPENING);
        }
    }

    fn count_ranks(&self) {
        let name = |id| self.streams.get(&id).map_or_else(String::new, Stream::peer);
        self.ranks.update(self.server.ranks(), name);
    }

    fn read(&mut self, id: ConnectionId) {
        while let Some(stream) = self.streams.get_mut(&id) {
            match stream.read(&mut self.buffer) {
                Ok(0) => self.close(id),
                Ok(count) => self.server.receive(id, &self.buffer[..count]),
                Err(error) if is_transient(&error) => {}
                Err(error) => {
                    tell_of_end(stream, &error);
                    self.close(id);
                }
            }
            // The kernel tells of what is in the socket, and of nothing else.
            if !self.streams.get(&id).is_some_and(Stream::holds_input) {
                break;
            }
        }
    }

    /// Writes as much as the socket takes, and asks to be told when it takes the rest.
    fn write(&mut self, id: ConnectionId) -> io::Result<()> {
        let Some(stream) = self.streams.get_mut(&id) else { return Ok(()) };
        while !self.server.output(id).is_empty() {
            match stream.write(self.server.output(id)) {
                Ok(count) => self.server.written(id, count),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if self.full.insert(id) {
                        let both = epoll::EventFlags::IN | epoll::EventFlags::OUT;
                        epoll::modify(&self.epoll, stream, token(id), both)?;
                    }
                    return Ok(());
                }
                Err(error) => {
                    tell_of_end(stream, &error);
                    self.close(id);
                    return Ok(());
                }
            }
        }
        if self.full.remove(&id) {
            epoll::modify(&self.epoll, stream, token(id), epoll::EventFlags::IN)?;
        }
        Ok(())
    }

    fn close(&mut self, id: ConnectionId) {
        self.server.disconnect(id);
        self.full.remove(&id);
        self.strangers.remove(&id);
        // The kernel forgets a descriptor that is closed.
        self.streams.remove(&id);
    }
}

/// A process that has ended is nothing to warn of.
fn tell_of_end(stream: &Stream, error: &io::Error) {
    let peer = stream.peer();
    match error.kind() {
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
            tracing::debug!(peer, %error, "a connection has ended");
        }
        _ => tracing::warn!(peer, %error, "the store closes a connection"),
    }
}

fn token(id: ConnectionId) -> epoll::EventData {
    epoll::EventData::new_u64(id.0)
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}
