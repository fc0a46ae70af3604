//! A store for ranks on any number of hosts, compatible with PyTorch's `TCPStore`.
//!
//! One process hosts the server, and the other processes are its clients. Any of them may be a torch process.
//! The server has one thread for all clients ([`TcpStoreServer`]).
//!
//! ```
//! # use drumline_store as drumline;
//! use std::time::Duration;
//!
//! use drumline::store::{Store, tcp::TcpStore};
//!
//! // One rank hosts, on a port of the system's choice ...
//! let host = TcpStore::host("127.0.0.1", 0)?;
//! // ... and the others connect.
//! let port = host.address().map_or(0, |address| address.port());
//! let client = TcpStore::connect("127.0.0.1", port, Duration::from_secs(5))?;
//!
//! client.set("address/1", b"127.0.0.1:4000")?;
//! assert_eq!(host.get("address/1")?, b"127.0.0.1:4000");
//! # Ok::<(), drumline::Error>(())
//! ```
//!
//! torch's protocol has no authentication. So such a server listens on loopback only, unless the program asks
//! for more ([`TcpStoreServer::bind_exposed`]). If both ends are drumline's, the same requests travel behind
//! the handshake of [`auth`](crate::auth): over TCP between hosts, or over an abstract Unix socket on one
//! host ([`TcpStore::host_secured`], [`TcpStore::connect_secured`]). One server may have several such doors
//! to the same keys ([`TcpStoreServer::open`]).

mod client;
mod connection;
mod door;
mod host;
pub mod protocol;
mod relay;
#[doc(hidden)]
pub mod replies;
pub mod server;
mod service;
pub mod wait;

use std::{
    net::SocketAddr,
    sync::{Mutex, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

use drumline_error::spent;

use self::{
    connection::{ANSWER_PATIENCE, Connection, Proof, Server, reach},
    protocol::WORKERS,
};
use super::{interface::deadline_after, timeout::Timeout};
use crate::{
    Error, Result,
    auth::{Level, Secret},
    net::{Endpoint, call::Address},
};

pub use self::{door::Door, host::TcpStoreServer, relay::Relay};

/// How long a host waits for ranks to leave before it logs which ones it awaits.
const WARN_AFTER: Duration = Duration::from_secs(10);

/// How often the number of joined workers is read, as in torch.
const WORKERS_POLL: Duration = Duration::from_millis(10);

/// A client of a store's server. In the process that hosts the store, it is also the server.
///
/// Every call has a connection of its own while it runs, so a waiting call holds up no other.
///
/// Dropping the handle of the host ends the store for all clients: see [`TcpStore::wait_for_departure`].
///
/// ```
/// # use drumline_store as drumline;
/// use drumline::store::{Store, tcp::TcpStore};
///
/// let host = TcpStore::host("127.0.0.1", 0)?;
/// let address = host.address().expect("it is no Unix socket");
/// let client =
///     TcpStore::connect("127.0.0.1", address.port(), std::time::Duration::from_secs(5))?;
/// client.set("key", b"value")?;
/// drop(host);
/// assert!(client.get("key").is_err()); // the host has taken everything with it
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Debug)]
pub struct TcpStore {
    /// The [`Endpoint`], for messages.
    name: String,
    /// The server's address, and what is needed to connect.
    target: Server,
    idle: Mutex<Vec<Connection>>,
    timeout: Timeout,
    hosted: Option<TcpStoreServer>,
    /// The process that made this handle. A fork must not use its connections.
    process: u32,
}

impl TcpStore {
    /// Starts a server as [`TcpStoreServer::bind`] does, and connects to it.
    ///
    /// # Errors
    ///
    /// Those of [`TcpStoreServer::bind`].
    pub fn host(host: &str, port: u16) -> Result<TcpStore> {
        TcpStore::to_own(TcpStoreServer::bind(host, port)?)
    }

    /// Starts a server as [`TcpStoreServer::bind_exposed`] does, and connects to it.
    ///
    /// # Errors
    ///
    /// Those of [`TcpStoreServer::bind_exposed`].
    pub fn host_exposed(host: &str, port: u16) -> Result<TcpStore> {
        TcpStore::to_own(TcpStoreServer::bind_exposed(host, port)?)
    }

