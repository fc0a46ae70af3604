//! A store for ranks on any number of hosts, compatible with PyTorch's `TCPStore`.
//!
//! One process hosts the server, the others are its clients; torch processes may be either. The
//! server is a state machine ([`server`]) over the bytes of [`protocol`], driven by one thread
//! ([`TcpStoreServer`]).
//!
//! ```
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
//! torch's protocol knows no authentication, so such a server listens on loopback only, unless it
//! is told otherwise by name ([`TcpStoreServer::bind_exposed`]). Where both ends are drumline's,
//! the same requests travel behind the handshake of [`auth`](crate::auth), over TCP between hosts
//! or an abstract Unix socket on one ([`TcpStore::host_secured`], [`TcpStore::connect_secured`]).

mod connection;
mod host;
pub mod protocol;
pub mod server;
pub mod wait;

use std::{
    io::{self, ErrorKind},
    net::SocketAddr,
    sync::{Mutex, MutexGuard, PoisonError, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

use self::{
    connection::{Connection, Server, deadline_after, is_hang_up},
    protocol::{
        KEY_BYTES_MAX, KEYS_PER_REQUEST_MAX, Key, READY, REQUEST_BYTES_MAX, Request,
        VALUE_BYTES_MAX, Value,
    },
};
use super::{
    DEFAULT_TIMEOUT, Store,
    values::{AddError, parse_number},
};
use crate::{Endpoint, Error, Result, auth::Secret, net::call::Address};

pub use self::host::TcpStoreServer;

/// Counts the handles that joined. The only key of torch's without a leading `/`.
const WORKERS: Key<'static> = Key(b"init/");

/// How often the number of joined workers is looked at, as in torch.
const WORKERS_POLL: Duration = Duration::from_millis(10);

/// The least time that the server is given for an answer that needs no waiting.
const ANSWER_PATIENCE: Duration = Duration::from_secs(5);

/// Idle connections beyond these are closed.
const IDLE_MAX: usize = 4;

/// A client of a store's server; in the process that hosts the store also its server.
///
/// Every call takes a connection of its own for as long as it lasts, so one that waits holds up
/// no other. [`Store::set`] returns when the server has the value: whoever asks from then on, over
/// whichever connection, sees it.
///
/// Dropping the handle of the host ends the store for everyone: see
/// [`TcpStore::wait_for_departure`].
#[derive(Debug)]
pub struct TcpStore {
    /// The [`Endpoint`], for messages.
    name: String,
    /// Where to connect, and how.
    target: Server,
    idle: Mutex<Vec<Connection>>,
    timeout: Mutex<Duration>,
    hosted: Option<TcpStoreServer>,
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

    /// Connects to a server, trying again until `timeout` if it is not up yet.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] with the last failure when the time is over. The call does not outlast
    /// `timeout`, whatever name service and network do.
    pub fn connect(host: &str, port: u16, timeout: Duration) -> Result<TcpStore> {
        TcpStore::reach(&Endpoint::Tcp { host: host.to_owned(), port }, None, timeout)
    }

    /// Connects to a server that asks for a secret, as [`TcpStore::connect`].
    ///
    /// # Errors
    ///
    /// As [`TcpStore::connect`]; at once if the server does not know the secret.
    pub fn connect_secured(
        endpoint: &Endpoint,
        secret: &Secret,
        timeout: Duration,
    ) -> Result<TcpStore> {
        TcpStore::reach(endpoint, Some(secret), timeout)
    }

    fn to_own(server: TcpStoreServer) -> Result<TcpStore> {
        let name = server.endpoint().to_string();
        let target = server.as_target();
        let connection = Connection::open(&target, deadline_after(ANSWER_PATIENCE));
        let connection = connection.map_err(|error| Error::Store {
            store: name.clone(),
            operation: "connect to the server that was just started".into(),
            problem: error.to_string(),
        })?;
        Ok(TcpStore::new(name, target, connection, Some(server)))
    }

    fn reach(endpoint: &Endpoint, secret: Option<&Secret>, timeout: Duration) -> Result<TcpStore> {
        let name = endpoint.to_string();
        let established = Connection::establish(endpoint, secret, deadline_after(timeout));
        let (connection, target) = established.map_err(|error| Error::Store {
            store: name.clone(),
            operation: "connect".into(),
            problem: match error.kind() {
                ErrorKind::PermissionDenied => error.to_string(),
                _ if is_hang_up(&error) => format!(
                    "it closes the connection at once ({error}): has one of the two a secret \
                     (DRUMLINE_SECRET, DRUMLINE_SECRET_FILE) and the other none, or listens \
                     something else there?"
                ),
                _ => format!(
                    "tried for {timeout:.1?}: {error}; is rank 0 or the launcher, which hosts the \
                     store, running, and are MASTER_ADDR and MASTER_PORT the same everywhere?"
                ),
            },
        })?;
        Ok(TcpStore::new(name, target, connection, None))
    }

    fn new(
        name: String,
        target: Server,
        connection: Connection,
        hosted: Option<TcpStoreServer>,
    ) -> TcpStore {
        let idle = Mutex::new(vec![connection]);
        TcpStore { name, target, idle, timeout: Mutex::new(DEFAULT_TIMEOUT), hosted }
    }

    /// The [`Endpoint`] as text, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The server's address; none for a Unix socket.
    pub fn address(&self) -> Option<SocketAddr> {
        match self.target.address {
            Address::Tcp(address) => Some(address),
            Address::Unix(_) => None,
        }
    }

    /// Joins a job of `world_size` processes. Each calls this once; the host's call returns when
    /// all have joined, the others' at once. Processes that run torch are counted as well.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] on the host if fewer have joined after `timeout`.
    pub fn wait_for_workers(&self, world_size: usize, timeout: Duration) -> Result<()> {
        let deadline = deadline_after(timeout);
        let all = i64::try_from(world_size).unwrap_or(i64::MAX);
        let mut joined = self.add_raw(WORKERS, 1)?;
        while self.hosted.is_some() && joined < all {
            if Instant::now() >= deadline {
                return Err(self.failed("wait for workers".into(), format!(
                    "{joined} of {world_size} have joined in {timeout:.1?}; start the missing ones \
                     with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE"
                )));
            }
            thread::sleep(WORKERS_POLL);
            joined = self.add_raw(WORKERS, 0)?;
        }
        Ok(())
    }

    /// Takes [`TcpStore::wait_for_workers`] back: this process has joined and cannot go on.
    pub(crate) fn leave_workers(&self) -> Result<()> {
        self.add_raw(WORKERS, -1).map(drop)
    }

    /// Waits until every other client of this host's server has closed its connections, at most
    /// for `timeout`, and tells whether they have. Not being the host, returns `true` at once.
    ///
    /// A client that ends before the others have finished takes nothing from them, the host takes
    /// everything: so the host calls this before it drops the store. A process that dies closes
    /// its connections too.
    pub fn wait_for_departure(&self, timeout: Duration) -> bool {
        let ours = || self.target.open.load(Ordering::SeqCst);
        self.hosted
            .as_ref()
            .is_none_or(|server| server.wait_for_departure(ours, deadline_after(timeout)))
    }

    /// Runs `call` on a connection that nobody else uses.
    fn call<T>(
        &self,
        operation: impl Fn() -> String,
        call: impl FnOnce(&mut Connection, Instant) -> io::Result<T>,
    ) -> Result<T> {
        let start = Instant::now();
        let deadline = deadline_after(self.timeout().max(ANSWER_PATIENCE));
        let failed = |error: io::Error| self.failed(operation(), explain(&error, start.elapsed()));
        // The guard must not live on into the match.
        let idle = self.idle().pop();
        let mut connection = match idle {
            Some(connection) => connection,
            None => Connection::open(&self.target, deadline).map_err(failed)?,
        };
        // A connection that failed is dropped: it may stand in the middle of a reply.
        let result = call(&mut connection, deadline).map_err(failed)?;
        let mut idle = self.idle();
        if idle.len() < IDLE_MAX {
            idle.push(connection);
        }
        Ok(result)
    }

    /// Sends one request and reads its reply with `read`.
    fn ask<T>(
        &self,
        operation: impl Fn() -> String,
        request: Request<'_>,
        read: impl FnOnce(&mut Connection, Instant) -> io::Result<T>,
    ) -> Result<T> {
        self.call(operation, |connection, deadline| {
            connection.send(&[request], deadline)?;
            read(connection, deadline)
        })
    }

    fn add_raw(&self, key: Key<'_>, amount: i64) -> Result<i64> {
        let operation = || format!("add {amount} to {}", shown(key));
        self.ask(operation, Request::Add(key, amount), |connection, deadline| {
            connection.read_array(deadline).map(i64::from_le_bytes)
        })
    }

    /// The server closes the connection over an addition that is impossible. Says so, if that is
    /// what happened.
    fn explain_add(&self, key: &str, amount: i64, error: Error) -> Error {
        let Ok(true) = self.check(&[key]) else { return error };
        let Ok(value) = self.get(key) else { return error };
        let problem = match parse_number(&value) {
            Ok(number) if number.checked_add(amount).is_some() => return error,
            Ok(number) => AddError::Overflow(number, amount),
            Err(problem) => problem,
        };
        self.failed(format!("add {amount} to {key}"), problem.to_string())
    }

    fn failed(&self, operation: String, problem: String) -> Error {
        Error::Store { store: self.name.clone(), operation, problem }
    }

    fn timed_out(&self, missing: &[Key<'_>], start: Instant) -> Error {
        Error::StoreTimeout {
            store: self.name.clone(),
            keys: missing.iter().map(|&key| shown(key)).collect(),
            waited: start.elapsed(),
        }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store for TcpStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let wire = wire_key("set", key)?;
        check_value("set", value)?;
        // SET has no reply. The echo of a PING behind it tells that it has been done.
        let nonce = std::process::id();
        let set = Request::Set(Key(wire.as_bytes()), Value(value));
        self.call(
            || format!("set {key}"),
            |connection, deadline| {
                connection.send(&[set, Request::Ping(nonce)], deadline)?;
                connection.read_array::<4>(deadline).map(drop)
            },
        )
    }

    fn get(&self, key: &str) -> Result<Vec<u8>> {
        let wire = wire_key("get", key)?;
        let wire = Key(wire.as_bytes());
        let start = Instant::now();
        let until = deadline_after(self.timeout());
        let answer = self.call(
            || format!("get {key}"),
            |connection, deadline| {
                let missing = connection.wait(&[wire], until)?;
                if !missing.is_empty() {
                    return Ok(Err(missing));
                }
                let deadline = deadline.max(deadline_after(ANSWER_PATIENCE));
                connection.send(&[Request::Get(wire)], deadline)?;
                connection.read_value(deadline).map(Ok)
            },
        );
        answer?.map_err(|missing| self.timed_out(&missing, start))
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        let wire = wire_key("add", key)?;
        self.add_raw(Key(wire.as_bytes()), amount)
            .map_err(|error| self.explain_add(key, amount, error))
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        let wire = wire_key("compare_set", key)?;
        check_value("compare_set", expected)?;
        check_value("compare_set", desired)?;
        let request = Request::CompareSet(Key(wire.as_bytes()), Value(expected), Value(desired));
        self.ask(|| format!("compare_set {key}"), request, Connection::read_value)
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        let wire = wire_keys("wait", keys)?;
        let wire = as_keys(&wire);
        let start = Instant::now();
        let until = deadline_after(timeout);
        let operation = || format!("wait for {}", keys.join(", "));
        let missing = self.call(operation, |connection, _| connection.wait(&wire, until))?;
        if missing.is_empty() { Ok(()) } else { Err(self.timed_out(&missing, start)) }
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        let wire = wire_keys("check", keys)?;
        let operation = || format!("check {}", keys.join(", "));
        self.ask(operation, Request::Check(as_keys(&wire)), |connection, deadline| {
            Ok(connection.read_array(deadline)? == [READY])
        })
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        let wire = wire_key("delete_key", key)?;
        let request = Request::DeleteKey(Key(wire.as_bytes()));
        self.ask(
            || format!("delete {key}"),
            request,
            |connection, deadline| Ok(i64::from_le_bytes(connection.read_array(deadline)?) > 0),
        )
    }

    fn timeout(&self) -> Duration {
        *self.timeout.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_timeout(&self, timeout: Duration) {
        *self.timeout.lock().unwrap_or_else(PoisonError::into_inner) = timeout;
    }
}

/// A key with the `/` that clients put before it.
fn wire_key(operation: &'static str, key: &str) -> Result<String> {
    if key.len() >= KEY_BYTES_MAX {
        let problem = format!("a key of {} bytes exceeds {}", key.len(), KEY_BYTES_MAX - 1);
        return Err(Error::InvalidArgument { operation, problem });
    }
    Ok(format!("/{key}"))
}

fn wire_keys(operation: &'static str, keys: &[&str]) -> Result<Vec<String>> {
    if keys.len() > KEYS_PER_REQUEST_MAX {
        let problem = format!("{} keys exceed {KEYS_PER_REQUEST_MAX}", keys.len());
        return Err(Error::InvalidArgument { operation, problem });
    }
    // Each with its length and its `/`, behind the opcode and the count.
    let bytes = 9 + keys.iter().map(|key| 9 + key.len()).sum::<usize>();
    if bytes > REQUEST_BYTES_MAX {
        let problem = format!("keys of {bytes} bytes together exceed {REQUEST_BYTES_MAX}");
        return Err(Error::InvalidArgument { operation, problem });
    }
    keys.iter().map(|key| wire_key(operation, key)).collect()
}

fn as_keys(wire: &[String]) -> Vec<Key<'_>> {
    wire.iter().map(|key| Key(key.as_bytes())).collect()
}

fn check_value(operation: &'static str, value: &[u8]) -> Result<()> {
    if value.len() > VALUE_BYTES_MAX {
        let problem = format!("a value of {} bytes exceeds {VALUE_BYTES_MAX}", value.len());
        return Err(Error::InvalidArgument { operation, problem });
    }
    Ok(())
}

/// A key as the user knows it.
fn shown(key: Key<'_>) -> String {
    let key = key.0.strip_prefix(b"/").unwrap_or(key.0);
    String::from_utf8_lossy(key).into_owned()
}

/// What a socket's error means for the one who asked.
fn explain(error: &io::Error, waited: Duration) -> String {
    match error.kind() {
        ErrorKind::ConnectionRefused
        | ErrorKind::ConnectionReset
        | ErrorKind::ConnectionAborted
        | ErrorKind::BrokenPipe
        | ErrorKind::UnexpectedEof => format!(
            "the connection is closed ({error}); the rank or launcher that hosts the store has \
             probably exited: look at its output first"
        ),
        ErrorKind::TimedOut => format!(
            "no answer in {waited:.1?}; the process that hosts the store is stopped, or its \
             host cannot be reached"
        ),
        _ => error.to_string(),
    }
}
