//! Servers that are stopped, killed, started again; requests and answers that are lost.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use drumline_store::store::{Cluster, EtcdStore, Store};
use drumline_testing::etcd::{Server, is_installed};
use rustix::process::Signal;

use super::{
    open,
    proxy::{Fault, before},
};
use crate::HANG;

/// Longer than a server has time to answer, so requests to one that is stopped are sent again.
const STOP: Duration = Duration::from_secs(3);

/// A number that looks random.
fn mixed(number: u64) -> u64 {
    (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32
}

#[test]
fn a_change_happens_once_however_often_it_is_sent() {
    if !is_installed() {
        return;
    }
    const THREADS: usize = 4;
    const ROUNDS: usize = 40;
    let server = Server::start(&[]);
    let proxy = before(server.port, |number| match mixed(number) % 16 {
        0 => Fault::LostRequest,
        1 | 2 => Fault::LostAnswer,
        3 => Fault::Again,
        4 => Fault::Late,
        _ => Fault::None,
    });
    let store = through(proxy.port);
    thread::scope(|scope| {
        for me in 0..THREADS {
            let (store, proxy) = (&store, &proxy);
            scope.spawn(move || {
                let other = through(proxy.port);
                let store: &dyn Store = if me % 2 == 0 { store } else { &other };
                for round in 0..ROUNDS {
                    store.add("sum", 1).unwrap();
                    store.append("log", b"x").unwrap();
                    store.queue_push("work", format!("{me}/{round}").as_bytes()).unwrap();
                    // Taken by turns: nobody wins twice, and nobody who has won is told that another one has.
                    let turn = format!("turn/{round}");
                    let name = me.to_string();
                    let winner = store.compare_set(&turn, b"", name.as_bytes()).unwrap();
                    if winner == name.as_bytes() {
                        store.add("won", 1).unwrap();
                        assert!(store.delete_key(&turn).unwrap());
                        store.set(&turn, b"over").unwrap();
                    }
                }
            });
        }
    });
    let direct = open(&[&server], "job");
    // What is still to arrive late has arrived.
    thread::sleep(Duration::from_millis(500));
    assert_eq!(direct.add("sum", 0).unwrap(), (THREADS * ROUNDS) as i64);
    assert_eq!(direct.get("log").unwrap().len(), THREADS * ROUNDS);
    assert!(direct.add("won", 0).unwrap() >= ROUNDS as i64);
    let mut items: Vec<_> = std::iter::from_fn(|| store.queue_try_pop("work").unwrap()).collect();
    items.sort_unstable();
    let mut expected: Vec<_> = (0..THREADS)
        .flat_map(|me| (0..ROUNDS).map(move |round| format!("{me}/{round}").into_bytes()))
        .collect();
    expected.sort_unstable();
    assert_eq!(items, expected);
}

/// A handle that asks what listens at `port`.
fn through(port: u16) -> EtcdStore {
    let servers = vec![format!("http://127.0.0.1:{port}")];
    EtcdStore::open(&Cluster { servers, ..Cluster::default() }, "job", HANG).unwrap()
}

#[test]
fn what_arrives_after_a_clear_changes_nothing() {
    if !is_installed() {
        return;
    }
    let server = Server::start(&[]);
    let next = Arc::new(Mutex::new(VecDeque::new()));
    let faults = Arc::clone(&next);
    let proxy =
        before(server.port, move |_| faults.lock().unwrap().pop_front().unwrap_or(Fault::None));
    let (store, direct) = (through(proxy.port), open(&[&server], "job"));

    // A change of a new writer, whose mark is made first, and one of a writer that has changed something.
    for (faults, held) in
        [(&[Fault::Held, Fault::None, Fault::Held][..], 2), (&[Fault::Held][..], 1)]
    {
        next.lock().unwrap().extend(faults);
        store.set("old", b"1").unwrap();
        direct.clear().unwrap();
        assert_eq!(proxy.deliver(), held);
        assert!(!direct.check(&["old"]).unwrap());
        store.set("other", b"1").unwrap();
    }
    // To clear takes a look, and then a transaction.
    next.lock().unwrap().extend([Fault::None, Fault::Held]);
    store.clear().unwrap();
    direct.set("new", b"1").unwrap();
    assert_eq!(proxy.deliver(), 1);
    assert_eq!(direct.list_keys().unwrap(), ["new"]);
}

#[test]
fn who_waits_is_told_and_does_not_ask_again_and_again() {
    if !is_installed() {
        return;
    }
    let server = Server::start(&[]);
    let asked = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&asked);
    let proxy = before(server.port, move |_| {
        count.fetch_add(1, Ordering::Relaxed);
        Fault::None
    });
    let (store, direct) = (through(proxy.port), open(&[&server], "job"));
    let (before, start) = (asked.load(Ordering::Relaxed), Instant::now());
    thread::scope(|scope| {
        let value = scope.spawn(|| store.get("late"));
        let item = scope.spawn(|| store.queue_pop("work"));
        let either = scope.spawn(|| store.wait(&["late", "more"], HANG));
        thread::sleep(Duration::from_secs(2));
        direct.set("late", b"1").unwrap();
        direct.queue_push("work", b"2").unwrap();
        direct.queue_push("more", b"3").unwrap();
        assert_eq!(value.join().unwrap().unwrap(), b"1");
        assert_eq!(item.join().unwrap().unwrap(), b"2");
        either.join().unwrap().unwrap();
    });
    // One that asks every 100 ms would have asked more than 20 times, and so would each of the others.
    let asked = asked.load(Ordering::Relaxed) - before;
    assert!(asked < 20 + 2 * start.elapsed().as_secs(), "{asked}");
}

