//! The TCP store's server as a state machine: bytes of connections go in and out. It has no sockets and no
//! clock.
//!
//! Its driver (the thread of [`TcpStoreServer`](super::TcpStoreServer), a test, or a simulator) says when a
//! connection opens, what has arrived on it, and when it is gone. The driver writes the bytes of
//! [`Server::output`], and closes the connections of [`Server::take_refused`].
//!
//! ```
//! # use drumline_store as drumline;
//! use drumline::store::tcp::protocol::{MAGIC, Request};
//! use drumline::store::tcp::server::Server;
//!
//! let mut server = Server::default();
//! let connection = server.connect();
//! let mut bytes = Vec::new();
//! Request::Validate(MAGIC).encode(&mut bytes);
//! Request::Ping(7).encode(&mut bytes);
//! server.receive(connection, &bytes);
//! assert_eq!(server.output(connection), [7, 0, 0, 0]);
//! ```
//!
//! The protocol has no authentication: every client that can connect can read and write every key. (The
//! handshake of [`TcpStoreServer::bind_secured`](super::TcpStoreServer::bind_secured) comes before a
//! connection gets here.) The buffers of each connection are bounded (see the `*_MAX` constants here and in
//! [`protocol`](super::protocol)). A connection that breaks a rule is refused, without an effect on others.
//! The bytes that all of them store together are bounded as well ([`Server::with_limit`]).

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fmt,
};

use super::protocol::{
    ASK_EXTENSIONS, Decoded, EXTENSIONS, Field, Key, MAGIC, NOT_READY, ProtocolError, READY,
    Request, STOP_WAITING, VALUE_BYTES_MAX, Value, WAIT_CANCELED, WORKERS, decode,
};
use crate::{
    store::{
        BYTES_MAX,
        values::{Misfit, Values},
    },
    text::escaped,
};

/// The most bytes that may wait for one connection's reader. A client that makes one request at a time never
/// comes near this limit, unless it asks for that much in a single request.
pub const OUTPUT_BYTES_MAX: usize = 32 << 20;

/// The most bytes in incomplete requests and unread replies of all connections without a secret together. If
/// there are more, the connection with the most of them is refused.
pub const STRANGERS_BYTES_MAX: usize = 64 << 20;

/// The length of the buffer that a connection keeps after a long request or reply.
const BYTES_KEPT: usize = 64 << 10;

/// The identity of a connection in calls to [`Server`]. It is never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(pub(super) u64);

/// All keys, queues, connections and waits of one store.
#[derive(Debug)]
pub struct Server {
    values: Values,
    connections: BTreeMap<ConnectionId, Connection>,
    /// The number of connections that belong to a store's client.
    clients: usize,
    /// The connections of ranks: of a program of ours, or of one that has joined the job.
    ranks: BTreeSet<ConnectionId>,
    /// The number of buffered bytes of all connections that are `counted`.
    strangers_bytes: usize,
    /// The waiting connections for each event, those that have waited longest first. Never holds an empty
    /// list.
    waiters: BTreeMap<Event, VecDeque<ConnectionId>>,
    /// Connections that got output since the last [`Server::take_answered`].
    answered: BTreeSet<ConnectionId>,
    refused: Vec<(ConnectionId, Refusal)>,
    next_id: u64,
}

/// The memory that a server has for its connections, besides keys and queues. It goes when the connections
/// go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// The number of connections.
    pub connections: usize,
    /// The number of keys and barriers for which connections wait.
    pub waits: usize,
    /// The number of bytes in incomplete requests.
    pub input_bytes: usize,
    /// The number of bytes in unwritten replies.
    pub output_bytes: usize,
}

impl Default for Server {
    /// A server with the limit [`BYTES_MAX`].
    fn default() -> Server {
        Server::with_limit(BYTES_MAX)
    }
}

