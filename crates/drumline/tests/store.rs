//! One suite of store semantics, over every store.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    collections::BTreeMap,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use drumline::{
    Error,
    auth::Secret,
    store::{HashStore, PrefixStore, Store, tcp::TcpStore},
};
use proptest::prelude::*;

/// No test here takes that long unless something hangs.
const HANG: Duration = Duration::from_secs(60);

/// Shorter than anybody's patience, for waits that are to end in vain.
const SOON: Duration = Duration::from_millis(30);

fn stores() -> Vec<(&'static str, Arc<dyn Store>)> {
    let tcp = || TcpStore::host("127.0.0.1", 0).unwrap();
    let secured = |endpoint: &str| -> Arc<dyn Store> {
        let secret = Secret::random().unwrap();
        let host = TcpStore::host_secured(&endpoint.parse().unwrap(), &secret).unwrap();
        // What a client does to it, seen from a client; the host lives as long as the store does.
        let client = TcpStore::connect_secured(&host.name().parse().unwrap(), &secret, HANG);
        Arc::new(Hosted { client: client.unwrap(), _host: host })
    };
    let name = format!("unix:@drumline-suite-{}-{:?}", std::process::id(), thread::current().id());
    vec![
        ("hash", Arc::new(HashStore::new())),
        ("prefix over hash", Arc::new(PrefixStore::new("a/b", Arc::new(HashStore::new())))),
        ("tcp", Arc::new(tcp())),
        ("tcp with a secret", secured("tcp://127.0.0.1:0")),
        ("Unix socket with a secret", secured(&name)),
        ("prefix over tcp", Arc::new(PrefixStore::new("a/b", Arc::new(tcp())))),
    ]
}

/// A client, and its server in the same process.
#[derive(Debug)]
struct Hosted {
    client: TcpStore,
    _host: TcpStore,
}

impl Store for Hosted {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), Error> {
        self.client.set(key, value)
    }
    fn get(&self, key: &str) -> Result<Vec<u8>, Error> {
        self.client.get(key)
    }
    fn add(&self, key: &str, amount: i64) -> Result<i64, Error> {
        self.client.add(key, amount)
    }
    fn compare_set(&self, key: &str, expected: &[u8], new: &[u8]) -> Result<Vec<u8>, Error> {
        self.client.compare_set(key, expected, new)
    }
    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), Error> {
        self.client.wait(keys, timeout)
    }
    fn check(&self, keys: &[&str]) -> Result<bool, Error> {
        self.client.check(keys)
    }
    fn delete_key(&self, key: &str) -> Result<bool, Error> {
        self.client.delete_key(key)
    }
    fn timeout(&self) -> Duration {
        self.client.timeout()
    }
    fn set_timeout(&self, timeout: Duration) {
        self.client.set_timeout(timeout);
    }
}

#[test]
fn every_store_means_the_same() {
    for (name, store) in stores() {
        println!("{name}");
        semantics(&*store);
    }
}

/// Run by hand, with torch's server: see fixtures/tcpstore/README.md.
#[test]
#[ignore = "needs a server elsewhere, at the port TCPSTORE_PORT"]
fn a_server_elsewhere_means_the_same() {
    let port = std::env::var("TCPSTORE_PORT").unwrap().parse().unwrap();
    let store = TcpStore::connect("127.0.0.1", port, HANG).unwrap();
    semantics(&store);
    store.wait_for_workers(2, HANG).unwrap();
}

/// Run by hand, to record its bytes: see fixtures/tcpstore/README.md.
#[test]
#[ignore = "needs a server elsewhere, at the port TCPSTORE_PORT"]
fn a_short_session_to_record() {
    let port = std::env::var("TCPSTORE_PORT").unwrap().parse().unwrap();
    let store = TcpStore::connect("127.0.0.1", port, HANG).unwrap();
    store.set("k", b"v").unwrap();
    assert_eq!(store.get("k").unwrap(), b"v");
    add(&store);
    compare_set(&store);
    time_outs(&store);
    assert!(store.delete_key("k").unwrap());
    let second = TcpStore::connect("127.0.0.1", port, HANG).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| assert_eq!(store.get("later").unwrap(), b"now"));
        thread::sleep(SOON);
        second.set("later", b"now").unwrap();
    });
    store.wait_for_workers(1, HANG).unwrap();
}

/// Run by hand, with torch's clients: see fixtures/tcpstore/README.md.
#[test]
#[ignore = "needs clients elsewhere, which find it at the port TCPSTORE_PORT"]
fn clients_elsewhere_are_served() {
    let port = std::env::var("TCPSTORE_PORT").unwrap().parse().unwrap();
    let store = TcpStore::host("127.0.0.1", port).unwrap();
    store.wait_for_workers(2, HANG).unwrap();
    assert!(store.wait_for_departure(HANG));
}

fn semantics(store: &dyn Store) {
    store.set_timeout(HANG);
    set_get_delete(store);
    add(store);
    compare_set(store);
    check_and_wait(store);
    time_outs(store);
    many_threads(store);
}