    /// Starts a server as [`TcpStoreServer::bind_secured`] does, and connects to it.
    ///
    /// # Errors
    ///
    /// Those of [`TcpStoreServer::bind_secured`].
    pub fn host_secured(endpoint: &Endpoint, secret: &Secret) -> Result<TcpStore> {
        TcpStore::to_own(TcpStoreServer::bind_secured(endpoint, secret)?)
    }

    /// Connects to a server. If it does not run yet, tries again until `timeout`.
    ///
    /// On loopback, the port must be held by a process of this user or of root. Any user could be first to listen
    /// there.
    ///
    /// # Errors
    ///
    /// [`Store`](drumline_error::ErrorKind::Store) with the last failure when the time is over, and at once if the port
    /// of this host belongs to another user. The call never takes longer than `timeout`, whatever the name service and
    /// the network do.
    pub fn connect(host: &str, port: u16, timeout: Duration) -> Result<TcpStore> {
        TcpStore::reach(&Endpoint::Tcp { host: host.to_owned(), port }, Proof::Owner, timeout)
    }

    /// Connects as [`TcpStore::connect`] does, whichever user the server runs as.
    ///
    /// # Errors
    ///
    /// As for [`TcpStore::connect`].
    pub fn connect_trusting(host: &str, port: u16, timeout: Duration) -> Result<TcpStore> {
        let endpoint = Endpoint::Tcp { host: host.to_owned(), port };
        TcpStore::reach(&endpoint, Proof::Trust, timeout)
    }

    /// Connects to a server that asks for a secret, like [`TcpStore::connect`].
    ///
    /// # Errors
    ///
    /// As for [`TcpStore::connect`]; it fails at once if the server does not know the secret.
    pub fn connect_secured(
        endpoint: &Endpoint,
        secret: &Secret,
        timeout: Duration,
    ) -> Result<TcpStore> {
        TcpStore::reach(endpoint, Proof::Secret(secret, Level::Auth), timeout)
    }

    /// Connects as [`TcpStore::connect_secured`] does, to a door of the security level `level`
    /// ([`Door::Secured`]).
    ///
    /// # Errors
    ///
    /// As for [`TcpStore::connect_secured`].
    pub fn connect_at(
        endpoint: &Endpoint,
        secret: &Secret,
        level: Level,
        timeout: Duration,
    ) -> Result<TcpStore> {
        TcpStore::reach(endpoint, Proof::Secret(secret, level), timeout)
    }

    /// Connects to `server` through its first door, and hosts it from now on: to drop the store ends the
    /// server.
    ///
    /// # Errors
    ///
    /// [`Store`](drumline_error::ErrorKind::Store) if the server does not answer.
    pub fn to_own(server: TcpStoreServer) -> Result<TcpStore> {
        let name = server.endpoint().to_string();
        let target = server.as_target();
        let connection = Connection::open(&target, deadline_after(ANSWER_PATIENCE));
        let connection = connection.map_err(|error| {
            Error::store(&name, "connect to the server that was just started", error)
        })?;
        Ok(TcpStore::new(name, target, connection, Some(server)))
    }

    fn reach(endpoint: &Endpoint, proof: Proof<'_>, timeout: Duration) -> Result<TcpStore> {
        let (connection, target) = reach(endpoint, proof, timeout)?;
        Ok(TcpStore::new(endpoint.to_string(), target, connection, None))
    }

    fn new(
        name: String,
        target: Server,
        connection: Connection,
        hosted: Option<TcpStoreServer>,
    ) -> TcpStore {
        let idle = Mutex::new(vec![connection]);
        let timeout = Timeout::default();
        TcpStore { name, target, idle, timeout, hosted, process: std::process::id() }
    }

    /// The [`Endpoint`] as text, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The server's address; `None` for a Unix socket.
    pub fn address(&self) -> Option<SocketAddr> {
        match self.target.address {
            Address::Tcp(address) => Some(address),
            Address::Unix(_) => None,
        }
    }