/// Why the server refused a connection.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The first request was not VALIDATE with the right number.
    #[error("it does not begin as a TCP store's client does")]
    NotAClient,
    /// The bytes that it sent are no request.
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
    /// ADD to a value that is no number, or with a sum beyond 64 bits.
    #[error("ADD on key {key}: {problem}")]
    Add {
        /// The key as on the wire, with its `/`.
        key: String,
        /// What is wrong with the present value.
        problem: String,
    },
    /// APPEND made a value longer than clients accept.
    #[error("APPEND made key {0} longer than {VALUE_BYTES_MAX} bytes")]
    AppendedTooMuch(String),
    /// The store would exceed its limit.
    #[error("key {key}: {problem}")]
    Full {
        /// The key as on the wire, with its `/`.
        key: String,
        /// The limit.
        problem: String,
    },
    /// It sent a waiting request before the last one had ended.
    #[error("it waits twice at a time")]
    WaitsTwice,
    /// It asked for more than it read.
    #[error("more than {OUTPUT_BYTES_MAX} bytes of replies are waiting for it")]
    SlowReader,
    /// It had the most buffered bytes when strangers together had too many.
    #[error(
        "requests and replies under way of all who came without a secret exceed \
         {STRANGERS_BYTES_MAX} bytes, and it has the most of them"
    )]
    Crowded,
}

impl fmt::Debug for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What a connection can wait for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The key has a value, or a queue that is not empty.
    Present(Vec<u8>),
    /// The key has a value.
    Value(Vec<u8>),
    /// The queue under the key has an item.
    Item(Vec<u8>),
    /// The barrier under the key is complete.
    Complete(Vec<u8>),
}

#[derive(Debug, Default)]
struct Connection {
    validated: bool,
    /// Whether it has proven no secret. Then its bytes count in `strangers_bytes`.
    is_stranger: bool,
    counted: usize,
    input: Vec<u8>,
    /// The length that `input` must have before it makes sense to decode again.
    input_needed: usize,
    output: VecDeque<u8>,
    /// The events for which the present wait still waits. Empty without a wait.
    waits_for: BTreeSet<Event>,
    wanted: Wanted,
}

/// The reply after STOP_WAITING when the wait is over.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum Wanted {
    #[default]
    Nothing,
    Values(Vec<Vec<u8>>),
    Item(Vec<u8>),
}

impl Server {
    /// An empty store whose keys, values and queues may take `bytes_max` bytes together.
    pub fn with_limit(bytes_max: usize) -> Server {
        Server {
            values: Values::new(bytes_max),
            connections: BTreeMap::new(),
            clients: 0,
            ranks: BTreeSet::new(),
            strangers_bytes: 0,
            waiters: BTreeMap::new(),
            answered: BTreeSet::new(),
            refused: Vec::new(),
            next_id: 0,
        }
    }

    /// A connection was accepted.
    pub fn connect(&mut self) -> ConnectionId {
        let id = ConnectionId(self.next_id);
        self.next_id += 1;
        self.connections.insert(id, Connection::default());
        id
    }

