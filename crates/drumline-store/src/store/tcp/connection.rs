//! One connection of a client: blocking calls with deadlines.
//!
//! After an error the connection may stand in the middle of a reply. Its owner must drop it.

use std::{
    hash::{BuildHasher as _, RandomState},
    io::{self, ErrorKind, Read as _, Write as _},
    net::Shutdown,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use drumline_error::spent;
use rustix::event::PollFlags;

use super::{
    protocol::{ASK_EXTENSIONS, EXTENSIONS, Key, MAGIC, Request, VALUE_BYTES_MAX},
    wait::{Next, Wait},
};
use crate::{
    auth::{Expected, Handshake, Hello, Level, Nonce, Secret},
    net::Endpoint,
    net::{
        call::{self, Address, CallError, check_owner, shake_hands, time_left},
        site::resolve,
        sleep_until,
        stream::Stream,
    },
    store::interface::deadline_after,
};

/// The time limit for one attempt to connect. The kernel retransmits a lost first packet after 1 s and 3 s. A
/// new attempt is faster than later retransmissions.
const ATTEMPT_MAX: Duration = Duration::from_secs(5);

/// The pause between attempts. It doubles from the first value to the second.
const PAUSE_MIN: Duration = Duration::from_millis(5);
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// How long the server may take to confirm that a wait is cancelled.
const CANCEL_MAX: Duration = Duration::from_secs(5);

/// The least time that the server gets for an answer that needs no waiting.
pub(super) const ANSWER_PATIENCE: Duration = Duration::from_secs(5);

/// How often a client of torch's server checks whether an item is there.
const RECHECK: Duration = Duration::from_millis(100);

/// How long a client calls again after the server has hung up. Strangers may have crowded it out, or the
/// server of an earlier job may just be ending.
const HUNG_UP_MAX: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) struct Connection {
    stream: Stream,
    /// Whether the server supports FETCH and TAKE.
    is_extended: bool,
    /// The process that opened it.
    process: u32,
    _open: OpenConnection,
}

impl Drop for Connection {
    /// Ends the connection, also for copies in forks of this process. A fork itself ends nothing.
    fn drop(&mut self) {
        if self.process == std::process::id() {
            let _ = self.stream.shutdown(Shutdown::Both);
        }
    }
}

/// Everything that a client needs for another connection to its server.
#[derive(Clone, Debug)]
pub(super) struct Server {
    pub(super) address: Address,
    /// The secret that both ends prove first. Without one, the server accepts every client, as torch's does.
    pub(super) secret: Option<Secret>,
    /// How TCP connections are protected.
    pub(super) level: Level,
    /// Whether it may be of any user, if there is no secret.
    pub(super) may_be_anyones: bool,
    /// The number of this client's connections.
    pub(super) open: Arc<AtomicUsize>,
}

/// How a client knows that a server is the one that it means.
#[derive(Clone, Copy, Debug)]
pub(super) enum Proof<'s> {
    /// Both ends prove this secret. Over TCP, they protect the connection at this level.
    Secret(&'s Secret, Level),
    /// On loopback, it is of this process's user or of root. On other hosts, the client trusts whoever answers.
    Owner,
    /// The client trusts whoever answers.
    Trust,
}

impl Server {
    pub(super) fn new(address: Address, proof: Proof<'_>) -> Server {
        let (secret, level) = match proof {
            Proof::Secret(secret, level) => (Some(secret.clone()), level),
            Proof::Owner | Proof::Trust => (None, Level::Auth),
        };
        let may_be_anyones = matches!(proof, Proof::Trust);
        Server { address, secret, level, may_be_anyones, open: Arc::default() }
    }
}

/// Whether the port that has answered is of this user or of root, if it is on loopback.
fn check_on_loopback(stream: &Stream) -> Result<(), CallError> {
    match stream {
        Stream::Tcp(tcp) if stream.peer_address().is_some_and(|it| it.ip().is_loopback()) => {
            check_owner(tcp)
        }
        _ => Ok(()),
    }
}

/// Counts as one connection of a client while it is alive.
#[derive(Debug)]
struct OpenConnection(Arc<AtomicUsize>);

