//! A store in etcd, for the hosts of a job: it outlives each of them.
//!
//! The servers are spoken to through their JSON gateway (HTTP/1.1), which etcd 3.4 and newer have at the
//! same port as gRPC. In etcd a job has a folder of keys:
//!
//! | key | what it holds |
//! |---|---|
//! | `PREFIX/JOB/value/KEY` | the value of `KEY` |
//! | `PREFIX/JOB/queue/LENGTH/KEY/...` | an item of its queue; `LENGTH` is that of `KEY` in bytes |
//! | `PREFIX/JOB/writer/...` | what a handle has written last, so that nothing is written twice |

mod api;
mod cluster;
mod failure;
mod once;
mod servers;

use std::{
    collections::BTreeMap,
    hash::{BuildHasher as _, RandomState},
    net::{IpAddr, SocketAddr},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use drumline_error::{ErrorKind, Section};
use serde_json::Value;

use self::{
    api::{Answer, Found, Span, Txn, look, put, txn},
    once::{Change, Writers},
    servers::Servers,
};
use super::{
    Store,
    interface::{deadline_after, in_a_fork},
    limits::{raw_key, raw_keys, raw_pairs, shown},
    timeout::Timeout,
    values::{Misfit, parse_number},
};
use crate::{Error, Result, text::escaped};

pub use self::cluster::{Cluster, User};

/// The longest value. A request to etcd has at most 1.5 MiB, unless its servers are started with another limit.
pub const VALUE_BYTES_MAX: usize = 1 << 20;

/// How many operations a transaction has at most: etcd's limit is 128, and some are ours.
const OPERATIONS_MAX: usize = 100;

/// How long a waiting call watches before it looks again: a server that is stopped tells nobody.
const WATCH: Duration = Duration::from_secs(2);

/// The time between two looks where watching fails.
const POLL: Duration = Duration::from_millis(100);

/// How long a waiting call may be late because no server answers.
const LATE_MAX: Duration = Duration::from_secs(2);

/// The longest pause after somebody else has changed the same key, before the next attempt.
const PAUSE_MAX: Duration = Duration::from_millis(50);

/// A store in [etcd](https://etcd.io) 3.4 or newer, for hosts any of which may go.
///
/// A request that gets no answer goes to the next server, until one answers or the time that the store was
/// opened with is over, and goes through no proxy. However often a change is sent, it happens once. Waiting calls are
/// told of changes, so thousands of them are no load.
///
/// Keys stay in etcd until [`EtcdStore::clear`]. Values have at most 1 MiB ([`VALUE_BYTES_MAX`]). A
/// [`multi_set`](Store::multi_set) of up to 100 keys and 1 MiB happens at once, a larger one in parts.
///
/// It needs the feature `etcd`.
///
/// ```no_run
/// # use drumline_store as drumline;
/// use std::time::Duration;
///
/// use drumline::store::{Cluster, EtcdStore, Store, etcd::User};
///
/// let cluster = Cluster {
///     servers: vec!["http://etcd-0:2379".into(), "http://etcd-1:2379".into()],
///     user: User::from_env()?,
///     ..Cluster::default()
/// };
/// let store = EtcdStore::open(&cluster, "job-17", Duration::from_secs(30))?;
/// store.set("address/0", b"10.0.0.1:4000")?;
/// assert_eq!(store.get("address/0")?, b"10.0.0.1:4000");
/// store.clear()?;
/// # Ok::<(), drumline::Error>(())
/// ```
#[derive(Debug)]
pub struct EtcdStore {
    handle: Arc<Handle>,
    timeout: Timeout,
}

/// What all clones share.
#[derive(Debug)]
struct Handle {
    cluster: Cluster,
    job: String,
    /// What the job's keys begin with.
    root: String,
    servers: Servers,
    writers: Writers,
    /// How long no server may answer.
    patience: Duration,
    /// The process that made it. A fork must not use its connections and marks.
    process: u32,
}

impl Handle {
    fn new(cluster: &Cluster, job: &str, patience: Duration) -> Result<Handle> {
        let root = cluster.root(job);
        let hosts =
            cluster.servers.iter().map(|url| url.split_once("://").map_or(&**url, |it| it.1));
        let hosts: Vec<_> = hosts.map(|host| host.trim_end_matches('/')).collect();
        let slash = if root.starts_with('/') { "" } else { "/" };
        let name = format!("etcd://{}{slash}{}", hosts.join(","), root.trim_end_matches('/'));
        Ok(Handle {
            cluster: cluster.clone(),
            job: job.to_owned(),
            servers: Servers::new(cluster, escaped(&name))?,
            writers: Writers::new(&root)?,
            root,
            patience,
            process: std::process::id(),
        })
    }
}

/// What becomes of a key.
enum Fate {
    Stays,
    Becomes(Vec<u8>),
    Goes,
}

/// What a waiting call waits for.
#[derive(Clone, Copy)]
enum Awaited {
    Value,
    Item,
    ValueOrItem,
}

impl EtcdStore {
    /// Opens the store of `job` in etcd. If no server answers, it tries again until `timeout`; so does every
    /// later call.
    ///
    /// # Errors
    ///
    /// [`Setting`](drumline_error::ErrorKind::Setting) if an URL or a file of `cluster` is wrong, if all servers are
    /// wrong (no etcd, no certificate that is trusted), or if one refuses the user.
    /// [`Store`](drumline_error::ErrorKind::Store) after `timeout` if none has answered.
    pub fn open(cluster: &Cluster, job: &str, timeout: Duration) -> Result<EtcdStore> {
        let handle = Arc::new(Handle::new(cluster, job, timeout)?);
        let store = EtcdStore { handle, timeout: Timeout::default() };
        let deadline = deadline_after(timeout);
        let found = store.range("open", &Span::folder(store.key("value/")).count(), deadline);
        found.map_err(|error| match error.kind() {
            // No server will ever take this process.
            ErrorKind::Store if Instant::now() < deadline => {
                Error::quoting(ErrorKind::Setting, Section::Settings, error.message())
            }
            _ => error,
        })?;
        if cluster.user.is_some() && cluster.servers.iter().any(|url| is_open_to_listeners(url)) {
            tracing::warn!(
                store = store.name(),
                "the password for etcd goes through the network as it is; give servers https:// and a certificate"
            );
        }
        Ok(store)
    }

    /// The servers, the prefix and the job as text, for messages.
    pub fn name(&self) -> &str {
        self.handle.servers.name()
    }

    /// The address of the server that answered last; `None` if it cannot be reached now.
    pub fn address(&self) -> Option<SocketAddr> {
        self.handle.servers.address()
    }

    /// Removes all keys of the job, those of other handles too.
    ///
    /// # Errors
    ///
    /// [`Store`](drumline_error::ErrorKind::Store) if no server answers, or others write without a pause.
    pub fn clear(&self) -> Result<()> {
        let (all, deadline) = (Span::folder(self.key("")), self.deadline());
        loop {
            let revision = self.range("clear", &all.count(), deadline)?.header.revision;
            // A request that arrives late must not remove what came after it.
            let request = txn(&[all.is_unchanged_since(revision)], &[all.delete()], &[]);
            if self.txn("clear", &request, deadline)?.body.succeeded {
                return Ok(());
            }
            // It may have been this call, whose answer was lost. Then nothing is there.
            if self.range("clear", &all.count(), deadline)?.body.count == 0 {
                return Ok(());
            }
            self.check_time("clear", deadline)?;
        }
    }

    /// A key of the job in etcd.
    fn key(&self, name: &str) -> String {
        format!("{}{name}", self.handle.root)
    }

    /// Where the value of `raw` is, which begins with a `/`.
    fn value_key(&self, raw: &str) -> String {
        self.key(&format!("value{raw}"))
    }

    /// Where the items of the queue of `raw` are. The length keeps a key apart from those that begin with it.
    fn queue_folder(&self, raw: &str) -> String {
        self.key(&format!("queue/{}{raw}/", raw.len() - 1))
    }

    fn deadline(&self) -> Instant {
        deadline_after(self.handle.patience)
    }

    /// The deadline of a request in a call that waits until `waits_until`.
    fn deadline_of_look(&self, waits_until: Instant) -> Instant {
        self.deadline().min(waits_until.max(Instant::now() + LATE_MAX))
    }

    fn servers(&self) -> Result<&Servers> {
        let servers = &self.handle.servers;
        match in_a_fork(self.handle.process) {
            Some(problem) => Err(servers.error("use", problem)),
            None => Ok(servers),
        }
    }

    fn range(&self, operation: &str, range: &Value, deadline: Instant) -> Result<Answer<Found>> {
        self.servers()?.call(operation, "/v3/kv/range", range, deadline)
    }

    fn txn(&self, operation: &str, request: &Value, deadline: Instant) -> Result<Answer<Txn>> {
        self.servers()?.call(operation, "/v3/kv/txn", request, deadline)
    }

    fn make(
        &self,
        operation: &str,
        change: &Change,
        deadline: Instant,
    ) -> Result<Option<Vec<Found>>> {
        self.handle.writers.make(self.servers()?, operation, change, deadline)
    }

    fn misfit(&self, operation: &str, misfit: &Misfit) -> Error {
        self.handle.servers.error(operation, escaped(&misfit.to_string()))
    }

    fn check_time(&self, operation: &str, deadline: Instant) -> Result<()> {
        if Instant::now() < deadline {
            return Ok(());
        }
        let problem = "others change the same keys without a pause; try later".to_owned();
        Err(self.handle.servers.error(operation, problem))
    }

    /// Decides by the present value what becomes of a key, until nobody else changes it meanwhile.
    fn update<T>(
        &self,
        operation: &str,
        raw: &str,
        decide: impl Fn(Option<&[u8]>) -> Result<(Fate, T)>,
    ) -> Result<T> {
        let deadline = self.deadline();
        let key = self.value_key(raw);
        let span = Span::key(key.as_str());
        let mut present = self.range(operation, &span.range(), deadline)?.body.first();
        let mut pauses = Pauses::default();
        loop {
            let (fate, result) = decide(present.as_ref().map(|item| &*item.value))?;
            let then = match fate {
                Fate::Stays => return Ok(result),
                Fate::Becomes(value) => put(key.as_bytes(), &value),
                Fate::Goes => span.delete(),
            };
            let revision = present.as_ref().map_or(0, |item| item.mod_revision);
            let change = Change {
                compare: vec![span.was_changed_at(revision)],
                then: vec![then],
                otherwise: vec![look(&span.range())],
            };
            let Some(found) = self.make(operation, &change, deadline)? else { return Ok(result) };
            present = found.into_iter().next().and_then(Found::first);
            self.check_time(operation, deadline)?;
            pauses.pause();
        }
    }

    /// The values of `keys`, all from the same moment.
    fn values(
        &self,
        operation: &str,
        keys: &[String],
        deadline: Instant,
    ) -> Result<Vec<Option<Vec<u8>>>> {
        let (mut values, mut moment) = (Vec::new(), None);
        for keys in keys.chunks(OPERATIONS_MAX) {
            let range = |key: &String| {
                let span = Span::key(self.value_key(key));
                look(&moment.map_or_else(|| span.range(), |revision| span.range_at(revision)))
            };
            let ranges: Vec<_> = keys.iter().map(range).collect();
            let answer = self.txn(operation, &txn(&[], &ranges, &[]), deadline)?;
            values.extend(answer.body.found().map(|it| it.first().map(|item| item.value)));
            moment.get_or_insert(answer.header.revision);
        }
        Ok(values)
    }

    /// Waits until all `keys` have a value, and returns the values.
    fn wait_for_values(&self, operation: &str, keys: &[&str]) -> Result<Vec<Vec<u8>>> {
        let wait = Wait::new(self.timeout());
        let keys = raw_keys("get", keys)?;
        loop {
            let values = self.values(operation, &keys, self.deadline_of_look(wait.until))?;
            if let Some(values) = values.into_iter().collect() {
                return Ok(values);
            }
            self.wait_for(operation, &keys, Awaited::Value, &wait)?;
        }
    }

    fn wait_for(
        &self,
        operation: &str,
        keys: &[String],
        awaited: Awaited,
        wait: &Wait,
    ) -> Result<()> {
        loop {
            let (missing, moment) =
                self.missing(operation, keys, awaited, self.deadline_of_look(wait.until))?;
            let Some(first) = missing.first() else { return Ok(()) };
            let now = Instant::now();
            if now >= wait.until {
                return Err(Error::missing_keys(
                    self.name(),
                    missing.iter().map(|key| escaped(&shown(key.as_bytes()))).collect(),
                    wait.start.elapsed(),
                ));
            }
            let until = wait.until.min(now + WATCH);
            let spans = self.spans(first, awaited);
            let watches: Vec<_> = spans.iter().map(|span| span.watch(moment + 1)).collect();
            if !self.servers()?.watch(&watches, until) {
                let left = until.saturating_duration_since(Instant::now());
                thread::sleep(POLL.min(left));
            }
        }
    }

    /// Which of `keys` are missing at the moment (a revision), or at a later one.
    fn missing<'k>(
        &self,
        operation: &str,
        keys: &'k [String],
        awaited: Awaited,
        deadline: Instant,
    ) -> Result<(Vec<&'k String>, i64)> {
        let (mut missing, mut moment) = (Vec::new(), i64::MAX);
        for keys in keys.chunks(OPERATIONS_MAX / 2) {
            let spans: Vec<_> = keys.iter().map(|key| self.spans(key, awaited)).collect();
            let counts: Vec<_> = spans.iter().flatten().map(|span| look(&span.count())).collect();
            let answer = self.txn(operation, &txn(&[], &counts, &[]), deadline)?;
            moment = moment.min(answer.header.revision);
            let mut found = answer.body.found().map(|found| found.count);
            for (key, spans) in keys.iter().zip(spans) {
                let count: i64 = found.by_ref().take(spans.len()).sum();
                missing.extend((count == 0).then_some(key));
            }
        }
        Ok((missing, moment))
    }

    /// Where something must be found that is awaited.
    fn spans(&self, raw: &str, awaited: Awaited) -> Vec<Span> {
        let value = || Span::key(self.value_key(raw));
        let items = || Span::folder(self.queue_folder(raw));
        match awaited {
            Awaited::Value => vec![value()],
            Awaited::Item => vec![items()],
            Awaited::ValueOrItem => vec![value(), items()],
        }
    }

    /// Takes the first item of a queue.
    fn pop(&self, operation: &str, raw: &str, deadline: Instant) -> Result<Option<Vec<u8>>> {
        let oldest = Span::folder(self.queue_folder(raw)).oldest();
        let mut first = self.range(operation, &oldest, deadline)?.body.first();
        let mut pauses = Pauses::default();
        while let Some(item) = first {
            let span = Span::key(item.key);
            let change = Change {
                compare: vec![span.was_changed_at(item.mod_revision)],
                then: vec![span.delete()],
                otherwise: vec![look(&oldest)],
            };
            let Some(found) = self.make(operation, &change, deadline)? else {
                return Ok(Some(item.value));
            };
            first = found.into_iter().next().and_then(Found::first);
            self.check_time(operation, deadline)?;
            pauses.pause();
        }
        Ok(None)
    }
}

