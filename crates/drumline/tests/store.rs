//! One suite of store semantics, over every store.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    any::Any,
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use drumline::{
    Error,
    auth::Secret,
    store::{FileStore, HashStore, PrefixStore, Store, tcp::TcpStore},
};
use proptest::prelude::*;

/// No test here takes that long unless something hangs.
const HANG: Duration = Duration::from_secs(60);

/// Shorter than anybody's patience, for waits that are to end in vain.
const SOON: Duration = Duration::from_millis(30);

/// A store of some kind, and what must live as long as it does.
struct Subject {
    name: &'static str,
    store: Arc<dyn Store>,
    _keeper: Box<dyn Any>,
}

impl Subject {
    fn new(name: &'static str, store: impl Store + 'static) -> Subject {
        Subject { name, store: Arc::new(store), _keeper: Box::new(()) }
    }

    fn kept_by(self, keeper: impl Any) -> Subject {
        Subject { _keeper: Box::new(keeper), ..self }
    }
}

fn stores() -> Vec<Subject> {
    let tcp = || TcpStore::host("127.0.0.1", 0).unwrap();
    let secured = |name, endpoint: &str| {
        let secret = Secret::random().unwrap();
        let host = TcpStore::host_secured(&endpoint.parse().unwrap(), &secret).unwrap();
        // What a client does to it, seen from a client.
        let client = TcpStore::connect_secured(&host.name().parse().unwrap(), &secret, HANG);
        Subject::new(name, client.unwrap()).kept_by(host)
    };
    let name = format!("unix:@drumline-suite-{}-{:?}", std::process::id(), thread::current().id());
    let directory = tempfile::tempdir().unwrap();
    let file = |name| FileStore::open(directory.path().join(name), 1).unwrap();
    let (alone, shared) = (file("a"), file("b"));
    let second = file("b");
    let cloned = tcp();
    let clone = cloned.try_clone().unwrap();
    let all = vec![
        Subject::new("hash", HashStore::new()),
        Subject::new("prefix over hash", PrefixStore::new("a/b", Arc::new(HashStore::new()))),
        Subject::new("tcp", tcp()),
        secured("tcp with a secret", "tcp://127.0.0.1:0"),
        secured("Unix socket with a secret", &name),
        Subject::new("prefix over tcp", PrefixStore::new("a/b", Arc::new(tcp()))),
        Subject::new("clone of tcp", PrefixStore::new("c", Arc::from(clone))).kept_by(cloned),
        Subject::new("file", alone),
        Subject::new("prefix over file", PrefixStore::new("a/b", Arc::new(shared)))
            .kept_by((second, directory)),
    ];
    all
}