impl OpenConnection {
    fn new(count: Arc<AtomicUsize>) -> OpenConnection {
        count.fetch_add(1, Ordering::SeqCst);
        OpenConnection(count)
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Connection {
    /// Connects to `endpoint`: tries all its addresses again and again, until a store's server answers at one
    /// or `deadline` has come. Also returns what is needed to connect there again.
    pub(super) fn establish(
        endpoint: &Endpoint,
        proof: Proof<'_>,
        deadline: Instant,
    ) -> io::Result<(Connection, Server)> {
        let mut pause = PAUSE_MIN;
        let mut hung_up_since = None;
        loop {
            let error = match Connection::try_all(endpoint, proof, deadline) {
                Ok(established) => return Ok(established),
                // Time has run out. The earlier attempts tell more than this one.
                Err(error) if hung_up_since.is_some() && is_timeout(&error) => {
                    return Err(ErrorKind::ConnectionReset.into());
                }
                Err(error) => error,
            };
            // Ranks that were started together should not connect at the same moment.
            let wait = pause.mul_f64(random_between(0.5, 1.0));
            let since = hung_up_since.get_or_insert_with(Instant::now);
            if !is_hang_up(&error) {
                hung_up_since = None;
            } else if since.elapsed() >= HUNG_UP_MAX {
                return Err(error);
            }
            if is_refusal(&error) || Instant::now() + wait >= deadline {
                return Err(error);
            }
            thread::sleep(wait);
            pause = PAUSE_MAX.min(pause * 2);
        }
    }

    /// Connects to `server`.
    pub(super) fn open(server: &Server, deadline: Instant) -> io::Result<Connection> {
        let open = OpenConnection::new(Arc::clone(&server.open));
        let stream = Connection::reach(server, deadline)?;
        let mut connection =
            Connection { stream, is_extended: false, process: std::process::id(), _open: open };
        connection.send(&[Request::Validate(MAGIC), Request::Ping(ASK_EXTENSIONS)], deadline)?;
        connection.is_extended = match u32::from_le_bytes(connection.read_array(deadline)?) {
            EXTENSIONS => true,
            ASK_EXTENSIONS => false,
            _ => return Err(io::Error::other("what answers is not a store")),
        };
        Ok(connection)
    }

    /// A connection whose server has been greeted.
    pub(super) fn over(stream: Stream, is_extended: bool) -> Connection {
        let (process, open) = (std::process::id(), OpenConnection::new(Arc::default()));
        Connection { stream, is_extended, process, _open: open }
    }

    /// Opens a connection to `server`, and goes through the handshake if there is a secret. If the server hangs up,
    /// calls again for some time.
    pub(super) fn reach(server: &Server, deadline: Instant) -> io::Result<Stream> {
        let give_up = deadline.min(Instant::now() + HUNG_UP_MAX);
        let mut has_hung_up = false;
        loop {
            match Connection::greet(server, deadline) {
                Ok(stream) => return Ok(stream),
                Err(CallError::HungUp(_)) if Instant::now() + PAUSE_MIN < give_up => {
                    has_hung_up = true;
                    thread::sleep(PAUSE_MIN);
                }
                Err(CallError::HungUp(_)) => return Err(ErrorKind::ConnectionReset.into()),
                Err(CallError::Io(error)) if has_hung_up && is_timeout(&error) => {
                    return Err(ErrorKind::ConnectionReset.into());
                }
                Err(CallError::Io(error)) => return Err(error),
                Err(CallError::Refused(reason)) => {
                    return Err(io::Error::new(ErrorKind::PermissionDenied, reason));
                }
            }
        }
    }

    fn greet(server: &Server, deadline: Instant) -> Result<Stream, CallError> {
        let stream = call::open(&server.address, deadline)?;
        let Some(secret) = &server.secret else {
            if !server.may_be_anyones {
                check_on_loopback(&stream)?;
            }
            return Ok(stream);
        };
        let nonce = Nonce::random().map_err(io::Error::other)?;
        let secret = Some(secret.clone());
        let handshake = Handshake::call(Hello::STORE, Expected::STORE, secret, nonce)
            .at(stream.level(server.level));
        shake_hands(stream, handshake, true, deadline)
    }

    fn try_all(
        endpoint: &Endpoint,
        proof: Proof<'_>,
        deadline: Instant,
    ) -> io::Result<(Connection, Server)> {
        let addresses: Vec<Address> = match endpoint {
            Endpoint::Unix(name) => vec![Address::Unix(name.clone())],
            Endpoint::Tcp { host, port } => {
                resolve(host, *port, deadline)?.into_iter().map(Address::Tcp).collect()
            }
        };
        let mut last_error = io::Error::other(format!("{endpoint} has no address"));
        let count = addresses.len();
        for (index, address) in addresses.into_iter().enumerate() {
            // A silent address must not use up the time of the others.
            let share = time_left(deadline)? / (count - index) as u32;
            let until = Instant::now() + share.min(ATTEMPT_MAX);
            let server = Server::new(address, proof);
            match Connection::open(&server, until) {
                Ok(connection) => return Ok((connection, server)),
                Err(error) => last_error = error,
            }
        }
        Err(last_error)
    }

    /// Sends several requests at once.
    pub(super) fn send(&mut self, requests: &[Request<'_>], deadline: Instant) -> io::Result<()> {
        let mut bytes = Vec::new();
        requests.iter().for_each(|request| request.encode(&mut bytes));
        let mut unsent = &bytes[..];
        while !unsent.is_empty() {
            match self.stream.write(unsent) {
                Ok(count) => unsent = &unsent[count..],
                Err(error) => self.sleep_over(error, PollFlags::OUT, deadline)?,
            }
        }
        Ok(())
    }

    /// Reads a reply that is a number.
    pub(super) fn read_array<const N: usize>(&mut self, deadline: Instant) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(&mut bytes, deadline)?;
        Ok(bytes)
    }

    /// Reads a reply that is a count.
    pub(super) fn read_count(&mut self, deadline: Instant) -> io::Result<usize> {
        let count = i64::from_le_bytes(self.read_array(deadline)?);
        usize::try_from(count).map_err(|_| io::Error::other("the store counts below zero"))
    }

    /// Reads a reply that is a value.
    pub(super) fn read_value(&mut self, deadline: Instant) -> io::Result<Vec<u8>> {
        let length = u64::from_le_bytes(self.read_array(deadline)?);
        let length = usize::try_from(length).ok().filter(|&length| length <= VALUE_BYTES_MAX);
        let length = length.ok_or_else(|| io::Error::other("the value is longer than allowed"))?;
        let mut bytes = vec![0; length];
        self.fill(&mut bytes, deadline)?;
        Ok(bytes)
    }

    /// Waits until `keys` exist or `deadline` has come. Returns the keys that are missing then.
    pub(super) fn wait<'k>(
        &mut self,
        keys: &[Key<'k>],
        deadline: Instant,
    ) -> io::Result<Vec<Key<'k>>> {
        let outcome = self.drive(Wait::new(keys.to_vec()), deadline, |_, _| Ok(()))?;
        Ok(outcome.err().unwrap_or_default())
    }

    /// Waits until `keys` have values or `deadline` has come. Returns the values, or the keys that are
    /// missing.
    pub(super) fn fetch<'k>(
        &mut self,
        keys: &[Key<'k>],
        deadline: Instant,
    ) -> io::Result<Result<Vec<Vec<u8>>, Vec<Key<'k>>>> {
        let values = |connection: &mut Connection, deadline| {
            keys.iter().map(|_| connection.read_value(deadline)).collect()
        };
        if self.is_extended {
            let fetch = Wait::by(Request::Fetch(keys.to_vec()), keys.to_vec());
            return self.drive(fetch, deadline, values);
        }
        let missing = self.wait(keys, deadline)?;
        if !missing.is_empty() {
            return Ok(Err(missing));
        }
        let patience = Instant::now() + ANSWER_PATIENCE;
        // torch's oldest servers support no lists.
        let request = match keys {
            &[key] => Request::Get(key),
            keys => Request::MultiGet(keys.to_vec()),
        };
        self.send(&[request], patience)?;
        values(self, patience).map(Ok)
    }

