//! Strangers by the hundred, at a door with a secret and at one without, while a client works. Only
//! on loopback, for a bounded time. With the feature `soak`: 10,000 connections, for a minute.
//!
//! A program of its own, because it counts the lines of the log.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use drumline_store::{
    auth::Secret,
    store::{
        Store,
        tcp::{
            Door, TcpStore, TcpStoreServer,
            protocol::{Key, MAGIC, Request, Value},
        },
    },
};
use rustix::process::{Resource, getrlimit, setrlimit};
use tracing::{Event, Metadata, Subscriber, span};

const HANG: Duration = Duration::from_secs(60);

const QUICK: (usize, Duration) = (300, Duration::from_secs(2));
const LONG: (usize, Duration) = (10_000, Duration::from_secs(60));

/// Counts lines.
struct Lines;

static LINES: AtomicUsize = AtomicUsize::new(0);

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::INFO
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, _: &Event<'_>) {
        LINES.fetch_add(1, Ordering::Relaxed);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// One connection of an attacker, of one of four kinds; none where it was turned away at once.
fn attack(address: SocketAddr, number: usize, big: &[u8]) -> Option<TcpStream> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(1)).ok()?;
    stream.set_nonblocking(true).ok()?;
    match number % 4 {
        0 => {}                                                    // says nothing
        1 => drop(stream.write(&[0])),                             // trickles
        2 => drop(stream.write(b"GET / HTTP/1.1\r\n\x1b[2J\r\n")), // garbage
        _ => drop(stream.write(big)),                              // a big request, never whole
    }
    Some(stream)
}

/// Keeps `count` connections open in turn until `end`.
fn attack_until(addresses: [SocketAddr; 2], count: usize, end: Instant, over: &AtomicBool) {
    let big = vec![0; 7 << 20];
    let mut request = Vec::new();
    Request::Validate(MAGIC).encode(&mut request);
    Request::Set(Key(b"/big"), Value(&big)).encode(&mut request);
    request.pop();
    let mut open = std::collections::VecDeque::new();
    for number in 0.. {
        if Instant::now() >= end || over.load(Ordering::Relaxed) {
            return;
        }
        open.extend(attack(addresses[number / 4 % 2], number, &request));
        if open.len() >= count {
            open.pop_front();
        }
        if number % 50 == 0 {
            // Those who trickle, and those who send much, go on.
            for stream in &mut open {
                let _ = stream.write(&request[..64 << 10]);
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

fn resident_bytes() -> usize {
    let mut text = String::new();
    std::fs::File::open("/proc/self/statm").unwrap().read_to_string(&mut text).unwrap();
    let pages: usize = text.split(' ').nth(1).unwrap().parse().unwrap();
    pages * rustix::param::page_size()
}

#[test]
fn strangers_keep_nobody_from_working() {
    let (count, time) = if cfg!(feature = "soak") { LONG } else { QUICK };
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).unwrap();
    tracing::subscriber::set_global_default(Lines).unwrap();

    let secret = Secret::random().unwrap();
    let endpoint = "tcp://127.0.0.1:0".parse().unwrap();
    let secured = TcpStore::host_secured(&endpoint, &secret).unwrap();
    let open =
        TcpStoreServer::open(&[Door::Exposed { host: "127.0.0.1".into(), port: 0 }], 64 << 20);
    let open = TcpStore::to_own(open.unwrap()).unwrap();
    let addresses = [&secured, &open].map(|store| store.address().unwrap());
    let before = resident_bytes();
    let end = Instant::now() + time;
    let over = AtomicBool::new(false);
    let (mut rounds, mut most, mut longest) = (0_i64, 0, Duration::ZERO);
    thread::scope(|scope| {
        scope.spawn(|| attack_until(addresses, count, end, &over));
        let clients = [
            TcpStore::connect_secured(&secured.name().parse().unwrap(), &secret, HANG).unwrap(),
            TcpStore::connect("127.0.0.1", addresses[1].port(), HANG).unwrap(),
        ];
        while Instant::now() < end {
            rounds += 1;
            for client in &clients {
                let start = Instant::now();
                assert_eq!(client.add("rounds", 1).unwrap(), rounds);
                longest = longest.max(start.elapsed());
            }
            most = most.max(resident_bytes());
            thread::sleep(Duration::from_millis(5));
        }
        over.store(true, Ordering::Relaxed);
    });
    let lines = LINES.load(Ordering::Relaxed);
    println!(
        "{count} connections at a time for {time:?}: {rounds} rounds, the longest call {longest:.1?}, \
         {} MiB more at most, {lines} lines of log",
        most.saturating_sub(before) >> 20
    );
    assert!(rounds > 10, "{rounds} rounds");
    assert!(lines <= 20, "{lines} lines");
    assert!(most < 256 << 20, "{most} bytes");
}