    /// Joins a job of `world_size` processes. Each process calls this once. The host's call returns when all
    /// have joined, the calls of the others at once. Processes that use torch count, too.
    ///
    /// # Errors
    ///
    /// [`Store`](drumline_error::ErrorKind::Store) on the host if fewer processes have joined after `timeout`.
    pub fn wait_for_workers(&self, world_size: usize, timeout: Duration) -> Result<()> {
        self.join_workers()?;
        match self.await_workers(world_size, timeout)? {
            None => Ok(()),
            Some(joined) => Err(self.too_few(joined, world_size, timeout)),
        }
    }

    /// The first step of [`TcpStore::wait_for_workers`]: counts this process as joined.
    pub fn join_workers(&self) -> Result<()> {
        self.add_raw(WORKERS, 1).map(drop)
    }

    /// The second step of [`TcpStore::wait_for_workers`]. Returns how many have joined if these are too few.
    pub fn await_workers(&self, world_size: usize, timeout: Duration) -> Result<Option<i64>> {
        let deadline = deadline_after(timeout);
        let all = i64::try_from(world_size).unwrap_or(i64::MAX);
        if self.hosted.is_none() {
            return Ok(None);
        }
        let mut joined = self.add_raw(WORKERS, 0)?;
        while joined < all {
            if Instant::now() >= deadline {
                return Ok(Some(joined));
            }
            thread::sleep(WORKERS_POLL);
            joined = self.add_raw(WORKERS, 0)?;
        }
        Ok(None)
    }

    /// The error of a host for which only so many have joined.
    pub fn too_few(&self, joined: i64, world_size: usize, timeout: Duration) -> Error {
        let problem = format!(
            "{joined} of {world_size} have joined in {}; start the missing ones with the same \
             MASTER_ADDR, MASTER_PORT and WORLD_SIZE",
            spent(timeout)
        );
        self.failed("wait for workers".into(), problem)
    }

    /// Undoes [`TcpStore::wait_for_workers`]: this process has joined and cannot go on.
    pub fn leave_workers(&self) -> Result<()> {
        self.add_raw(WORKERS, -1).map(drop)
    }

    /// Waits until every other rank has closed its connections to this host's server, at most for `timeout`.
    /// Returns whether they have. On clients it returns `true` at once.
    ///
    /// Clients of drumline count as ranks, and so do others that have joined ([`TcpStore::wait_for_workers`],
    /// or torch's). A torch process that only reads the store is not awaited. After 10 s the log says which
    /// ranks are awaited.
    ///
    /// A client may end before the others have finished. But when the host ends, the store is gone. So the
    /// host calls this before it drops the store. A process that dies closes its connections, too.
    pub fn wait_for_departure(&self, timeout: Duration) -> bool {
        self.wait_for_departure_telling(timeout, WARN_AFTER)
    }

    /// [`TcpStore::wait_for_departure`] that logs after `warn_after` which ranks are awaited.
    pub fn wait_for_departure_telling(&self, timeout: Duration, warn_after: Duration) -> bool {
        let ours = || self.target.open.load(Ordering::SeqCst);
        let deadline = deadline_after(timeout);
        self.hosted
            .as_ref()
            .is_none_or(|server| server.wait_for_departure(ours, deadline, warn_after))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Store as _;

    /// In a fork, the handle is the same and the process id differs. So this test changes the id.
    #[test]
    fn a_fork_uses_no_connection_of_its_parent_and_makes_clones() {
        let parent = TcpStore::host("127.0.0.1", 0).unwrap();
        let port = parent.address().unwrap().port();
        let mut inherited = TcpStore::connect("127.0.0.1", port, Duration::from_secs(60)).unwrap();
        inherited.process += 1;
        let error = inherited.set("key", b"value").unwrap_err().to_string();
        assert!(error.contains("is a fork") && error.contains("clone"), "{error}");
        assert!(!parent.check(&["key"]).unwrap());
        let clone = inherited.try_clone().unwrap();
        clone.set("key", b"value").unwrap();
        assert_eq!(parent.get("key").unwrap(), b"value");
    }
}