#[test]
fn every_store_means_the_same() {
    for Subject { name, store, _keeper } in stores() {
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
    many_keys(store);
    queues(store);
    barriers(store);
    clones(store);
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

fn many_keys(store: &dyn Store) {
    store.append("k/a", b"").unwrap();
    store.append("k/a", b"one").unwrap();
    store.append("k/a", b" two").unwrap();
    assert_eq!(store.get("k/a").unwrap(), b"one two");

    let before = store.num_keys().unwrap();
    store.multi_set(&[("k/b", b"1"), ("k/a", b"2"), ("k/b", b"3"), ("k/c", b"")]).unwrap();
    store.multi_set(&[]).unwrap();
    assert_eq!(
        store.multi_get(&["k/c", "k/b", "k/a", "k/b"]).unwrap(),
        [&b""[..], b"3", b"2", b"3"]
    );
    assert_eq!(store.multi_get(&[]).unwrap(), Vec::<Vec<u8>>::new());
    assert_eq!(store.num_keys().unwrap(), before + 2);
    let keys = store.list_keys().unwrap();
    assert_eq!(keys.len(), before + 2);
    assert!(keys.is_sorted());
    assert_eq!(keys.iter().filter(|key| key.starts_with("k/")).count(), 3);

    thread::scope(|scope| {
        let getter = scope.spawn(|| store.multi_get(&["k/late", "k/b", "k/later"]));
        store.set("k/late", b"x").unwrap();
        store.set("k/later", b"y").unwrap();
        assert_eq!(getter.join().unwrap().unwrap(), [b"x", b"3", b"y"]);
    });
    let impatient = store.try_clone().unwrap();
    impatient.set_timeout(SOON);
    let error = impatient.multi_get(&["k/a", "k/no", "k/b"]).unwrap_err();
    let Error::StoreTimeout { keys, .. } = &error else { panic!("{error}") };
    assert!(keys.len() == 1 && keys[0].ends_with("k/no"), "{error}");
    impatient.set_timeout(HANG);
}

fn queues(store: &dyn Store) {
    let keys = store.num_keys().unwrap();
    assert_eq!(store.queue_try_pop("q").unwrap(), None);
    assert_eq!(store.queue_len("q").unwrap(), 0);
    store.queue_push("q", b"one").unwrap();
    store.queue_push("q", b"").unwrap();
    assert_eq!(store.queue_len("q").unwrap(), 2);
    // Present, but neither a key nor deleted as one.
    assert!(store.check(&["q"]).unwrap());
    store.wait(&["q"], Duration::ZERO).unwrap();
    assert_eq!(store.num_keys().unwrap(), keys);
    assert!(!store.delete_key("q").unwrap());
    store.set("q", b"the value").unwrap();
    assert_eq!(store.queue_pop("q").unwrap(), b"one");
    assert_eq!(store.queue_try_pop("q").unwrap().unwrap(), b"");
    assert_eq!(store.queue_try_pop("q").unwrap(), None);
    assert_eq!(store.get("q").unwrap(), b"the value");
    assert!(store.delete_key("q").unwrap());
    assert!(!store.check(&["q"]).unwrap());

    // Every item goes to exactly one of those who wait, and nobody is told that there is none.
    const ITEMS: u8 = 40;
    let mut taken = thread::scope(|scope| {
        let takers: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    (0..ITEMS / 4).map(|_| store.queue_pop("work").unwrap()).collect::<Vec<_>>()
                })
            })
            .collect();
        for item in 0..ITEMS {
            store.queue_push("work", &[item]).unwrap();
        }
        takers.into_iter().flat_map(|taker| taker.join().unwrap()).collect::<Vec<_>>()
    });
    taken.sort_unstable();
    assert_eq!(taken, (0..ITEMS).map(|item| vec![item]).collect::<Vec<_>>());

    let impatient = store.try_clone().unwrap();
    for timeout in [Duration::ZERO, SOON] {
        impatient.set_timeout(timeout);
        let error = impatient.queue_pop("work").unwrap_err();
        let Error::StoreTimeout { keys, .. } = &error else { panic!("{error}") };
        assert!(keys.len() == 1 && keys[0].ends_with("work"), "{error}");
    }
    impatient.set_timeout(HANG);
    // One that gave up takes nothing.
    store.queue_push("work", b"last").unwrap();
    assert_eq!(store.queue_pop("work").unwrap(), b"last");
}

fn barriers(store: &dyn Store) {
    for round in 0..3 {
        let key = &*format!("b/{round}");
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(move || {
                    store.add("b/come", 1).unwrap();
                    store.barrier(key, 3, HANG).unwrap();
                    assert!(store.add("b/come", 0).unwrap() >= 3 * (round + 1));
                });
            }
        });
        // It stays open.
        store.barrier(key, 3, Duration::ZERO).unwrap();
    }
    store.barrier("b/alone", 1, Duration::ZERO).unwrap();
    for timeout in [Duration::ZERO, SOON] {
        let error = store.barrier("b/some", 5, timeout).unwrap_err();
        let Error::StoreTimeout { keys, .. } = &error else { panic!("{error}") };
        assert!(keys.len() == 1 && keys[0].contains("b/some"), "{error}");
    }
    let error = store.barrier("b/none", 0, SOON).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
}

fn clones(store: &dyn Store) {
    let clone = store.try_clone().unwrap();
    assert_eq!(clone.timeout(), store.timeout());
    clone.set("clone", b"1").unwrap();
    assert_eq!(store.get("clone").unwrap(), b"1");
    thread::scope(|scope| {
        let waiter = scope.spawn(|| clone.get("clone/late"));
        store.set("clone/late", b"2").unwrap();
        assert_eq!(waiter.join().unwrap().unwrap(), b"2");
    });
    drop(clone);
    assert_eq!(store.get("clone").unwrap(), b"1");
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
    for Subject { store, _keeper, .. } in stores() {
        store.add("n", i64::MAX).unwrap();
        let error = store.add("n", 1).unwrap_err().to_string();
        assert!(error.contains("64 bits"), "{error}");
        assert_eq!(store.add("n", 0).unwrap(), i64::MAX);
    }
}