    /// Waits until the queue `key` has an item or `deadline` has come. Takes the item.
    pub(super) fn take(&mut self, key: Key<'_>, deadline: Instant) -> io::Result<Option<Vec<u8>>> {
        if self.is_extended {
            return self.ask_and_wait(Request::Take(key), deadline, Connection::read_value);
        }
        loop {
            if let Some(item) = self.pop(key)? {
                return Ok(Some(item));
            }
            // torch's server may wake a client that no longer waits instead of this one. So this one checks
            // from time to time.
            let missing = self.wait(&[key], deadline.min(Instant::now() + RECHECK))?;
            if time_left(deadline).is_err() {
                return self.pop(key);
            }
            if missing.is_empty() {
                // Another client may have been faster, or the key has a value and no item.
                thread::sleep(PAUSE_MIN);
            }
        }
    }

    /// Takes the first item of the queue `key`, if there is one.
    pub(super) fn pop(&mut self, key: Key<'_>) -> io::Result<Option<Vec<u8>>> {
        let patience = Instant::now() + ANSWER_PATIENCE;
        self.send(&[Request::QueuePop(key)], patience)?;
        match i64::from_le_bytes(self.read_array(patience)?) {
            0 => Ok(None),
            _ => self.read_value(patience).map(Some),
        }
    }