fn set_get_delete(store: &dyn Store) {
    let large: Vec<u8> = (0..1 << 20).map(|i| (i % 251) as u8).collect();
    for value in [&b""[..], b"v", b"\0\xff binary \n", &large] {
        store.set("s/key", value).unwrap();
        assert!(store.get("s/key").unwrap() == value);
    }
    store.set("", b"the empty key").unwrap();
    store.set("ключ 钥匙", "значение".as_bytes()).unwrap();
    assert_eq!(store.get("").unwrap(), b"the empty key");
    assert_eq!(store.get("ключ 钥匙").unwrap(), "значение".as_bytes());

    assert!(store.delete_key("s/key").unwrap());
    assert!(!store.delete_key("s/key").unwrap());
    assert!(!store.check(&["s/key"]).unwrap());
}

fn add(store: &dyn Store) {
    assert_eq!(store.add("a/n", 5).unwrap(), 5);
    assert_eq!(store.add("a/n", -7).unwrap(), -2);
    assert_eq!(store.get("a/n").unwrap(), b"-2");
    assert_eq!(store.add("a/n", 0).unwrap(), -2);
    store.set("a/n", b"41").unwrap();
    assert_eq!(store.add("a/n", 1).unwrap(), 42);

    store.set("a/text", b"forty-two").unwrap();
    let error = store.add("a/text", 1).unwrap_err().to_string();
    assert!(error.contains("a/text") && error.contains("forty-two"), "{error}");
    assert_eq!(store.get("a/text").unwrap(), b"forty-two");
}

fn compare_set(store: &dyn Store) {
    // Absent and nothing expected: created.
    assert_eq!(store.compare_set("c/a", b"", b"1").unwrap(), b"1");
    // Equal: replaced.
    assert_eq!(store.compare_set("c/a", b"1", b"2").unwrap(), b"2");
    // Different: left alone.
    assert_eq!(store.compare_set("c/a", b"1", b"3").unwrap(), b"2");
    assert_eq!(store.compare_set("c/a", b"", b"3").unwrap(), b"2");
    assert_eq!(store.get("c/a").unwrap(), b"2");
    // The odd case: absent and something expected. Nothing is stored, and yet it comes back.
    assert_eq!(store.compare_set("c/b", b"x", b"y").unwrap(), b"x");
    assert!(!store.check(&["c/b"]).unwrap());
}

fn check_and_wait(store: &dyn Store) {
    assert!(store.check(&[]).unwrap());
    store.wait(&[], Duration::ZERO).unwrap();
    store.set("w/a", b"").unwrap();
    assert!(store.check(&["w/a"]).unwrap());
    assert!(!store.check(&["w/a", "w/b"]).unwrap());
    // What is there already is there however short the time.
    store.wait(&["w/a"], Duration::from_secs(1)).unwrap();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| store.wait(&["w/a", "w/b", "w/c", "w/b"], HANG));
        let getter = scope.spawn(|| store.get("w/c"));
        store.add("w/b", 1).unwrap();
        assert_eq!(store.compare_set("w/c", b"", b"here").unwrap(), b"here");
        waiter.join().unwrap().unwrap();
        assert_eq!(getter.join().unwrap().unwrap(), b"here");
    });
    store.wait(&["w/a"], Duration::MAX).unwrap();
}

fn time_outs(store: &dyn Store) {
    store.set("t/there", b"1").unwrap();
    for timeout in [Duration::ZERO, SOON] {
        let start = Instant::now();
        let error = store.wait(&["t/x", "t/there", "t/y"], timeout).unwrap_err();
        assert!(start.elapsed() >= timeout);
        let Error::StoreTimeout { keys, waited, .. } = &error else { panic!("{error}") };
        assert!(keys.len() == 2 && keys[0].ends_with("t/x") && keys[1].ends_with("t/y"), "{error}");
        assert!(*waited >= timeout);
        assert!(!error.to_string().contains("t/there"));
    }
    let before = store.timeout();
    store.set_timeout(SOON);
    assert_eq!(store.timeout(), SOON);
    assert!(matches!(store.get("t/x"), Err(Error::StoreTimeout { .. })));
    store.set_timeout(before);
    // Whatever the wait was made of, nothing of it is left.
    store.set("t/x", b"late").unwrap();
    assert_eq!(store.get("t/x").unwrap(), b"late");
    assert_eq!(store.add("t/n", 3).unwrap(), 3);
}

/// Calls that wait for each other in a ring: one that held up another would stop them all.
fn many_threads(store: &dyn Store) {
    const THREADS: usize = 12;
    const ROUNDS: usize = 10;
    thread::scope(|scope| {
        for me in 0..THREADS {
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let next = (me + 1) % THREADS;
                    if me == 0 {
                        store.set(&format!("m/{round}/{next}"), b"go").unwrap();
                    }
                    store.get(&format!("m/{round}/{me}")).unwrap();
                    if me != 0 {
                        store.set(&format!("m/{round}/{next}"), b"go").unwrap();
                    }
                    store.add("m/sum", (me * round) as i64).unwrap();
                }
            });
        }
    });
    let expected = (THREADS * (THREADS - 1) / 2) * (ROUNDS * (ROUNDS - 1) / 2);
    assert_eq!(store.add("m/sum", 0).unwrap(), expected as i64);
}