#[test]
fn a_server_that_is_stopped_and_goes_on_counts_nothing_twice() {
    if !is_installed() {
        return;
    }
    let server = Server::start(&[]);
    let store = open(&[&server], "job");
    store.add("n", 1).unwrap();
    server.signal(Signal::STOP);
    thread::scope(|scope| {
        let calls = [
            scope.spawn(|| assert_ne!(store.add("n", 10).unwrap(), 0)),
            scope.spawn(|| assert_ne!(store.add("n", 100).unwrap(), 0)),
            scope.spawn(|| store.append("log", b"x").unwrap()),
            scope.spawn(|| store.queue_push("work", b"item").unwrap()),
            scope.spawn(|| assert_eq!(store.get("late").unwrap(), b"there")),
            scope.spawn(|| assert_eq!(store.compare_set("first", b"", b"me").unwrap(), b"me")),
        ];
        thread::sleep(STOP);
        assert!(!calls.iter().any(|call| call.is_finished()));
        server.signal(Signal::CONT);
        store.set("late", b"there").unwrap();
    });
    assert_eq!(store.add("n", 0).unwrap(), 111);
    assert_eq!(store.get("log").unwrap(), b"x");
    assert_eq!(store.queue_len("work").unwrap(), 1);
}

#[test]
fn calls_go_on_when_a_server_is_killed_and_started_again() {
    if !is_installed() {
        return;
    }
    let mut server = Server::start(&[]);
    let store = open(&[&server], "job");
    store.set("before", b"1").unwrap();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| store.get("after"));
        server.kill();
        let setter = scope.spawn(|| store.set("after", b"2"));
        thread::sleep(Duration::from_millis(300));
        assert!(!waiter.is_finished() && !setter.is_finished());
        server.run();
        setter.join().unwrap().unwrap();
        assert_eq!(waiter.join().unwrap().unwrap(), b"2");
    });
    assert_eq!(store.get("before").unwrap(), b"1");
}

#[test]
fn one_server_of_three_may_go() {
    if !is_installed() {
        return;
    }
    let mut servers = Server::start_three();
    let store = open(&servers.iter().collect::<Vec<_>>(), "job");
    for round in 0..3 {
        // The one that this store asks now.
        let port = store.address().unwrap().port();
        let asked = servers.iter().position(|server| server.port == port).unwrap();
        let key = format!("late/{round}");
        thread::scope(|scope| {
            let waiter = scope.spawn(|| store.get(&key));
            if round == 0 {
                servers[asked].signal(Signal::STOP);
            } else {
                servers[asked].kill();
            }
            assert_eq!(store.add("n", 1).unwrap(), round + 1);
            store.set(&key, b"there").unwrap();
            assert_eq!(waiter.join().unwrap().unwrap(), b"there");
        });
        assert_ne!(store.address().unwrap().port(), port);
        if round == 0 {
            servers[asked].signal(Signal::CONT);
        } else {
            servers[asked].run();
        }
    }
}

#[test]
fn a_time_limit_holds_while_no_server_answers() {
    if !is_installed() {
        return;
    }
    let mut server = Server::start(&[]);
    let store = open(&[&server], "job");
    let patient =
        EtcdStore::open(&super::cluster(&[&server]), "job", Duration::from_millis(300)).unwrap();
    server.kill();
    let url = server.url();
    for error in [
        store.wait(&["never"], Duration::from_millis(300)).unwrap_err(),
        patient.set("key", b"").unwrap_err(),
        patient.get("key").unwrap_err(),
    ] {
        let text = error.to_string();
        assert!(text.contains(&url) && text.contains("is it running?"), "{text}");
    }
}
