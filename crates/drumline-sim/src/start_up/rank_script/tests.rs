//! Real ranks send the requests of the script.

use std::{
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use drumline::{
    ProcessGroup,
    store::{HashStore, Store},
};
use drumline_store::{
    Result,
    store::tcp::protocol::{Decoded, decode},
};

use super::*;

const WORLD_SIZE: usize = 4;

/// Passes every call on to `store`, and records it.
#[derive(Clone, Debug)]
struct Recording {
    store: Arc<dyn Store>,
    calls: Arc<Mutex<Vec<String>>>,
    /// The random number that the rank has drawn.
    ticket: Arc<Mutex<String>>,
}

impl Recording {
    fn record(&self, call: &str, keys: &[&str]) {
        self.calls.lock().unwrap().push(shown(call, keys));
    }
}

fn shown(call: &str, keys: &[&str]) -> String {
    format!("{call} {}", keys.join(", "))
}

impl Store for Recording {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.record("set", &[key]);
        self.store.set(key, value)
    }

    fn get(&self, key: &str) -> Result<Vec<u8>> {
        self.record("get", &[key]);
        self.store.get(key)
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        self.record("add", &[key]);
        self.store.add(key, amount)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.record("compare_set", &[key]);
        self.store.compare_set(key, expected, desired)
    }

    /// Records only waits that succeed: ranks repeat the others.
    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.store.wait(keys, timeout)?;
        self.record("wait", keys);
        Ok(())
    }

    /// Not recorded: ranks ask this only after a long wait.
    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.store.check(keys)
    }

    fn num_keys(&self) -> Result<usize> {
        self.store.num_keys()
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        self.record("delete", &[key]);
        self.store.delete_key(key)
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.record("append", &[key]);
        self.store.append(key, value)
    }

    fn multi_get(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>> {
        self.record("multi_get", keys);
        self.store.multi_get(keys)
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        let keys: Vec<_> = pairs.iter().map(|(key, _)| *key).collect();
        self.record("multi_set", &keys);
        if let Some((_, ticket)) = pairs.iter().find(|(key, _)| key.contains("/ticket/")) {
            *self.ticket.lock().unwrap() = String::from_utf8_lossy(ticket).into_owned();
        }
        self.store.multi_set(pairs)
    }

    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        self.record("queue_push", &[key]);
        self.store.queue_push(key, value)
    }

    fn queue_pop(&self, key: &str) -> Result<Vec<u8>> {
        self.record("queue_pop", &[key]);
        self.store.queue_pop(key)
    }

    fn queue_try_pop(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.record("queue_try_pop", &[key]);
        self.store.queue_try_pop(key)
    }

    fn queue_len(&self, key: &str) -> Result<usize> {
        self.record("queue_len", &[key]);
        self.store.queue_len(key)
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        self.store.list_keys()
    }

    fn barrier(&self, key: &str, world_size: usize, timeout: Duration) -> Result<()> {
        self.record("barrier", &[key]);
        self.store.barrier(key, world_size, timeout)
    }

    fn timeout(&self) -> Duration {
        self.store.timeout()
    }

    fn set_timeout(&self, timeout: Duration) {
        self.store.set_timeout(timeout);
    }

    fn try_clone(&self) -> Result<Box<dyn Store>> {
        Ok(Box::new(self.clone()))
    }
}

/// The calls of a store that an action stands for.
fn calls_of(action: &Action) -> Vec<String> {
    let text = |key: &[u8]| String::from_utf8_lossy(key).trim_start_matches('/').to_owned();
    let list = |call: &str, keys: &[String]| {
        shown(call, &keys.iter().map(String::as_str).collect::<Vec<_>>())
    };
    match action {
        Action::Wait { keys, wants, .. } => {
            let keys: Vec<String> = keys.iter().map(|key| text(&key.0)).collect();
            let call = match (wants, keys.len()) {
                (Want::Nothing, _) => "wait",
                (_, 1) => "get",
                _ => "multi_get",
            };
            vec![list(call, &keys)]
        }
        Action::Ask { requests, .. } => {
            let (mut rest, mut calls) = (&requests.0[..], Vec::new());
            while let Ok(Decoded::Request(request, length)) = decode(rest) {
                rest = &rest[length..];
                calls.extend(match request {
                    Request::Set(key, _) => Some(list("set", &[text(key.0)])),
                    Request::Add(key, _) => Some(list("add", &[text(key.0)])),
                    Request::CompareSet(key, ..) => Some(list("compare_set", &[text(key.0)])),
                    Request::DeleteKey(key) => Some(list("delete", &[text(key.0)])),
                    Request::MultiSet(pairs) => {
                        let keys: Vec<_> = pairs.iter().map(|(key, _)| text(key.0)).collect();
                        Some(list("multi_set", &keys))
                    }
                    Request::Ping(_) => None,
                    other => panic!("{other:?} is not expected here"),
                });
            }
            calls
        }
        other => panic!("{other:?} is not expected here"),
    }
}

fn check(far: bool) {
    let shared: Arc<dyn Store> = Arc::new(HashStore::new());
    let config = drumline::Config::default().unix_sockets(!far);
    let stores: Vec<Recording> = (0..WORLD_SIZE)
        .map(|_| Recording { store: shared.clone(), calls: Arc::default(), ticket: Arc::default() })
        .collect();
    thread::scope(|threads| {
        for (rank, store) in stores.iter().enumerate() {
            let config = &config;
            threads.spawn(move || {
                let store = Arc::new(store.clone());
                let group = ProcessGroup::connect("7", store, rank, WORLD_SIZE, config).unwrap();
                group.destroy().unwrap();
            });
        }
    });
    let tickets: Vec<String> =
        stores.iter().map(|store| store.ticket.lock().unwrap().clone()).collect();
    for (rank, store) in stores.iter().enumerate() {
        let named = |call: &String| {
            let each = tickets.iter().enumerate();
            each.fold(call.clone(), |call, (rank, it)| call.replace(it.as_str(), &ticket(rank)))
        };
        let mut asked: Vec<String> = store.calls.lock().unwrap().iter().map(named).collect();
        // The last rank deletes the board's keys.
        let wiped = ["/all", "/gone"];
        asked.retain(|it| !it.starts_with("delete ") || !wiped.iter().any(|end| it.ends_with(end)));
        let script: Vec<String> =
            connect(WORLD_SIZE, rank, "7", far).iter().flat_map(calls_of).collect();
        assert_eq!(asked, script, "rank {rank}");
    }
    assert_eq!(shared.num_keys().unwrap(), 0, "{:?}", shared.list_keys());
}

#[test]
fn on_one_host() {
    check(false);
}

#[test]
fn on_several_hosts() {
    check(true);
}