#[derive(Clone, Debug)]
enum Operation {
    Set(u8, String),
    Get(u8),
    Add(u8, i8),
    CompareSet(u8, String, String),
    Check(Vec<u8>),
    Wait(Vec<u8>),
    Delete(u8),
    Append(u8, String),
    MultiSet(Vec<(u8, String)>),
    MultiGet(Vec<u8>),
    Push(u8, String),
    Pop(u8),
    Len(u8),
    List,
    /// From now on calls go to a clone.
    Clone,
}

fn operation() -> impl Strategy<Value = Operation> {
    use Operation::*;
    let key = 0..4_u8;
    let keys = prop::collection::vec(key.clone(), 0..4);
    let value = prop_oneof![Just(String::new()), "[0-2]", "[a-b]{1,2}"];
    let pairs = prop::collection::vec((key.clone(), value.clone()), 0..4);
    prop_oneof![
        (key.clone(), value.clone()).prop_map(|(k, v)| Set(k, v)),
        key.clone().prop_map(Get),
        (key.clone(), any::<i8>()).prop_map(|(k, n)| Add(k, n)),
        (key.clone(), value.clone(), value.clone()).prop_map(|(k, e, d)| CompareSet(k, e, d)),
        keys.clone().prop_map(Check),
        keys.clone().prop_map(Wait),
        key.clone().prop_map(Delete),
        (key.clone(), value.clone()).prop_map(|(k, v)| Append(k, v)),
        pairs.prop_map(MultiSet),
        keys.prop_map(MultiGet),
        (key.clone(), value).prop_map(|(k, v)| Push(k, v)),
        key.clone().prop_map(Pop),
        key.prop_map(Len),
        Just(List),
        Just(Clone),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Every store answers as plain maps would.
    #[test]
    fn stores_equal_a_model(operations in prop::collection::vec(operation(), 1..60)) {
        for Subject { name, store: original, _keeper } in stores() {
            original.set_timeout(Duration::ZERO);
            let mut store = Arc::clone(&original);
            let mut model = Model::default();
            for operation in &operations {
                if let Operation::Clone = operation {
                    store = Arc::from(store.try_clone().unwrap());
                    continue;
                }
                let answer = on_store(&*store, operation);
                let expected = model.answer(operation);
                prop_assert_eq!(answer, expected, "{}: {:?}", name, operation);
            }
        }
    }
}

/// What a call answers, as text. `None` stands for a refusal, or for waiting in vain.
type Answer = Option<String>;

fn on_store(store: &dyn Store, operation: &Operation) -> Answer {
    let name = |key: &u8| key.to_string();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let with = |keys: &[u8], call: &dyn Fn(&[&str]) -> Answer| {
        let keys: Vec<_> = keys.iter().map(name).collect();
        call(&keys.iter().map(String::as_str).collect::<Vec<_>>())
    };
    // A store that fails in another way than by refusing must not pass for one that does.
    let in_time = |result: Result<Answer, Error>| match result {
        Ok(answer) => answer,
        Err(Error::StoreTimeout { .. }) => None,
        Err(error) => panic!("{error}"),
    };
    let done = |result: Result<(), Error>| result.map(|()| Some(String::new())).unwrap();
    match operation {
        Operation::Set(key, value) => done(store.set(&name(key), value.as_bytes())),
        Operation::Get(key) => in_time(store.get(&name(key)).map(|value| Some(text(value)))),
        Operation::Add(key, amount) => match store.add(&name(key), (*amount).into()) {
            Ok(sum) => Some(sum.to_string()),
            Err(error) => {
                assert!(error.to_string().contains("not a decimal number"), "{error}");
                None
            }
        },
        Operation::CompareSet(key, expected, desired) => {
            let (expected, desired) = (expected.as_bytes(), desired.as_bytes());
            Some(text(store.compare_set(&name(key), expected, desired).unwrap()))
        }
        Operation::Check(keys) => with(keys, &|keys| Some(store.check(keys).unwrap().to_string())),
        Operation::Wait(keys) => with(keys, &|keys| {
            in_time(store.wait(keys, Duration::ZERO).map(|()| Some(String::new())))
        }),
        Operation::Delete(key) => Some(store.delete_key(&name(key)).unwrap().to_string()),
        Operation::Append(key, value) => done(store.append(&name(key), value.as_bytes())),
        Operation::MultiSet(pairs) => {
            let keys: Vec<_> = pairs.iter().map(|(key, _)| name(key)).collect();
            let values = pairs.iter().map(|(_, value)| value.as_bytes());
            done(store.multi_set(&keys.iter().map(String::as_str).zip(values).collect::<Vec<_>>()))
        }
        Operation::MultiGet(keys) => with(keys, &|keys| {
            in_time(
                store
                    .multi_get(keys)
                    .map(|values| Some(values.into_iter().map(text).collect::<Vec<_>>().join(","))),
            )
        }),
        Operation::Push(key, value) => done(store.queue_push(&name(key), value.as_bytes())),
        Operation::Pop(key) => {
            // The two ways to take one are the same where nobody has to wait.
            if store.queue_len(&name(key)).unwrap() % 2 == 1 {
                in_time(store.queue_pop(&name(key)).map(|item| Some(text(item))))
            } else {
                store.queue_try_pop(&name(key)).unwrap().map(text)
            }
        }
        Operation::Len(key) => Some(store.queue_len(&name(key)).unwrap().to_string()),
        Operation::List => {
            let keys = store.list_keys().unwrap();
            assert_eq!(keys.len(), store.num_keys().unwrap());
            Some(keys.join(","))
        }
        Operation::Clone => None,
    }
}

#[derive(Default)]
struct Model {
    values: BTreeMap<u8, String>,
    queues: BTreeMap<u8, VecDeque<String>>,
}

impl Model {
    fn has(&self, key: &u8) -> bool {
        self.values.contains_key(key) || self.queues.get(key).is_some_and(|queue| !queue.is_empty())
    }

    fn answer(&mut self, operation: &Operation) -> Answer {
        Some(match operation {
            Operation::Set(key, value) => {
                self.values.insert(*key, value.clone());
                String::new()
            }
            Operation::Get(key) => return self.values.get(key).cloned(),
            Operation::Add(key, amount) => {
                let present: i64 = self.values.get(key).map_or(Some(0), |v| v.parse().ok())?;
                let sum = (present + i64::from(*amount)).to_string();
                self.values.insert(*key, sum.clone());
                sum
            }
            Operation::CompareSet(key, expected, desired) => {
                match self.values.get(key).cloned() {
                    None if expected.is_empty() => {}
                    None => return Some(expected.clone()),
                    Some(present) if present == *expected => {}
                    Some(present) => return Some(present),
                }
                self.values.insert(*key, desired.clone());
                desired.clone()
            }
            Operation::Check(keys) => keys.iter().all(|key| self.has(key)).to_string(),
            Operation::Wait(keys) => {
                return keys.iter().all(|key| self.has(key)).then(String::new);
            }
            Operation::Delete(key) => self.values.remove(key).is_some().to_string(),
            Operation::Append(key, value) => {
                self.values.entry(*key).or_default().push_str(value);
                String::new()
            }
            Operation::MultiSet(pairs) => {
                self.values.extend(pairs.iter().cloned());
                String::new()
            }
            Operation::MultiGet(keys) => {
                let values: Option<Vec<_>> =
                    keys.iter().map(|key| self.values.get(key).cloned()).collect();
                values?.join(",")
            }
            Operation::Push(key, value) => {
                self.queues.entry(*key).or_default().push_back(value.clone());
                String::new()
            }
            Operation::Pop(key) => return self.queues.get_mut(key)?.pop_front(),
            Operation::Len(key) => self.queues.get(key).map_or(0, VecDeque::len).to_string(),
            Operation::List => self.values.keys().map(u8::to_string).collect::<Vec<_>>().join(","),
            Operation::Clone => return None,
        })
    }
}
