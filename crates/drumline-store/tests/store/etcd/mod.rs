//! The store in etcd, beside etcd itself.

mod faults;
mod proxy;
mod refusals;

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use drumline_error::ErrorKind;
use drumline_store::store::{Cluster, EtcdStore, MissingKeys, Store, etcd::VALUE_BYTES_MAX};
use drumline_testing::etcd::{Server, is_installed};

use crate::{HANG, SOON};

/// An empty store in a server that all tests of the suite share; `None` if there is no etcd.
pub(crate) fn of_shared_server() -> Option<EtcdStore> {
    static SERVER: OnceLock<Server> = OnceLock::new();
    static JOBS: AtomicU64 = AtomicU64::new(0);
    is_installed().then(|| {
        let server = SERVER.get_or_init(|| Server::start(&[]));
        open(&[server], &format!("suite-{}", JOBS.fetch_add(1, Ordering::Relaxed)))
    })
}

fn cluster(servers: &[&Server]) -> Cluster {
    Cluster { servers: servers.iter().map(|it| it.url()).collect(), ..Cluster::default() }
}

fn open(servers: &[&Server], job: &str) -> EtcdStore {
    EtcdStore::open(&cluster(servers), job, HANG).unwrap()
}

#[test]
fn jobs_are_apart_and_clear_leaves_nothing() {
    if !is_installed() {
        return;
    }
    let server = Server::start(&[]);
    let (one, other) = (open(&[&server], "a"), open(&[&server], "a/b"));
    for store in [&one, &other] {
        store.set("key", b"value").unwrap();
        store.queue_push("queue", b"item").unwrap();
        store.add("n", 1).unwrap();
    }
    one.clear().unwrap();
    assert_eq!(one.num_keys().unwrap(), 0);
    assert_eq!(other.list_keys().unwrap(), ["key", "n"]);
    // A handle goes on after somebody has cleared its job.
    assert_eq!(one.add("n", 5).unwrap(), 5);
    other.clear().unwrap();
    one.clear().unwrap();
    let all = server.post("/v3/kv/range", r#"{"key":"AA==","range_end":"AA==","count_only":true}"#);
    assert!(all.contains("200 OK") && !all.contains("count"), "{all}");
    one.clear().unwrap();
}

#[test]
fn what_etcd_would_refuse_is_refused_before_it_is_sent() {
    let Some(store) = of_shared_server() else { return };
    let largest = vec![7; VALUE_BYTES_MAX];
    let key = "k".repeat(8191);
    store.set(&key, &largest).unwrap();
    assert_eq!(store.get(&key).unwrap(), largest);
    assert_eq!(store.compare_set(&key, &largest, b"small").unwrap(), b"small");
    store.set("log", &largest).unwrap();
    let larger = vec![7; VALUE_BYTES_MAX + 1];
    for error in [
        store.set("key", &larger).unwrap_err(),
        store.compare_set("key", b"", &larger).unwrap_err(),
        store.queue_push("key", &larger).unwrap_err(),
        store.multi_set(&[("a", b""), ("b", &larger)]).unwrap_err(),
        store.append("log", b"1").unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Argument, "{error}");
        assert!(error.to_string().contains("1048577 bytes exceeds 1048576"), "{error}");
    }
    assert!(!store.check(&["a"]).unwrap());
}

#[test]
fn many_keys_and_many_bytes_go_in_parts() {
    let Some(store) = of_shared_server() else { return };
    let names: Vec<_> = (0..350).map(|number| format!("k/{number:03}")).collect();
    let keys: Vec<_> = names.iter().map(String::as_str).collect();
    let pairs: Vec<_> = keys.iter().map(|key| (*key, key.as_bytes())).collect();
    store.multi_set(&pairs).unwrap();
    assert_eq!(store.num_keys().unwrap(), 350);
    assert_eq!(store.list_keys().unwrap(), names);
    let values = store.multi_get(&keys).unwrap();
    assert!(values.iter().zip(&keys).all(|(value, key)| value == key.as_bytes()));
    store.wait(&keys, Duration::ZERO).unwrap();
    store.delete_key("k/349").unwrap();
    assert!(!store.check(&keys).unwrap());
    let error = store.wait(&keys, SOON).unwrap_err();
    assert_eq!(error.detail::<MissingKeys>().unwrap().keys, ["k/349"]);

    let large: Vec<_> = (0..8_u8).map(|byte| (format!("l/{byte}"), vec![byte; 1 << 20])).collect();
    let pairs: Vec<_> = large.iter().map(|(key, value)| (key.as_str(), value.as_slice())).collect();
    store.multi_set(&pairs).unwrap();
    let keys: Vec<_> = pairs.iter().map(|(key, _)| *key).collect();
    let values = store.multi_get(&keys).unwrap();
    assert!(values.iter().zip(&large).all(|(value, (_, expected))| value == expected));
    store.clear().unwrap();
}

#[test]
fn a_queue_is_not_that_of_a_key_that_begins_alike() {
    let Some(store) = of_shared_server() else { return };
    store.queue_push("a", b"1").unwrap();
    store.queue_push("a/b", b"2").unwrap();
    store.queue_push("", b"3").unwrap();
    assert_eq!((store.queue_len("a").unwrap(), store.queue_len("a/b").unwrap()), (1, 1));
    assert_eq!(store.queue_try_pop("a").unwrap().unwrap(), b"1");
    assert_eq!(store.queue_try_pop("a").unwrap(), None);
    assert_eq!(store.queue_try_pop("").unwrap().unwrap(), b"3");
    assert_eq!(store.num_keys().unwrap(), 0);
}

#[test]
fn name_and_address_tell_where_it_is() {
    if !is_installed() {
        return;
    }
    let server = Server::start(&[]);
    let store = open(&[&server], "job");
    assert_eq!(store.name(), format!("etcd://127.0.0.1:{}/drumline/job", server.port));
    assert_eq!(store.address().unwrap().to_string(), format!("127.0.0.1:{}", server.port));
}
