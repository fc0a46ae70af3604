//! The thread that hosts a store. It connects the server's state machine to non-blocking sockets, behind the
//! doors.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, ErrorKind, Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr},
    os::{fd::OwnedFd, unix::net::UnixStream},
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};

use drumline_shm::named;
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
    service::Service,
};
use crate::{
    Error, Result,
    auth::{Level, Secret},
    net::{
        Endpoint,
        call::Address,
        gate::{Arrival, Gate},
        site::called_here,
        stream::Stream,
        warnings::Warnings,
    },
    store::BYTES_MAX,
};

/// A store's server. It runs on a thread of its own until it is dropped.
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
    /// One place for each door.
    places: Vec<Place>,
    ranks: Arc<Ranks>,
    _service: Service,
}

/// The address of a door, and what clients must prove there.
#[derive(Debug)]
pub(super) struct Place {
    endpoint: Endpoint,
    address: Address,
    secret: Option<Secret>,
    level: Level,
}

impl TcpStoreServer {
    /// Starts a server for clients of drumline and of torch that have no secret. So `host` must be loopback.
    /// With port 0 the system chooses; [`TcpStoreServer::address`] has the result.
    ///
    /// # Errors
    ///
    /// [`Store`](drumline_error::ErrorKind::Store) if `host` cannot be resolved or is not loopback, or if the port is
    /// in use. [`Io`](drumline_error::ErrorKind::Io) if the system has no thread or descriptor left.
    pub fn bind(host: &str, port: u16) -> Result<TcpStoreServer> {
        TcpStoreServer::open(&[Door::Loopback { host: host.to_owned(), port }], BYTES_MAX)
    }

    /// Like [`TcpStoreServer::bind`], on any one address of this machine. Every process that can reach it can
    /// read and write every key.
    ///
    /// It listens only on the address to which `host` resolves. If a name has several addresses of this machine, or
    /// only loopback, as Debian gives to a machine's own name, it listens on all of this machine's addresses.
    ///
    /// # Errors
    ///
    /// As for [`TcpStoreServer::bind`]; [`Store`](drumline_error::ErrorKind::Store) if `host` is another machine.
    pub fn bind_exposed(host: &str, port: u16) -> Result<TcpStoreServer> {
        TcpStoreServer::open(&[Door::Exposed { host: host.to_owned(), port }], BYTES_MAX)
    }

    /// Starts a server for clients of drumline that know `secret`, on one address of this machine or on an
    /// abstract Unix socket.
    ///
    /// # Errors
    ///
    /// As for [`TcpStoreServer::bind_exposed`]; [`Store`](drumline_error::ErrorKind::Store) if the name is in use.
    pub fn bind_secured(endpoint: &Endpoint, secret: &Secret) -> Result<TcpStoreServer> {
        let (endpoint, secret) = (endpoint.clone(), secret.clone());
        let door = Door::Secured { endpoint, secret, level: Level::Auth };
        TcpStoreServer::open(&[door], BYTES_MAX)
    }

    /// Starts a server with several doors to one store. Its keys, values and queues may take `bytes_max`
    /// bytes together. See [`Door`].
    ///
    /// # Errors
    ///
    /// As for [`TcpStoreServer::bind`], for any of the doors; then none of them is open.
    /// [`Argument`](drumline_error::ErrorKind::Argument) if there are no doors.
    pub fn open(doors: &[Door], bytes_max: usize) -> Result<TcpStoreServer> {
        if doors.is_empty() {
            let problem = "a store without a door; name at least one".to_owned();
            return Err(Error::argument("TcpStoreServer::open", problem));
        }
        let mut gates = Vec::with_capacity(doors.len());
        let mut places = Vec::with_capacity(doors.len());
        for door in doors {
            let (gate, place) = open_door(door)?;
            gates.push(gate);
            places.push(place);
        }
        let failed = |error| Error::io(format!("host {}", places[0].endpoint), error);
        let ranks = Arc::new(Ranks::default());
        let server = Server::with_limit(bytes_max);
        let prepare = |stopped| {
            let host = Host::new(gates, stopped, server, Arc::clone(&ranks))?;
            Ok(|| host.run())
        };
        let service = Service::start("drumline-store", prepare).map_err(failed)?;
        Ok(TcpStoreServer { places, ranks, _service: service })
    }

