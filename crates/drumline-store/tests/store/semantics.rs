//! What every store means, method by method.

use std::{
    thread,
    time::{Duration, Instant},
};

use drumline_error::ErrorKind;
use drumline_store::store::{MissingKeys, Store};

use super::{HANG, SOON};

pub(super) fn semantics(store: &dyn Store) {
    semantics_of_the_required(store);
    appending(store);
    listing(store);
    queues(store);
}

/// The required methods, and those that are made of them.
pub(super) fn semantics_of_the_required(store: &dyn Store) {
    store.set_timeout(HANG);
    set_get_delete(store);
    add(store);
    compare_set(store);
    check_and_wait(store);
    time_outs(store);
    many_keys(store);
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
        let MissingKeys { keys, waited } = error.detail().unwrap();
        assert!(keys.len() == 2 && keys[0].ends_with("t/x") && keys[1].ends_with("t/y"), "{error}");
        assert!(*waited >= timeout);
        assert!(!error.to_string().contains("t/there"));
    }
    let before = store.timeout();
    store.set_timeout(SOON);
    assert_eq!(store.timeout(), SOON);
    assert!(matches!(store.get("t/x"), Err(error) if error.kind() == ErrorKind::StoreTimeout));
    store.set_timeout(before);
    // Whatever the wait was made of, nothing of it is left.
    store.set("t/x", b"late").unwrap();
    assert_eq!(store.get("t/x").unwrap(), b"late");
    assert_eq!(store.add("t/n", 3).unwrap(), 3);
}

fn appending(store: &dyn Store) {
    store.append("append", b"").unwrap();
    store.append("append", b"one").unwrap();
    store.append("append", b" two").unwrap();
    assert_eq!(store.get("append").unwrap(), b"one two");
}

fn listing(store: &dyn Store) {
    let before = store.num_keys().unwrap();
    store.multi_set(&[("l/b", b"1"), ("l/a", b"2"), ("l/b", b"3"), ("l/c", b"")]).unwrap();
    assert_eq!(store.num_keys().unwrap(), before + 3);
    let keys = store.list_keys().unwrap();
    assert_eq!(keys.len(), before + 3);
    assert!(keys.is_sorted());
    assert_eq!(keys.iter().filter(|key| key.starts_with("l/")).count(), 3);
}

fn many_keys(store: &dyn Store) {
    store.multi_set(&[("k/b", b"1"), ("k/a", b"2"), ("k/b", b"3"), ("k/c", b"")]).unwrap();
    store.multi_set(&[]).unwrap();
    assert_eq!(
        store.multi_get(&["k/c", "k/b", "k/a", "k/b"]).unwrap(),
        [&b""[..], b"3", b"2", b"3"]
    );
    assert_eq!(store.multi_get(&[]).unwrap(), Vec::<Vec<u8>>::new());

    thread::scope(|scope| {
        let getter = scope.spawn(|| store.multi_get(&["k/late", "k/b", "k/later"]));
        store.set("k/late", b"x").unwrap();
        store.set("k/later", b"y").unwrap();
        assert_eq!(getter.join().unwrap().unwrap(), [b"x", b"3", b"y"]);
    });
    let impatient = store.try_clone().unwrap();
    impatient.set_timeout(SOON);
    let error = impatient.multi_get(&["k/a", "k/no", "k/b"]).unwrap_err();
    let keys = &error.detail::<MissingKeys>().unwrap().keys;
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
        let keys = &error.detail::<MissingKeys>().unwrap().keys;
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
        let keys = &error.detail::<MissingKeys>().unwrap().keys;
        assert!(keys.len() == 1 && keys[0].contains("b/some"), "{error}");
    }
    let error = store.barrier("b/none", 0, SOON).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Argument, "{error}");
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