    /// Like [`Server::connect`], for a client that has proven no secret. The buffers of all such clients
    /// together are limited ([`STRANGERS_BYTES_MAX`]).
    pub fn connect_stranger(&mut self) -> ConnectionId {
        let id = self.connect();
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.is_stranger = true;
        }
        id
    }

    /// `bytes` have arrived on a connection. They may end anywhere in a request.
    ///
    /// Bytes for a connection that does not exist (any more) are ignored.
    pub fn receive(&mut self, id: ConnectionId, bytes: &[u8]) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.input.extend_from_slice(bytes);
        let is_complete = connection.input.len() >= connection.input_needed;
        self.count(id);
        if !is_complete {
            return;
        }
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let input = std::mem::take(&mut connection.input);
        match self.serve(id, &input) {
            Ok((used, needed)) => {
                if let Some(connection) = self.connections.get_mut(&id) {
                    connection.input = input;
                    connection.input.drain(..used);
                    connection.input.shrink_to(BYTES_KEPT);
                    connection.input_needed = needed;
                }
                self.count(id);
            }
            Err(refusal) => self.refuse(id, refusal),
        }
    }

    /// A connection is gone. It waits for nothing any more.
    pub fn disconnect(&mut self, id: ConnectionId) {
        self.stop_waiting(id);
        self.answered.remove(&id);
        self.ranks.remove(&id);
        if let Some(gone) = self.connections.remove(&id) {
            self.clients -= usize::from(gone.validated);
            self.strangers_bytes -= gone.counted;
        }
    }

    /// The connections that got output since the last call.
    pub fn take_answered(&mut self) -> BTreeSet<ConnectionId> {
        std::mem::take(&mut self.answered)
    }

    /// The next bytes to write to a connection; empty when there are none.
    pub fn output(&self, id: ConnectionId) -> &[u8] {
        self.connections.get(&id).map_or(&[], |connection| connection.output.as_slices().0)
    }

    /// The first `count` bytes of [`Server::output`] were written.
    pub fn written(&mut self, id: ConnectionId, count: usize) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.output.drain(..count.min(connection.output.len()));
            if connection.output.is_empty() {
                connection.output.shrink_to(BYTES_KEPT);
            }
        }
        self.count(id);
    }

    /// The connections that the server has refused since the last call, and why. They are disconnected
    /// already. The driver must close their sockets.
    pub fn take_refused(&mut self) -> Vec<(ConnectionId, Refusal)> {
        std::mem::take(&mut self.refused)
    }

    /// The number of connections that belong to a store's client.
    pub fn clients(&self) -> usize {
        self.clients
    }

    /// The connections of ranks: of our clients, and of others that have joined the job
    /// ([`TcpStore::wait_for_workers`](super::TcpStore::wait_for_workers), and torch's).
    pub fn ranks(&self) -> &BTreeSet<ConnectionId> {
        &self.ranks
    }

    /// The memory that the server has for connections now.
    pub fn load(&self) -> Load {
        let sum = |of: fn(&Connection) -> usize| self.connections.values().map(of).sum();
        Load {
            connections: self.connections.len(),
            waits: self.waiters.values().map(VecDeque::len).sum(),
            input_bytes: sum(|connection| connection.input.len()),
            output_bytes: sum(|connection| connection.output.len()),
        }
    }

    /// Carries out all complete requests in `input`. Returns how many bytes they took, and the least length
    /// of the next request.
    fn serve(&mut self, id: ConnectionId, input: &[u8]) -> Result<(usize, usize), Refusal> {
        let validated = self.connections.get(&id).is_some_and(|connection| connection.validated);
        // This check comes before any other.
        if !validated && input.first().is_some_and(|&opcode| opcode != 0) {
            return Err(Refusal::NotAClient);
        }
        let mut used = 0;
        loop {
            match decode(&input[used..])? {
                Decoded::NeedsBytes(needed) => return Ok((used, needed)),
                Decoded::Request(request, length) => {
                    self.answer(id, request)?;
                    used += length;
                }
            }
            // Its own replies may have exceeded the limit.
            if !self.connections.contains_key(&id) {
                return Ok((used, 0));
            }
        }
    }

    fn answer(&mut self, id: ConnectionId, request: Request<'_>) -> Result<(), Refusal> {
        match request {
            Request::Validate(MAGIC) => {
                if let Some(connection) = self.connections.get_mut(&id) {
                    self.clients += usize::from(!connection.validated);
                    connection.validated = true;
                }
            }
            Request::Validate(_) => return Err(Refusal::NotAClient),
            Request::Set(Key(key), Value(value)) => self.set(key, value)?,
            Request::CompareSet(Key(key), Value(expected), Value(desired)) => {
                let value = self.values.compare_set(key, expected, desired);
                let value = value.map_err(|misfit| refusal(key, misfit))?;
                self.reply(id, Value(&value));
                // torch wakes waiting clients even if the key stays absent.
                if self.values.get(key).is_some() {
                    self.value_is_present(key);
                }
            }
            Request::Get(key) => self.reply_value(id, key.0),
            Request::Add(Key(key), amount) => {
                if key == WORKERS.0 {
                    self.ranks.insert(id);
                }
                let sum = self.add(key, amount)?;
                self.reply(id, sum);
            }
            Request::Check(keys) => {
                let ready = keys.iter().all(|key| self.values.is_present(key.0));
                self.reply(id, if ready { READY } else { NOT_READY });
            }
            Request::Wait(keys) => {
                let absent = keys.iter().filter(|key| !self.values.is_present(key.0));
                let absent = absent.map(|key| Event::Present(key.0.to_vec())).collect();
                self.wait(id, absent, Wanted::Nothing)?;
            }
            Request::GetNumKeys() => self.reply(id, self.values.len() as i64),
            Request::DeleteKey(Key(key)) => {
                let deleted = self.values.delete(key);
                self.reply(id, i64::from(deleted));
            }
            Request::Append(Key(key), Value(value)) => {
                self.values.append(key, value).map_err(|misfit| refusal(key, misfit))?;
                self.value_is_present(key);
            }
            Request::MultiGet(keys) => {
                keys.iter().for_each(|key| self.reply_value(id, key.0));
            }
            Request::MultiSet(pairs) => {
                pairs.iter().try_for_each(|(key, value)| self.set(key.0, value.0))?;
            }
            Request::CancelWait() => {
                self.stop_waiting(id);
                self.reply(id, WAIT_CANCELED);
            }
            Request::Ping(ASK_EXTENSIONS) => {
                self.ranks.insert(id);
                self.reply(id, EXTENSIONS);
            }
            Request::Ping(nonce) => self.reply(id, nonce),
            Request::QueuePush(Key(key), Value(value)) => {
                self.values.push(key, value).map_err(|misfit| refusal(key, misfit))?;
                self.item_is_present(key);
            }
            Request::QueuePop(Key(key)) => {
                let length = self.values.queue_len(key);
                self.reply(id, length as i64);
                if let Some(first) = self.values.pop(key) {
                    self.reply(id, Value(&first));
                }
            }
            Request::QueueLen(Key(key)) => self.reply(id, self.values.queue_len(key) as i64),
            Request::ListKeys() => {
                let mut list = Vec::new();
                (self.values.len() as i64).write(&mut list);
                self.values.keys().for_each(|key| Key(key).write(&mut list));
                self.send(id, &list);
            }
            Request::Barrier(Key(key), world_size) => {
                let complete = Event::Complete(key.to_vec());
                if self.add(key, 1)? >= world_size {
                    self.happened(&complete, usize::MAX);
                    self.reply(id, STOP_WAITING);
                } else {
                    self.wait(id, BTreeSet::from([complete]), Wanted::Nothing)?;
                }
            }
            Request::Fetch(keys) => {
                let wanted = keys.iter().map(|key| key.0.to_vec()).collect();
                self.wait_for_values(id, wanted)?;
            }
            Request::Take(Key(key)) => {
                let item = Event::Item(key.to_vec());
                let absent = Some(item).filter(|_| self.values.first(key).is_none());
                self.wait(id, absent.into_iter().collect(), Wanted::Item(key.to_vec()))?;
            }
        }
        Ok(())
    }

    fn set(&mut self, key: &[u8], value: &[u8]) -> Result<(), Refusal> {
        self.values.set(key, value).map_err(|misfit| refusal(key, misfit))?;
        self.value_is_present(key);
        Ok(())
    }

    fn add(&mut self, key: &[u8], amount: i64) -> Result<i64, Refusal> {
        let sum = self.values.add(key, amount).map_err(|misfit| refusal(key, misfit))?;
        self.value_is_present(key);
        Ok(sum)
    }

    fn wait_for_values(&mut self, id: ConnectionId, keys: Vec<Vec<u8>>) -> Result<(), Refusal> {
        let absent = keys.iter().filter(|key| self.values.get(key).is_none());
        let absent = absent.map(|key| Event::Value(key.clone())).collect();
        self.wait(id, absent, Wanted::Values(keys))
    }

    /// Notes that a connection waits for `events`, and which reply it gets.
    fn wait(
        &mut self,
        id: ConnectionId,
        events: BTreeSet<Event>,
        wanted: Wanted,
    ) -> Result<(), Refusal> {
        let Some(connection) = self.connections.get_mut(&id) else { return Ok(()) };
        if !connection.waits_for.is_empty() {
            return Err(Refusal::WaitsTwice);
        }
        connection.wanted = wanted;
        if events.is_empty() {
            return self.wait_is_over(id);
        }
        for event in &events {
            self.waiters.entry(event.clone()).or_default().push_back(id);
        }
        connection.waits_for = events;
        Ok(())
    }

    fn wait_is_over(&mut self, id: ConnectionId) -> Result<(), Refusal> {
        let Some(connection) = self.connections.get_mut(&id) else { return Ok(()) };
        match std::mem::take(&mut connection.wanted) {
            Wanted::Nothing => self.reply(id, STOP_WAITING),
            // A key that came first may have been deleted before the last key came.
            Wanted::Values(keys) if keys.iter().any(|key| self.values.get(key).is_none()) => {
                self.wait_for_values(id, keys)?;
            }
            Wanted::Values(keys) => {
                self.reply(id, STOP_WAITING);
                keys.iter().for_each(|key| self.reply_value(id, key));
            }
            Wanted::Item(key) => {
                let item = self.values.pop(&key).unwrap_or_default();
                self.reply(id, STOP_WAITING);
                self.reply(id, Value(&item));
            }
        }
        Ok(())
    }

    fn stop_waiting(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.wanted = Wanted::Nothing;
        for event in std::mem::take(&mut connection.waits_for) {
            if let Some(waiters) = self.waiters.get_mut(&event) {
                waiters.retain(|&waiter| waiter != id);
                if waiters.is_empty() {
                    self.waiters.remove(&event);
                }
            }
        }
    }

    /// A value has come: wakes all clients that wait for it.
    fn value_is_present(&mut self, key: &[u8]) {
        self.happened(&Event::Present(key.to_vec()), usize::MAX);
        self.happened(&Event::Value(key.to_vec()), usize::MAX);
    }

    /// An item has come: wakes one client that waits for the queue, and prefers one that takes the item at
    /// once.
    fn item_is_present(&mut self, key: &[u8]) {
        if self.happened(&Event::Item(key.to_vec()), 1) == 0 {
            self.happened(&Event::Present(key.to_vec()), 1);
        }
    }

    /// Tells the first `count` waiting clients that `event` has happened. Returns how many there were.
    fn happened(&mut self, event: &Event, count: usize) -> usize {
        let Some(waiters) = self.waiters.get_mut(event) else { return 0 };
        let told: Vec<_> = waiters.drain(..count.min(waiters.len())).collect();
        if waiters.is_empty() {
            self.waiters.remove(event);
        }
        for &id in &told {
            let Some(connection) = self.connections.get_mut(&id) else { continue };
            connection.waits_for.remove(event);
            if connection.waits_for.is_empty()
                && let Err(refusal) = self.wait_is_over(id)
            {
                self.refuse(id, refusal);
            }
        }
        told.len()
    }

    /// Replies with the value of `key`, empty if there is none.
    fn reply_value(&mut self, id: ConnectionId, key: &[u8]) {
        // Values after one that exceeded the limit need not be copied.
        if self.connections.contains_key(&id) {
            let mut reply = Vec::new();
            Value(self.values.get(key).unwrap_or_default()).write(&mut reply);
            self.send(id, &reply);
        }
    }

    fn reply<'a>(&mut self, id: ConnectionId, reply: impl Field<'a>) {
        let mut bytes = Vec::new();
        reply.write(&mut bytes);
        self.send(id, &bytes);
    }

    fn send(&mut self, id: ConnectionId, bytes: &[u8]) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if connection.output.len() + bytes.len() > OUTPUT_BYTES_MAX {
            return self.refuse(id, Refusal::SlowReader);
        }
        connection.output.extend(bytes);
        self.answered.insert(id);
        self.count(id);
    }

    /// Counts the buffered bytes of a client without a secret. If all such clients have too many together,
    /// refuses the one with the most.
    fn count(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if !connection.is_stranger {
            return;
        }
        let present = connection.input.len() + connection.output.len();
        self.strangers_bytes = self.strangers_bytes - connection.counted + present;
        connection.counted = present;
        while self.strangers_bytes > STRANGERS_BYTES_MAX {
            let greediest = self.connections.iter().max_by_key(|(_, other)| other.counted);
            let Some((&greediest, _)) = greediest else { return };
            self.refuse(greediest, Refusal::Crowded);
        }
    }

    fn refuse(&mut self, id: ConnectionId, refusal: Refusal) {
        self.disconnect(id);
        self.refused.push((id, refusal));
    }
}

/// The refusal of a request that cannot be carried out.
fn refusal(key: &[u8], misfit: Misfit) -> Refusal {
    let key = shown(key);
    match misfit {
        Misfit::NotANumber(_) | Misfit::Overflow(..) => {
            Refusal::Add { key, problem: misfit.to_string() }
        }
        Misfit::TooLong => Refusal::AppendedTooMuch(key),
        Misfit::Full(_) => Refusal::Full { key, problem: misfit.to_string() },
    }
}

/// A key as text for messages.
fn shown(key: &[u8]) -> String {
    let start: String = String::from_utf8_lossy(key).chars().take(100).collect();
    escaped(&start)
}