    /// The TCP address of the server: that of its first door with one. If the door is at all addresses of this machine,
    /// loopback.
    pub fn address(&self) -> Option<SocketAddr> {
        self.places.iter().find_map(|place| match place.address {
            Address::Tcp(address) => Some(address),
            Address::Unix(_) => None,
        })
    }

    /// The endpoint of its first door, with the actual port.
    pub fn endpoint(&self) -> &Endpoint {
        // There is at least one door.
        &self.places[0].endpoint
    }

    /// The endpoints of all its doors, in their order, with the actual ports.
    pub fn endpoints(&self) -> impl ExactSizeIterator<Item = &Endpoint> {
        self.places.iter().map(|place| &place.endpoint)
    }

    /// How a client in this process connects to the server.
    pub(super) fn as_target(&self) -> connection::Server {
        let Place { address, secret, level, .. } = &self.places[0];
        let (address, secret) = (address.clone(), secret.clone());
        // This process itself listens there.
        let may_be_anyones = true;
        connection::Server { address, secret, level: *level, may_be_anyones, open: Arc::default() }
    }

    /// Waits until at most `count` connections of ranks are open, or until `deadline`. Returns whether that
    /// many are left. After `warn_after`, logs which ranks are awaited.
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
pub(super) fn open_door(door: &Door) -> Result<(Gate, Place)> {
    let endpoint = door.endpoint();
    let listener =
        door.listen().map_err(|problem| Error::store(&endpoint.to_string(), "listen", problem))?;
    let gate = Gate::new(listener, door.admission())
        .map_err(|error| Error::io(format!("host {endpoint}"), error))?;
    let bound = gate.address();
    let (endpoint, address) = match endpoint {
        Endpoint::Unix(name) => (Endpoint::Unix(name.clone()), Address::Unix(name)),
        Endpoint::Tcp { host, port } => {
            let address = bound.unwrap_or((Ipv4Addr::UNSPECIFIED, port).into());
            let port = address.port();
            (Endpoint::Tcp { host, port }, Address::Tcp(called_here(address)))
        }
    };
    let secret = door.secret().cloned();
    if let (Some(address), None) = (bound, &secret)
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

/// The open connections of ranks, for callers that wait for them to end.
#[derive(Debug, Default)]
struct Ranks {
    /// The connections, with the names of their other ends.
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

    /// Waits until at most `count` are left, or until `deadline`. If more are left, returns their names.
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

/// The most ranks that a warning names.
const NAMED_MAX: usize = 16;

/// The most connections of clients without a secret.
const STRANGERS_MAX: usize = 4096;

/// How many bytes are read from one connection before the others have their turn.
const READ_BYTES: usize = 64 << 10;

/// How many events are taken from the kernel at a time.
const EVENTS_MAX: usize = 256;

/// The key of the stop event among the connections' numbers. The keys of doors count down from here.
const STOP: u64 = u64::MAX;

/// The state of the thread. The kernel tells which connections are ready, so idle connections cost nothing.
struct Host {
    epoll: OwnedFd,
    gates: Vec<Gate>,
    /// Kept open while the thread runs.
    _stopped: UnixStream,
    server: Server,
    streams: BTreeMap<ConnectionId, Stream>,
    /// Connections that take no more bytes at the moment.
    full: BTreeSet<ConnectionId>,
    ranks: Arc<Ranks>,
    /// Connections of clients that have proven no secret.
    strangers: BTreeSet<ConnectionId>,
    warnings: Warnings,
    buffer: Vec<u8>,
}

/// The events that the kernel reported.
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
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(named("epoll_create1"))?;
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

    /// Runs until the thread must stop.
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
            // Counted before replies are written, so that a client with a reply is counted, and again
            // afterwards, because writing closes broken connections.
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
        // The time of guests may be over although nothing has arrived.
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
            // The gate has read these bytes.
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
            // The kernel reports only what is in the socket, not what the stream holds.
            if !self.streams.get(&id).is_some_and(Stream::holds_input) {
                break;
            }
        }
    }

    /// Writes as much as the socket takes. If it takes no more, asks to be told when it does.
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
        // The kernel forgets a closed descriptor.
        self.streams.remove(&id);
    }
}

/// Logs the end of a connection. The end of a process is no warning.
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