#[test]
fn prefixes_nest_and_keep_apart() {
    let whole = Arc::new(HashStore::new());
    let outer: Arc<dyn Store> = Arc::new(PrefixStore::new("outer", whole.clone()));
    let inner = PrefixStore::new("inner", Arc::clone(&outer));
    inner.set("key", b"1").unwrap();
    assert_eq!(whole.get("outer/inner/key").unwrap(), b"1");
    assert!(!outer.check(&["key"]).unwrap());
    inner.set_timeout(SOON);
    assert_eq!(whole.timeout(), SOON);
}

#[test]
fn a_sum_past_64_bits_is_refused() {
    for (_, store) in stores() {
        store.add("n", i64::MAX).unwrap();
        let error = store.add("n", 1).unwrap_err().to_string();
        assert!(error.contains("64 bits"), "{error}");
        assert_eq!(store.add("n", 0).unwrap(), i64::MAX);
    }
}

#[derive(Clone, Debug)]
enum Operation {
    Set(u8, String),
    Add(u8, i8),
    CompareSet(u8, String, String),
    Delete(u8),
    Check(Vec<u8>),
    Get(u8),
}

fn operation() -> impl Strategy<Value = Operation> {
    let key = 0..4_u8;
    let value = prop_oneof![Just(String::new()), "[0-2]", "[a-b]{1,2}"];
    prop_oneof![
        (key.clone(), value.clone()).prop_map(|(k, v)| Operation::Set(k, v)),
        (key.clone(), any::<i8>()).prop_map(|(k, n)| Operation::Add(k, n)),
        (key.clone(), value.clone(), value).prop_map(|(k, e, d)| Operation::CompareSet(k, e, d)),
        key.clone().prop_map(Operation::Delete),
        prop::collection::vec(key.clone(), 0..4).prop_map(Operation::Check),
        key.prop_map(Operation::Get),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Every store answers as a plain map would.
    #[test]
    fn stores_equal_a_map(operations in prop::collection::vec(operation(), 1..60)) {
        for (name, store) in stores() {
            let mut model = BTreeMap::<String, String>::new();
            for operation in &operations {
                let answer = format!("{:?}", on_store(&*store, operation));
                let expected = format!("{:?}", on_model(&mut model, operation));
                prop_assert_eq!(answer, expected, "{}: {:?}", name, operation);
            }
        }
    }
}

/// `None` stands for a refusal.
fn on_store(store: &dyn Store, operation: &Operation) -> Option<String> {
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Some(match operation {
        Operation::Set(key, value) => {
            store.set(&key.to_string(), value.as_bytes()).unwrap();
            String::new()
        }
        Operation::Add(key, amount) => {
            store.add(&key.to_string(), (*amount).into()).ok()?.to_string()
        }
        Operation::CompareSet(key, expected, desired) => {
            let key = key.to_string();
            text(store.compare_set(&key, expected.as_bytes(), desired.as_bytes()).unwrap())
        }
        Operation::Delete(key) => store.delete_key(&key.to_string()).unwrap().to_string(),
        Operation::Check(keys) => {
            let keys: Vec<_> = keys.iter().map(u8::to_string).collect();
            let keys: Vec<_> = keys.iter().map(String::as_str).collect();
            store.check(&keys).unwrap().to_string()
        }
        Operation::Get(key) => {
            let key = key.to_string();
            if !store.check(&[&key]).unwrap() {
                return None;
            }
            text(store.get(&key).unwrap())
        }
    })
}

fn on_model(model: &mut BTreeMap<String, String>, operation: &Operation) -> Option<String> {
    Some(match operation {
        Operation::Set(key, value) => {
            model.insert(key.to_string(), value.clone());
            String::new()
        }
        Operation::Add(key, amount) => {
            let present: i64 = model.get(&key.to_string()).map_or(Some(0), |v| v.parse().ok())?;
            let sum = (present + i64::from(*amount)).to_string();
            model.insert(key.to_string(), sum.clone());
            sum
        }
        Operation::CompareSet(key, expected, desired) => {
            let present = model.get(&key.to_string()).cloned();
            match present {
                None if expected.is_empty() => {}
                None => return Some(expected.clone()),
                Some(present) if present == *expected => {}
                Some(present) => return Some(present),
            }
            model.insert(key.to_string(), desired.clone());
            desired.clone()
        }
        Operation::Delete(key) => model.remove(&key.to_string()).is_some().to_string(),
        Operation::Check(keys) => {
            keys.iter().all(|key| model.contains_key(&key.to_string())).to_string()
        }
        Operation::Get(key) => return model.get(&key.to_string()).cloned(),
    })
}
