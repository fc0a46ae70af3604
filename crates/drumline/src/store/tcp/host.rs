//! The thread that hosts a store: the server's state machine over non-blocking sockets, behind a
//! gate.

use std::{
    collections::BTreeMap,
    io::{self, ErrorKind, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs as _},
    os::unix::net::UnixStream,
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread::{self, JoinHandle},
    time::Instant,
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{
    connection,
    server::{ConnectionId, Server},
};
use crate::{
    Endpoint, Error, Result,
    auth::{Expected, Hello, Secret},
    net::{
        call::Address,
        gate::{Admission, Gate, Listener},
        stream::Stream,
    },
};

/// A store's server. It serves from a thread of its own until it is dropped.
///
/// ```
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
    endpoint: Endpoint,
    address: Address,
    /// What clients must know.
    secret: Option<Secret>,
    clients: Arc<Clients>,
    /// The thread ends when this end of the pair closes.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl TcpStoreServer {
    /// Starts a server for drumline's and torch's clients, who need no secret: therefore `host`
    /// must be loopback. Port 0 lets the system choose; [`TcpStoreServer::address`] tells which.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] if `host` cannot be resolved or is not loopback, or if the port is in
    /// use. [`Error::Io`] if the system has no thread or descriptor left.
    pub fn bind(host: &str, port: u16) -> Result<TcpStoreServer> {
        TcpStoreServer::open(host, port, Exposure::Loopback)
    }

    /// As [`TcpStoreServer::bind`], on any one address of this machine: whoever reaches it can
    /// read and write every key.
    ///
    /// It listens on exactly the address that `host` stands for, on no other interface. Of several
    /// addresses behind a name the first is taken that belongs to this machine.
    ///
    /// # Errors
    ///
    /// As [`TcpStoreServer::bind`]; [`Error::Store`] if `host` is another machine.
    pub fn bind_exposed(host: &str, port: u16) -> Result<TcpStoreServer> {
        TcpStoreServer::open(host, port, Exposure::AnyAddress)
    }

    /// Starts a server for drumline's clients who know `secret`, on one address of this machine
    /// or on an abstract Unix socket.
    ///
    /// ```
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
        let listener = match endpoint {
            Endpoint::Tcp { host, port } => listen_on(host, *port, Exposure::AnyAddress),
            Endpoint::Unix(name) => Listener::unix(name).map_err(|error| match error.kind() {
                ErrorKind::AddrInUse => "the name is in use by another process".to_owned(),
                _ => error.to_string(),
            }),
        };
        TcpStoreServer::start(endpoint.clone(), listener, Some(secret.clone()))
    }

    fn open(host: &str, port: u16, exposure: Exposure) -> Result<TcpStoreServer> {
        let endpoint = Endpoint::Tcp { host: host.to_owned(), port };
        let server = TcpStoreServer::start(endpoint, listen_on(host, port, exposure), None)?;
        if let Some(address) = server.address().filter(|address| !address.ip().is_loopback()) {
            tracing::warn!(
                %address,
                "the store has no authentication: whoever can reach this address can read and \
                 change what the ranks tell each other"
            );
        }
        Ok(server)
    }

    /// Where the server listens, if that is a TCP port.
    pub fn address(&self) -> Option<SocketAddr> {
        match self.address {
            Address::Tcp(address) => Some(address),
            Address::Unix(_) => None,
        }
    }

    /// What it was asked to listen on, with the port that it has got.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// How a client in this process connects.
    pub(super) fn as_target(&self) -> connection::Server {
        let (address, secret) = (self.address.clone(), self.secret.clone());
        connection::Server { address, secret, open: Arc::default() }
    }

    /// Waits until at most `count` connections of store clients are open, or until `deadline`.
    /// Tells which.
    pub(super) fn wait_for_departure(&self, count: impl Fn() -> usize, deadline: Instant) -> bool {
        self.clients.wait_until(|clients| clients <= count(), deadline)
    }

    fn start(
        endpoint: Endpoint,
        listener: Result<Listener, String>,
        secret: Option<Secret>,
    ) -> Result<TcpStoreServer> {
        let listener = listener.map_err(|problem| Error::Store {
            store: endpoint.to_string(),
            operation: "listen".into(),
            problem,
        })?;
        let failed = |error| Error::io(format!("host {endpoint}"), error);
        let admission = match &secret {
            None => Admission::Anyone,
            Some(secret) => Admission::Handshake {
                ours: Hello::STORE,
                expected: Expected::STORE,
                secret: Some(secret.clone()),
            },
        };
        let gate = Gate::new(listener, admission).map_err(failed)?;
        let (endpoint, address) = match endpoint {
            Endpoint::Unix(name) => (Endpoint::Unix(name.clone()), Address::Unix(name)),
            Endpoint::Tcp { host, port } => {
                let address = gate.address().unwrap_or((Ipv4Addr::UNSPECIFIED, port).into());
                (Endpoint::Tcp { host, port: address.port() }, Address::Tcp(address))
            }
        };
        let failed = |error| Error::io(format!("host {endpoint}"), error);
        let (stop, stopped) = UnixStream::pair().map_err(failed)?;
        let clients = Arc::new(Clients::default());
        let host = Host {
            gate,
            stopped,
            server: Server::default(),
            streams: BTreeMap::new(),
            clients: Arc::clone(&clients),
        };
        let thread = thread::Builder::new().name("drumline-store".into());
        let thread = Some(thread.spawn(|| host.run()).map_err(failed)?);
        Ok(TcpStoreServer { endpoint, address, secret, clients, stop: Some(stop), thread })
    }
}

