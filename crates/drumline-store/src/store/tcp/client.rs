//! The requests of a client to the server, call by call.

use std::{
    io::{self, ErrorKind},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use drumline_error::spent;

use super::{
    TcpStore,
    connection::{ANSWER_PATIENCE, Connection, Server, is_hang_up},
    protocol::{KEYS_STORED_MAX, Key, READY, Request, Value, WORKERS},
};
use crate::{
    Error, Result,
    store::{
        Store,
        interface::{deadline_after, in_a_fork},
        limits::{check_value, check_world_size, raw_key, raw_keys, raw_pairs, shown},
        values::{Misfit, parse_number},
    },
    text::escaped,
};

/// The most idle connections. Others are closed.
const IDLE_MAX: usize = 4;

impl TcpStore {
    /// Runs `call` on a connection that no other call uses.
    fn call<T>(
        &self,
        operation: impl Fn() -> String,
        call: impl FnOnce(&mut Connection, Instant) -> io::Result<T>,
    ) -> Result<T> {
        if let Some(problem) = in_a_fork(self.process) {
            return Err(self.failed(operation(), problem));
        }
        let start = Instant::now();
        let deadline = deadline_after(self.timeout().max(ANSWER_PATIENCE));
        let failed = |error: io::Error| self.failed(operation(), explain(&error, start.elapsed()));
        // The guard must be dropped before the match.
        let idle = self.idle().pop();
        let mut connection = match idle {
            Some(connection) => connection,
            None => Connection::open(&self.target, deadline).map_err(failed)?,
        };
        // A failed connection is dropped, because it may stand in the middle of a reply.
        let result =
            call(&mut connection, deadline).map_err(|error| self.diagnose(error, failed))?;
        self.keep(connection);
        Ok(result)
    }

    fn keep(&self, connection: Connection) {
        let mut idle = self.idle();
        if idle.len() < IDLE_MAX {
            idle.push(connection);
        }
    }

    /// Finds out whether the server has closed only this connection, or is gone.
    fn diagnose(&self, error: io::Error, failed: impl Fn(io::Error) -> Error) -> Error {
        if !is_hang_up(&error) {
            return failed(error);
        }
        match Connection::open(&self.target, deadline_after(RECALL_MAX)) {
            Ok(connection) => {
                self.keep(connection);
                failed(io::Error::other(format!(
                    "the store has closed the connection over this request ({error}), and its log \
                     says why; it may be full: keys that nobody needs can be deleted, or the store \
                     opened with a larger limit",
                )))
            }
            Err(_) => failed(error),
        }
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

    /// Sends a request that has no reply, and waits until it has been carried out.
    fn tell(&self, operation: impl Fn() -> String, request: Request<'_>) -> Result<()> {
        // The server carries out requests in order, so the reply to a PING after this request shows that it
        // is done.
        let nonce = std::process::id();
        self.call(operation, |connection, deadline| {
            connection.send(&[request, Request::Ping(nonce)], deadline)?;
            connection.read_array::<4>(deadline).map(drop)
        })
    }

    /// Waits until `keys` have values and returns them.
    fn fetch(&self, operation: impl Fn() -> String, keys: &[Key<'_>]) -> Result<Vec<Vec<u8>>> {
        let start = Instant::now();
        let until = deadline_after(self.timeout());
        self.call(operation, |connection, _| connection.fetch(keys, until))?.map_err(|missing| {
            // `missing` leaves out keys that have a queue instead of a value, and keys that came while we asked.
            // If it is empty, the error names all keys.
            self.timed_out(if missing.is_empty() { keys } else { &missing }, start)
        })
    }

    pub(super) fn add_raw(&self, key: Key<'_>, amount: i64) -> Result<i64> {
        let operation = || format!("add {amount} to {}", shown(key.0));
        self.ask(operation, Request::Add(key, amount), |connection, deadline| {
            connection.read_array(deadline).map(i64::from_le_bytes)
        })
    }

    /// The server closes the connection if an addition is impossible. Says so if that has happened.
    fn explain_add(&self, key: &str, amount: i64, error: Error) -> Error {
        let Ok(true) = self.check(&[key]) else { return error };
        let Ok(value) = self.get(key) else { return error };
        let problem = match parse_number(&value) {
            Ok(number) if number.checked_add(amount).is_some() => return error,
            Ok(number) => Misfit::Overflow(number, amount),
            Err(problem) => problem,
        };
        self.failed(format!("add {amount} to {key}"), problem.to_string())
    }

    pub(super) fn failed(&self, operation: String, problem: String) -> Error {
        Error::store(&self.name, &escaped(&operation), escaped(&problem))
    }

    fn timed_out(&self, missing: &[Key<'_>], start: Instant) -> Error {
        Error::missing_keys(
            &self.name,
            missing.iter().map(|key| escaped(&shown(key.0))).collect(),
            start.elapsed(),
        )
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How long a client tries to reach a server that has closed a connection, to find out whether the server is
/// gone.
const RECALL_MAX: Duration = Duration::from_secs(1);

impl Store for TcpStore {
    /// Returns when the server has the value. From then on every reader sees it, on any connection.
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let raw = raw_key("set", key)?;
        check_value("set", value)?;
        self.tell(|| format!("set {key}"), Request::Set(as_key(&raw), Value(value)))
    }

    fn get(&self, key: &str) -> Result<Vec<u8>> {
        let raw = raw_key("get", key)?;
        let values = self.fetch(|| format!("get {key}"), &[as_key(&raw)])?;
        Ok(values.into_iter().next().unwrap_or_default())
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        let raw = raw_key("add", key)?;
        self.add_raw(as_key(&raw), amount).map_err(|error| self.explain_add(key, amount, error))
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        let raw = raw_key("compare_set", key)?;
        check_value("compare_set", expected)?;
        check_value("compare_set", desired)?;
        let request = Request::CompareSet(as_key(&raw), Value(expected), Value(desired));
        self.ask(|| format!("compare_set {key}"), request, Connection::read_value)
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        let raw = raw_keys("wait", keys)?;
        let raw = as_keys(&raw);
        let start = Instant::now();
        let until = deadline_after(timeout);
        let operation = || format!("wait for {}", keys.join(", "));
        let missing = self.call(operation, |connection, _| connection.wait(&raw, until))?;
        if missing.is_empty() { Ok(()) } else { Err(self.timed_out(&missing, start)) }
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        let raw = raw_keys("check", keys)?;
        let operation = || format!("check {}", keys.join(", "));
        self.ask(operation, Request::Check(as_keys(&raw)), |connection, deadline| {
            Ok(connection.read_array(deadline)? == [READY])
        })
    }

    fn num_keys(&self) -> Result<usize> {
        // The server's number includes the count of workers, if any has joined.
        self.call(
            || "num_keys".to_owned(),
            |connection, deadline| {
                let requests = [Request::GetNumKeys(), Request::Check(vec![WORKERS])];
                connection.send(&requests, deadline)?;
                let all = connection.read_count(deadline)?;
                let has_workers = connection.read_array(deadline)? == [READY];
                Ok(all.saturating_sub(usize::from(has_workers)))
            },
        )
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        let raw = raw_key("delete_key", key)?;
        let request = Request::DeleteKey(as_key(&raw));
        let deleted = self.ask(|| format!("delete {key}"), request, Connection::read_count)?;
        Ok(deleted > 0)
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        let raw = raw_key("append", key)?;
        check_value("append", value)?;
        self.tell(|| format!("append to {key}"), Request::Append(as_key(&raw), Value(value)))
    }

    fn multi_get(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>> {
        let raw = raw_keys("multi_get", keys)?;
        if raw.is_empty() {
            return Ok(Vec::new());
        }
        self.fetch(|| format!("multi_get {}", keys.join(", ")), &as_keys(&raw))
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        let raw = raw_pairs("multi_set", pairs)?;
        let raw = raw.iter().map(|(key, value)| (as_key(key), Value(value))).collect();
        let keys = || pairs.iter().map(|(key, _)| *key).collect::<Vec<_>>().join(", ");
        self.tell(|| format!("multi_set {}", keys()), Request::MultiSet(raw))
    }

    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        let raw = raw_key("queue_push", key)?;
        check_value("queue_push", value)?;
        self.tell(|| format!("queue_push {key}"), Request::QueuePush(as_key(&raw), Value(value)))
    }

    fn queue_pop(&self, key: &str) -> Result<Vec<u8>> {
        let raw = raw_key("queue_pop", key)?;
        let start = Instant::now();
        let until = deadline_after(self.timeout());
        let operation = || format!("queue_pop {key}");
        self.call(operation, |connection, _| connection.take(as_key(&raw), until))?
            .ok_or_else(|| self.timed_out(&[as_key(&raw)], start))
    }

    fn queue_try_pop(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let raw = raw_key("queue_try_pop", key)?;
        self.call(|| format!("queue_try_pop {key}"), |connection, _| connection.pop(as_key(&raw)))
    }

    fn queue_len(&self, key: &str) -> Result<usize> {
        let raw = raw_key("queue_len", key)?;
        let request = Request::QueueLen(as_key(&raw));
        self.ask(|| format!("queue_len {key}"), request, Connection::read_count)
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        let list = |connection: &mut Connection, deadline| {
            let count = connection.read_count(deadline)?;
            if count > KEYS_STORED_MAX {
                return Err(io::Error::other("the store has more keys than can be listed"));
            }
            (0..count).map(|_| connection.read_value(deadline)).collect::<io::Result<Vec<_>>>()
        };
        let raw = self.ask(|| "list_keys".to_owned(), Request::ListKeys(), list)?;
        let users = raw.iter().filter(|key| key.starts_with(b"/"));
        let mut keys: Vec<_> = users.map(|key| shown(key)).collect();
        keys.sort_unstable();
        Ok(keys)
    }

    fn barrier(&self, key: &str, world_size: usize, timeout: Duration) -> Result<()> {
        let raw = raw_key("barrier", key)?;
        let request = Request::Barrier(as_key(&raw), check_world_size(world_size)?);
        let start = Instant::now();
        let until = deadline_after(timeout);
        let operation = || format!("barrier {key} of {world_size}");
        self.call(operation, |connection, _| {
            connection.ask_and_wait(request, until, |_, _| Ok(()))
        })?
        .ok_or_else(|| self.timed_out(&[as_key(&raw)], start))
    }

    fn timeout(&self) -> Duration {
        self.timeout.get()
    }

    fn set_timeout(&self, timeout: Duration) {
        self.timeout.set(timeout);
    }

    /// A client with connections of its own. If this process hosts the store, the clone does not keep the
    /// store alive.
    fn try_clone(&self) -> Result<Box<dyn Store>> {
        let deadline = deadline_after(ANSWER_PATIENCE);
        // A fork must not use the connections of its parent.
        let target = match in_a_fork(self.process) {
            Some(_) => Server { open: Arc::default(), ..self.target.clone() },
            None => self.target.clone(),
        };
        let connection = Connection::open(&target, deadline)
            .map_err(|error| self.failed("clone".to_owned(), explain(&error, ANSWER_PATIENCE)))?;
        Ok(Box::new(TcpStore {
            name: self.name.clone(),
            target,
            idle: Mutex::new(vec![connection]),
            timeout: self.timeout.clone(),
            hosted: None,
            process: std::process::id(),
        }))
    }
}

fn as_key(raw: &str) -> Key<'_> {
    Key(raw.as_bytes())
}

fn as_keys(raw: &[String]) -> Vec<Key<'_>> {
    raw.iter().map(|key| as_key(key)).collect()
}

/// The text for a socket's error.
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
            "no answer in {}; the process that hosts the store is stopped, or its host cannot be reached",
            spent(waited)
        ),
        _ => error.to_string(),
    }
}