    /// Sends a `request` that is answered with STOP_WAITING when an event has happened. Then `read` reads the
    /// rest of the answer. `None`: the event did not happen before `deadline`, and the wait is cancelled.
    pub(super) fn ask_and_wait<T>(
        &mut self,
        request: Request<'_>,
        deadline: Instant,
        read: impl FnMut(&mut Connection, Instant) -> io::Result<T>,
    ) -> io::Result<Option<T>> {
        Ok(self.drive(Wait::by(request, Vec::new()), deadline, read)?.ok())
    }

    /// Waits until `deadline`. After STOP_WAITING, `read` reads the rest of the answer. Otherwise returns the
    /// missing keys.
    fn drive<'k, T>(
        &mut self,
        mut wait: Wait<'k>,
        deadline: Instant,
        mut read: impl FnMut(&mut Connection, Instant) -> io::Result<T>,
    ) -> io::Result<Result<T, Vec<Key<'k>>>> {
        // Asks even if the deadline is in the past, because the event may have happened.
        let request = std::slice::from_ref(wait.request());
        self.send(request, deadline.max(Instant::now() + CANCEL_MAX))?;
        let (mut until, mut answer) = (deadline, None);
        loop {
            let next = match self.read_array(until) {
                Ok([reply]) => {
                    if wait.is_answered_by(reply) {
                        answer = Some(read(self, Instant::now() + CANCEL_MAX)?);
                    }
                    wait.on_reply(reply).map_err(io::Error::other)?
                }
                Err(error) if error.kind() == ErrorKind::TimedOut && wait.is_waiting() => {
                    until = Instant::now() + CANCEL_MAX;
                    Next::Send(vec![wait.give_up()])
                }
                Err(error) => return Err(error),
            };
            match next {
                Next::Listen => {}
                Next::Send(requests) => self.send(&requests, until)?,
                Next::Over(missing) => return Ok(answer.ok_or(missing)),
            }
        }
    }

    fn fill(&mut self, mut unread: &mut [u8], deadline: Instant) -> io::Result<()> {
        while !unread.is_empty() {
            match self.stream.read(unread) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => unread = &mut unread[count..],
                Err(error) => self.sleep_over(error, PollFlags::IN, deadline)?,
            }
        }
        Ok(())
    }

    /// After `error`: sleeps until the stream is ready for `flags`, if that is all that is wrong.
    fn sleep_over(&self, error: io::Error, flags: PollFlags, deadline: Instant) -> io::Result<()> {
        match error.kind() {
            ErrorKind::Interrupted => Ok(()),
            ErrorKind::WouldBlock => {
                time_left(deadline)?;
                sleep_until(&self.stream, flags, deadline);
                Ok(())
            }
            _ => Err(error),
        }
    }
}

/// Connects to `endpoint` as [`Connection::establish`] does. The error says what to look at.
pub(super) fn reach(
    endpoint: &Endpoint,
    proof: Proof<'_>,
    timeout: Duration,
) -> crate::Result<(Connection, Server)> {
    let name = endpoint.to_string();
    let tried = spent(timeout);
    let established = Connection::establish(endpoint, proof, deadline_after(timeout));
    established.map_err(|error| {
        crate::Error::store(
            &name,
            "connect",
            match error.kind() {
                ErrorKind::PermissionDenied => error.to_string(),
                _ if is_hang_up(&error) => format!(
                    "it closes the connection at once ({error}): has one of the two a secret \
                 (DRUMLINE_SECRET, DRUMLINE_SECRET_FILE) and the other none, or listens \
                 something else there?"
                ),
                ErrorKind::ConnectionRefused => format!(
                    "tried for {tried}, and nobody listens there ({error}); is rank 0 or the \
                 launcher, which hosts the store, running, or does it say why not, and are \
                 MASTER_ADDR and MASTER_PORT the same everywhere?"
                ),
                _ => format!(
                    "tried for {tried}: {error}; is rank 0 or the launcher, which hosts the \
                 store, running, and are MASTER_ADDR and MASTER_PORT the same everywhere?"
                ),
            },
        )
    })
}

/// Whether the other end has ended the connection before it said anything.
pub(super) fn is_hang_up(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset)
}

fn is_timeout(error: &io::Error) -> bool {
    error.kind() == ErrorKind::TimedOut
}

/// Whether the server has refused this client. Another attempt will not help.
fn is_refusal(error: &io::Error) -> bool {
    error.kind() == ErrorKind::PermissionDenied
}

fn random_between(low: f64, high: f64) -> f64 {
    let random = RandomState::new().hash_one(Instant::now()) as f64 / u64::MAX as f64;
    low + (high - low) * random
}