impl Drop for TcpStoreServer {
    /// Stops serving: every connection closes.
    fn drop(&mut self) {
        self.stop = None;
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!(store = %self.endpoint, "the store's thread has panicked");
        }
    }
}

/// How many connections of store clients are open, for those who wait for it to change.
#[derive(Debug, Default)]
struct Clients {
    count: Mutex<usize>,
    changed: Condvar,
}

impl Clients {
    fn update(&self, count: usize) {
        let mut present = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        if *present != count {
            *present = count;
            self.changed.notify_all();
        }
    }

    fn wait_until(&self, condition: impl Fn(usize) -> bool, deadline: Instant) -> bool {
        let count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        let patience = deadline.saturating_duration_since(Instant::now());
        let (count, _) = self
            .changed
            .wait_timeout_while(count, patience, |count| !condition(*count))
            .unwrap_or_else(PoisonError::into_inner);
        condition(*count)
    }
}

/// How many bytes are taken from one connection before the others have their turn.
const READ_BYTES: usize = 64 << 10;

/// What the thread owns.
struct Host {
    gate: Gate,
    stopped: UnixStream,
    server: Server,
    streams: BTreeMap<ConnectionId, Stream>,
    clients: Arc<Clients>,
}

/// What poll found.
#[derive(Default)]
struct Ready {
    stop: bool,
    connections: Vec<ConnectionId>,
}

impl Host {
    fn run(mut self) {
        loop {
            let ready = match self.poll() {
                Ok(ready) => ready,
                Err(error) => {
                    tracing::error!(%error, "the store stops serving: poll failed");
                    return;
                }
            };
            if ready.stop {
                return;
            }
            for id in ready.connections {
                self.read(id);
            }
            // Guests may be out of time although nothing has arrived.
            match self.gate.admit(Instant::now()) {
                Ok(arrivals) => {
                    for arrival in arrivals {
                        self.streams.insert(self.server.connect(), arrival.stream);
                    }
                }
                Err(error) => {
                    tracing::error!(%error, "the store stops serving: its gate is broken");
                    return;
                }
            }
            // Before the replies leave, so that a client that has one is counted, and again
            // after, because writing closes what is broken.
            self.clients.update(self.server.clients());
            self.write();
            self.clients.update(self.server.clients());
        }
    }