/// A call that waits.
struct Wait {
    start: Instant,
    until: Instant,
}

impl Wait {
    fn new(timeout: Duration) -> Wait {
        Wait { start: Instant::now(), until: deadline_after(timeout) }
    }
}

/// Pauses between attempts to change what others change, too: of random length, so that not all try again at once.
#[derive(Default)]
struct Pauses {
    made: u32,
}

impl Pauses {
    fn pause(&mut self) {
        self.made += 1;
        let longest = PAUSE_MAX.min(Duration::from_millis(1) * self.made);
        let random = RandomState::new().hash_one(self.made) % 1024;
        thread::sleep(longest.mul_f64(random as f64 / 1024.0));
    }
}

fn check_value(operation: &'static str, value: &[u8]) -> Result<()> {
    if value.len() > VALUE_BYTES_MAX {
        let problem = format!(
            "a value of {} bytes exceeds {VALUE_BYTES_MAX}, the limit in etcd",
            value.len()
        );
        return Err(Error::argument(operation, problem));
    }
    Ok(())
}

/// Whether others can listen to what is sent to this server.
fn is_open_to_listeners(url: &str) -> bool {
    let Some(("http", authority)) = url.split_once("://") else { return false };
    let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host != "localhost" && !host.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

impl Store for EtcdStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.multi_set(&[(key, value)])
    }

    fn get(&self, key: &str) -> Result<Vec<u8>> {
        let values = self.wait_for_values(&format!("get {key}"), &[key])?;
        Ok(values.into_iter().next().unwrap_or_default())
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        let (raw, operation) = (raw_key("add", key)?, format!("add {amount} to {key}"));
        self.update(&operation, &raw, |present| {
            let sum = present
                .map_or(Ok(0), parse_number)
                .and_then(|it| it.checked_add(amount).ok_or(Misfit::Overflow(it, amount)))
                .map_err(|misfit| self.misfit(&operation, &misfit))?;
            Ok((Fate::Becomes(sum.to_string().into_bytes()), sum))
        })
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        let raw = raw_key("compare_set", key)?;
        check_value("compare_set", desired)?;
        self.update(&format!("compare_set {key}"), &raw, |present| match present {
            None if !expected.is_empty() => Ok((Fate::Stays, expected.to_vec())),
            Some(other) if other != expected => Ok((Fate::Stays, other.to_vec())),
            _ => Ok((Fate::Becomes(desired.to_vec()), desired.to_vec())),
        })
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        let wait = Wait::new(timeout);
        self.wait_for("wait", &raw_keys("wait", keys)?, Awaited::ValueOrItem, &wait)
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        let keys = raw_keys("check", keys)?;
        let (missing, _) = self.missing("check", &keys, Awaited::ValueOrItem, self.deadline())?;
        Ok(missing.is_empty())
    }

    fn num_keys(&self) -> Result<usize> {
        let all = Span::folder(self.key("value/")).count();
        let count = self.range("num_keys", &all, self.deadline())?.body.count;
        Ok(usize::try_from(count).unwrap_or_default())
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        let raw = raw_key("delete_key", key)?;
        self.update(&format!("delete {key}"), &raw, |present| {
            Ok(if present.is_some() { (Fate::Goes, true) } else { (Fate::Stays, false) })
        })
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        let raw = raw_key("append", key)?;
        self.update(&format!("append to {key}"), &raw, |present| {
            let whole = [present.unwrap_or_default(), value].concat();
            check_value("append", &whole)?;
            Ok((Fate::Becomes(whole), ()))
        })
    }

    fn multi_get(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>> {
        self.wait_for_values("multi_get", keys)
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        pairs.iter().try_for_each(|(_, value)| check_value("set", value))?;
        let operation = match pairs {
            [(key, _)] => format!("set {key}"),
            _ => format!("set {} keys", pairs.len()),
        };
        // etcd refuses a transaction that writes a key twice.
        let pairs: BTreeMap<_, _> = raw_pairs("set", pairs)?.into_iter().collect();
        let (mut puts, mut bytes) = (Vec::new(), 0);
        let write = |puts: &mut Vec<Value>| {
            let change = Change { then: std::mem::take(puts), ..Change::default() };
            self.make(&operation, &change, self.deadline()).map(drop)
        };
        for (raw, value) in pairs {
            if puts.len() == OPERATIONS_MAX || bytes + value.len() > VALUE_BYTES_MAX {
                write(&mut puts)?;
                bytes = 0;
            }
            let key = self.value_key(&raw);
            bytes += key.len() + value.len();
            puts.push(put(key.as_bytes(), value));
        }
        if puts.is_empty() { Ok(()) } else { write(&mut puts) }
    }

    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        let raw = raw_key("queue_push", key)?;
        check_value("queue_push", value)?;
        let item = format!("{}{}", self.queue_folder(&raw), self.handle.writers.unique());
        let change = Change { then: vec![put(item.as_bytes(), value)], ..Change::default() };
        self.make(&format!("queue_push {key}"), &change, self.deadline()).map(drop)
    }

    fn queue_pop(&self, key: &str) -> Result<Vec<u8>> {
        let wait = Wait::new(self.timeout());
        let (raw, operation) = (raw_key("queue_pop", key)?, format!("queue_pop {key}"));
        loop {
            let deadline = self.deadline_of_look(wait.until);
            if let Some(item) = self.pop(&operation, &raw, deadline)? {
                return Ok(item);
            }
            self.wait_for(&operation, std::slice::from_ref(&raw), Awaited::Item, &wait)?;
        }
    }

    fn queue_try_pop(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let raw = raw_key("queue_try_pop", key)?;
        self.pop(&format!("queue_try_pop {key}"), &raw, self.deadline())
    }

    fn queue_len(&self, key: &str) -> Result<usize> {
        let raw = raw_key("queue_len", key)?;
        let items = Span::folder(self.queue_folder(&raw)).count();
        let count = self.range(&format!("queue_len {key}"), &items, self.deadline())?.body.count;
        Ok(usize::try_from(count).unwrap_or_default())
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        let folder = self.key("value");
        let all = Span::folder(format!("{folder}/")).names();
        let found = self.range("list_keys", &all, self.deadline())?.body.kvs;
        let raw = found.iter().filter_map(|item| item.key.strip_prefix(folder.as_bytes()));
        Ok(raw.map(shown).collect())
    }

    fn timeout(&self) -> Duration {
        self.timeout.get()
    }

    fn set_timeout(&self, timeout: Duration) {
        self.timeout.set(timeout);
    }

    /// Shares the connections. In a fork the clone makes its own.
    fn try_clone(&self) -> Result<Box<dyn Store>> {
        let handle = match in_a_fork(self.handle.process) {
            None => Arc::clone(&self.handle),
            Some(_) => {
                let Handle { cluster, job, patience, .. } = &*self.handle;
                Arc::new(Handle::new(cluster, job, *patience)?)
            }
        };
        Ok(Box::new(EtcdStore { handle, timeout: self.timeout.clone() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(process: u32) -> EtcdStore {
        // Nobody listens at this port.
        let cluster = Cluster { servers: vec!["http://127.0.0.1:1".into()], ..Cluster::default() };
        let mut handle = Handle::new(&cluster, "job", Duration::from_secs(2)).unwrap();
        handle.process = process;
        EtcdStore { handle: Arc::new(handle), timeout: Timeout::default() }
    }

    /// In a fork, the handle is the same and the process id differs. So this test changes the id.
    #[test]
    fn a_fork_uses_nothing_of_its_parent_and_makes_clones() {
        let inherited = store(std::process::id() + 1);
        let error = inherited.set("key", b"value").unwrap_err().to_string();
        assert!(error.contains("is a fork") && error.contains("clone"), "{error}");
        let clone = inherited.try_clone().unwrap();
        let error = clone.set("key", b"value").unwrap_err().to_string();
        assert!(error.contains("is it running?"), "{error}");
    }

    #[test]
    fn passwords_that_others_can_read_on_the_way_are_known() {
        for url in ["http://localhost:1", "http://127.0.0.1:1", "http://[::1]:1", "https://a:1"] {
            assert!(!is_open_to_listeners(url), "{url}");
        }
        assert!(is_open_to_listeners("http://a:1") && is_open_to_listeners("http://10.0.0.1:1"));
    }
}