    fn poll(&self) -> io::Result<Ready> {
        let mut fds = Vec::with_capacity(2 + self.streams.len());
        fds.push(PollFd::new(&self.stopped, PollFlags::IN));
        fds.push(PollFd::new(&self.gate, PollFlags::IN));
        for (&id, stream) in &self.streams {
            let blocked = !self.server.output(id).is_empty();
            let asked = if blocked { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            fds.push(PollFd::new(stream, asked));
        }
        let left = self.gate.deadline().map(|at| at.saturating_duration_since(Instant::now()));
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(Ready::default()),
            Err(error) => return Err(error.into()),
        }
        let is_ready = |index: usize| !fds[index].revents().is_empty();
        let connections = self.streams.keys().zip(2..);
        Ok(Ready {
            stop: is_ready(0),
            connections: connections
                .filter(|&(_, index)| is_ready(index))
                .map(|(&id, _)| id)
                .collect(),
        })
    }

    fn read(&mut self, id: ConnectionId) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        let mut bytes = [0; READ_BYTES];
        match stream.read(&mut bytes) {
            Ok(0) => self.close(id),
            Ok(count) => self.server.receive(id, &bytes[..count]),
            Err(error) if is_transient(&error) => {}
            Err(_) => self.close(id),
        }
    }

    /// Writes as much as the sockets take and closes what the server has refused.
    ///
    /// One connection's request may release the wait of any other: all are looked at.
    fn write(&mut self) {
        let mut broken = Vec::new();
        for (&id, stream) in &mut self.streams {
            while !self.server.output(id).is_empty() {
                match stream.write(self.server.output(id)) {
                    Ok(count) => self.server.written(id, count),
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(_) => {
                        broken.push(id);
                        break;
                    }
                }
            }
        }
        for id in broken {
            self.close(id);
        }
        for (id, refusal) in self.server.take_refused() {
            if let Some(stream) = self.streams.remove(&id) {
                tracing::warn!(peer = stream.peer(), %refusal, "the store closes a connection");
            }
        }
    }

    fn close(&mut self, id: ConnectionId) {
        self.server.disconnect(id);
        self.streams.remove(&id);
    }
}

/// Where a server that asks for no secret may listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Exposure {
    Loopback,
    AnyAddress,
}

/// The listening socket, or why there is none and what to do.
fn listen_on(host: &str, port: u16, exposure: Exposure) -> Result<Listener, String> {
    let addresses: Vec<SocketAddr> = match host.parse::<IpAddr>() {
        Ok(ip) => vec![(ip, port).into()],
        Err(_) => (host, port)
            .to_socket_addrs()
            .map_err(|error| format!("the name {host} cannot be resolved: {error}"))?
            .collect(),
    };
    let mut not_ours = Vec::new();
    for address in addresses {
        if exposure == Exposure::Loopback && !address.ip().is_loopback() {
            return Err(format!(
                "{address} can be reached from other machines, and this store knows no \
                 authentication: give all processes of the job one DRUMLINE_SECRET or \
                 DRUMLINE_SECRET_FILE, or, if you trust that network, set DRUMLINE_TRUST_STORE=1 \
                 (in code: bind_exposed)"
            ));
        }
        match Listener::tcp(address) {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == ErrorKind::AddrNotAvailable => {
                not_ours.push(address.ip().to_string());
            }
            // The next address would do, but the ranks would find the stranger on this one.
            Err(error) if error.kind() == ErrorKind::AddrInUse => {
                return Err(format!(
                    "port {port} of {} is in use, perhaps by rank 0 of another job or by one left \
                     over (`ss -ltnp sport = :{port}` shows it); pick another port with \
                     MASTER_PORT, or leave the choice to `drumline run`",
                    address.ip()
                ));
            }
            Err(error) => return Err(format!("cannot listen on {address}: {error}")),
        }
    }
    Err(format!(
        "{host} stands for {}, which is not an address of this machine; start rank 0 there, or set \
         MASTER_ADDR to an address of this machine",
        not_ours.join(", ")
    ))
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}
