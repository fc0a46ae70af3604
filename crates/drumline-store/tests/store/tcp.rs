//! The TCP store over real sockets: strangers, dead and silent servers, deadlines.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::atomic::{AtomicU8, Ordering},
    thread,
    time::{Duration, Instant},
};

use drumline_error::ErrorKind;
use drumline_store::{
    Error,
    auth::{Level, Secret},
    net::Endpoint,
    store::{
        Store,
        tcp::{
            Door, TcpStore, TcpStoreServer,
            protocol::{
                ASK_EXTENSIONS, EXTENSIONS, KEY_BYTES_MAX, Key, MAGIC, Request, VALUE_BYTES_MAX,
                Value,
            },
        },
    },
};

/// No call here takes that long unless something hangs.
const HANG: Duration = Duration::from_secs(60);
const SOON: Duration = Duration::from_millis(30);

fn host() -> TcpStore {
    TcpStore::host("127.0.0.1", 0).unwrap()
}

fn connect(address: SocketAddr) -> TcpStore {
    TcpStore::connect(&address.ip().to_string(), address.port(), HANG).unwrap()
}

fn connect_raw(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(HANG)).unwrap();
    stream
}

const PORT: u16 = 29500;

/// An address of this machine that no other test uses, so that the port is free there.
fn fresh_host() -> String {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    format!("127.{high}.{low}.{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

#[test]
fn the_server_listens_where_it_is_told_and_nowhere_else() {
    let store = host();
    assert_eq!(store.address().unwrap().ip().to_string(), "127.0.0.1");
    // All of 127/8 is this machine. On a wildcard, this would connect.
    assert!(TcpStream::connect(("127.0.0.2", store.address().unwrap().port())).is_err());

    let named = TcpStore::host("localhost", 0).unwrap();
    assert!(named.address().unwrap().ip().is_loopback());
    assert!(named.name().starts_with("tcp://localhost:"), "{}", named.name());
    TcpStore::connect("localhost", named.address().unwrap().port(), HANG).unwrap();

    // 192.0.2.0/24 is for documentation: nobody's.
    let error = TcpStoreServer::bind_exposed("192.0.2.1", 29500).unwrap_err().to_string();
    assert!(error.contains("not an address of this machine"), "{error}");
    let error = TcpStoreServer::bind("no-such-host.invalid", 29500).unwrap_err().to_string();
    assert!(error.contains("cannot be resolved"), "{error}");
}

#[test]
fn a_store_without_a_secret_is_for_this_machine_only_unless_one_insists() {
    for host in ["192.0.2.1", "0.0.0.0", "::"] {
        let error = TcpStoreServer::bind(host, 0).unwrap_err().to_string();
        for part in ["no authentication", "DRUMLINE_SECRET", "DRUMLINE_TRUST_STORE=1"] {
            assert!(error.contains(part), "{error}");
        }
    }
    let exposed = TcpStoreServer::bind_exposed("0.0.0.0", 0).unwrap();
    TcpStore::connect("127.0.0.1", exposed.address().unwrap().port(), HANG).unwrap();
}

/// A port of loopback and a Unix socket, each with a server that asks for a secret.
fn secured(secret: &Secret) -> [TcpStore; 2] {
    static NEXT: AtomicU8 = AtomicU8::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("drumline-store-test-{}-{number}", std::process::id());
    [Endpoint::Tcp { host: "127.0.0.1".into(), port: 0 }, Endpoint::Unix(name)]
        .map(|endpoint| TcpStore::host_secured(&endpoint, secret).unwrap())
}

#[test]
fn who_does_not_know_the_secret_is_refused_at_once() {
    let secret = Secret::random().unwrap();
    for store in secured(&secret) {
        let endpoint: Endpoint = store.name().parse().unwrap();
        let other = Secret::random().unwrap();
        let error = TcpStore::connect_secured(&endpoint, &other, HANG).unwrap_err().to_string();
        for part in [store.name(), "does not know this job's secret", "DRUMLINE_SECRET_FILE"] {
            assert!(error.contains(part), "{error}");
        }
        let client = TcpStore::connect_secured(&endpoint, &secret, HANG).unwrap();
        client.set("key", b"value").unwrap();
        assert_eq!(store.get("key").unwrap(), b"value");
        assert!(!format!("{store:?}").contains(std::str::from_utf8(secret.expose()).unwrap()));
    }
}

#[test]
fn a_secret_on_one_side_only_is_told() {
    // Both wait for as long, in case it is told otherwise: enough to hear it once on a busy machine.
    let patience = Duration::from_secs(4);
    let secret = Secret::random().unwrap();
    let [store, _] = secured(&secret);
    let port = store.address().unwrap().port();
    let open_store = host();
    let open: Endpoint = open_store.name().parse().unwrap();
    thread::scope(|scope| {
        let without = scope.spawn(|| TcpStore::connect("127.0.0.1", port, patience).unwrap_err());
        let with = TcpStore::connect_secured(&open, &secret, patience).unwrap_err();
        for error in [without.join().unwrap(), with] {
            let error = error.to_string();
            assert!(error.contains("a secret") && error.contains("the other none"), "{error}");
        }
    });
}

#[test]
fn a_crowd_of_strangers_does_not_disturb_a_store_with_a_secret() {
    raise_descriptor_limit(4096);
    let secret = Secret::random().unwrap();
    let [store, _] = secured(&secret);
    let address = store.address().unwrap();
    let crowd: Vec<_> = (0..600)
        .map(|stranger| {
            let mut stream = connect_raw(address);
            let _ = match stranger % 3 {
                0 => Ok(()),
                1 => stream.write_all(b"DRUM\x03\0\x01\x02"),
                _ => stream.write_all(&encoded(&Request::Validate(MAGIC))),
            };
            stream
        })
        .collect();
    let endpoint: Endpoint = store.name().parse().unwrap();
    let client = TcpStore::connect_secured(&endpoint, &secret, HANG).unwrap();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| client.get("key"));
        store.set("key", b"value").unwrap();
        assert_eq!(waiter.join().unwrap().unwrap(), b"value");
    });
    // Of those who sit there, the first have made room for the later ones.
    let mut turned_away = 0;
    for mut stream in crowd {
        stream.set_nonblocking(true).unwrap();
        let gone = !matches!(stream.read(&mut [0; 1]), Err(error)
            if error.kind() == std::io::ErrorKind::WouldBlock);
        turned_away += usize::from(gone);
    }
    assert!(turned_away >= 600 - 256, "{turned_away}");
}

#[test]
fn a_port_in_use_is_named() {
    let host = &fresh_host();
    let first = TcpStore::host(host, PORT).unwrap();
    let error = TcpStore::host(host, PORT).unwrap_err().to_string();
    for part in [&*format!("port {PORT} of {host} is in use"), "MASTER_PORT", "drumline run"] {
        assert!(error.contains(part), "{error}");
    }
    // Dropping the store frees its port at once.
    drop(connect(first.address().unwrap()));
    drop(first);
    TcpStore::host(host, PORT).unwrap();
}

#[test]
fn strangers_do_not_disturb() {
    // Both ends of 500 connections are in this process.
    raise_descriptor_limit(2048);
    let store = host();
    let address = store.address().unwrap();
    let validate = encoded(&Request::Validate(MAGIC));

    let idle: Vec<_> = (0..500).map(|_| connect_raw(address)).collect();
    let half_requests: Vec<_> = (1..validate.len() + 3)
        .map(|length| {
            let bytes = [&validate[..], &[1, 0xff, 0]].concat();
            let mut stream = connect_raw(address);
            stream.write_all(&bytes[..length]).unwrap();
            stream
        })
        .collect();
    for garbage in [
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![0xff; 100_000],
        [&validate[..], &[42]].concat(),
        [&validate[..], &[6], &u64::MAX.to_le_bytes()].concat(),
    ] {
        let mut stream = connect_raw(address);
        // The server may close before it has read all.
        let _ = stream.write_all(&garbage);
        assert_closed(stream);
    }

    let client = connect(address);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| client.get("key"));
        store.set("key", b"value").unwrap();
        assert_eq!(waiter.join().unwrap().unwrap(), b"value");
    });
    // A slow writer is no stranger.
    let mut slow = connect_raw(address);
    for byte in [&validate[..], &encoded(&Request::Ping(7))].concat() {
        slow.write_all(&[byte]).unwrap();
    }
    let mut echo = [0; 4];
    slow.read_exact(&mut echo).unwrap();
    assert_eq!(echo, [7, 0, 0, 0]);
    drop((idle, half_requests));
    assert_eq!(client.add("after", 1).unwrap(), 1);
}

#[test]
fn a_client_that_does_not_read_is_closed() {
    let store = host();
    store.set("big", &vec![1; VALUE_BYTES_MAX]).unwrap();
    let mut greedy = connect_raw(store.address().unwrap());
    let get = encoded(&Request::Get(Key(b"/big")));
    greedy.write_all(&encoded(&Request::Validate(MAGIC))).unwrap();
    // What sockets buffer is small beside this.
    let _ = greedy.write_all(&get.repeat(64));
    let mut received = 0;
    let mut buffer = vec![0; 1 << 16];
    while let Ok(count @ 1..) = greedy.read(&mut buffer) {
        received += count;
    }
    assert!(received < 64 * VALUE_BYTES_MAX);
    assert_eq!(store.get("big").unwrap().len(), VALUE_BYTES_MAX);
}

#[test]
fn a_host_that_goes_is_an_error_for_everyone_who_waits() {
    let store = host();
    let clients: Vec<_> = (0..4).map(|_| connect(store.address().unwrap())).collect();
    thread::scope(|scope| {
        let waiters: Vec<_> = clients
            .iter()
            .map(|client| {
                scope.spawn(|| {
                    client.add("waiting", 1).unwrap();
                    client.get("never")
                })
            })
            .collect();
        while store.add("waiting", 0).unwrap() < 4 {
            thread::yield_now();
        }
        drop(store);
        for waiter in waiters {
            let error = waiter.join().unwrap().unwrap_err().to_string();
            assert!(error.contains("tcp://127.0.0.1:"), "{error}");
            assert!(error.contains("get never"), "{error}");
            assert!(error.contains("has probably exited"), "{error}");
        }
    });
    let error = clients[0].set("key", b"").unwrap_err().to_string();
    assert!(error.contains("has probably exited"), "{error}");
}

#[test]
fn after_a_broken_connection_the_next_call_gets_a_whole_one() {
    let store = host();
    let client = connect(store.address().unwrap());
    client.set("text", b"abc").unwrap();
    for _ in 0..10 {
        // The server closes the connection over this.
        let error = client.add("text", 1).unwrap_err().to_string();
        assert!(error.contains("\"abc\" is not a decimal number"), "{error}");
        assert_eq!(client.get("text").unwrap(), b"abc");
    }
}

#[test]
fn what_the_protocol_cannot_carry_is_refused_here() {
    let store = host();
    let key = "k".repeat(KEY_BYTES_MAX);
    let refused = |result: Result<(), Error>| {
        assert!(
            matches!(result, Err(ref error) if error.kind() == ErrorKind::Argument),
            "{result:?}"
        );
    };
    refused(store.set(&key, b""));
    refused(store.get(&key).map(drop));
    refused(store.wait(&["k", &key], SOON));
    refused(store.set("k", &vec![0; VALUE_BYTES_MAX + 1]));
    refused(store.compare_set("k", b"", &vec![0; VALUE_BYTES_MAX + 1]).map(drop));
    refused(store.check(&vec!["k"; 131_073]).map(drop));
    refused(store.check(&vec![&key[1..]; 5000]).map(drop));
    // The largest that it can carry.
    store.set(&key[1..], &vec![7; VALUE_BYTES_MAX]).unwrap();
    assert_eq!(store.get(&key[1..]).unwrap(), vec![7; VALUE_BYTES_MAX]);
    assert!(store.check(&vec![&key[1..]; 1000]).unwrap());
}

#[test]
fn connecting_waits_for_the_host() {
    let host = &fresh_host();
    thread::scope(|scope| {
        let client = scope.spawn(move || TcpStore::connect(host, PORT, HANG).unwrap());
        thread::sleep(SOON);
        let store = TcpStore::host(host, PORT).unwrap();
        client.join().unwrap().set("key", b"value").unwrap();
        assert_eq!(store.get("key").unwrap(), b"value");
    });
}

#[test]
fn connecting_ends_at_its_deadline() {
    // It accepts in the kernel and never answers.
    let (silent_host, talking_host) = (fresh_host(), fresh_host());
    let _silent = TcpListener::bind((&*silent_host, PORT)).unwrap();
    // It answers, but not as a store does.
    let talker = TcpListener::bind((&*talking_host, PORT)).unwrap();
    thread::spawn(move || {
        for stream in talker.incoming() {
            let _ = stream.unwrap().write_all(b"220 mail.example ESMTP\r\n");
        }
    });
    for host in [fresh_host(), silent_host, talking_host] {
        let timeout = Duration::from_millis(200);
        let start = Instant::now();
        let error = TcpStore::connect(&host, PORT, timeout).unwrap_err().to_string();
        assert!(start.elapsed() < HANG);
        assert!(error.contains(&format!("tcp://{host}:{PORT}")), "{error}");
        assert!(error.contains("MASTER_PORT"), "{error}");
    }
    let error = TcpStore::connect("no-such-host.invalid", 1, SOON).unwrap_err().to_string();
    assert!(error.contains("tcp://no-such-host.invalid:1"), "{error}");
}

/// The torch client cancels its wait when the server is alive; ours must not hang when it is not.
#[test]
fn a_wait_on_a_server_that_has_stopped_ends() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let server = thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        let mut handshake = [0; 10];
        stream.read_exact(&mut handshake).unwrap();
        stream.write_all(&handshake[6..]).unwrap();
        // From here on it is silent, until the client gives up.
        std::io::copy(&mut stream, &mut std::io::sink()).unwrap();
    });
    let store = connect(address);
    let start = Instant::now();
    let error = store.wait(&["key"], SOON).unwrap_err().to_string();
    assert!(error.contains("no answer") && error.contains("wait for key"), "{error}");
    assert!(!error.contains("300"), "it did not wait for the store's time-out: {error}");
    assert!(start.elapsed() < HANG);
    server.join().unwrap();
}

/// Answers each of `exchange`'s requests, which must be exactly the bytes that come, with its reply.
fn scripted(exchange: Vec<(Vec<u8>, Vec<u8>)>) -> (SocketAddr, thread::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let server = thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        for (request, reply) in exchange {
            let mut received = vec![0; request.len()];
            stream.read_exact(&mut received).unwrap();
            assert_eq!(received, request);
            stream.write_all(&reply).unwrap();
        }
        assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0, "one request more");
    });
    (address, server)
}

fn greeting(answer: u32) -> (Vec<u8>, Vec<u8>) {
    let requests = [Request::Validate(MAGIC), Request::Ping(ASK_EXTENSIONS)];
    (requests.iter().flat_map(encoded).collect(), answer.to_le_bytes().to_vec())
}

#[test]
fn a_value_takes_one_round_trip_from_a_server_of_ours() {
    let value = b"\x05\0\0\0\0\0\0\0value";
    let item = b"\x04\0\0\0\0\0\0\0item";
    let (address, server) = scripted(vec![
        greeting(EXTENSIONS),
        (encoded(&Request::Fetch(vec![Key(b"/key")])), [&[0], &value[..]].concat()),
        (encoded(&Request::Take(Key(b"/queue"))), [&[0], &item[..]].concat()),
    ]);
    let store = connect(address);
    assert_eq!(store.get("key").unwrap(), b"value");
    assert_eq!(store.queue_pop("queue").unwrap(), b"item");
    drop(store);
    server.join().unwrap();

    // torch's server knows no such requests.
    let (address, server) = scripted(vec![
        greeting(ASK_EXTENSIONS),
        (encoded(&Request::Wait(vec![Key(b"/key")])), vec![0]),
        (encoded(&Request::Get(Key(b"/key"))), value.to_vec()),
    ]);
    let store = connect(address);
    assert_eq!(store.get("key").unwrap(), b"value");
    drop(store);
    server.join().unwrap();
}

/// The values are on their way when the client's patience ends.
#[test]
fn values_that_cross_with_the_end_of_patience_are_taken() {
    let (address, server) = scripted(vec![
        greeting(EXTENSIONS),
        (encoded(&Request::Fetch(vec![Key(b"/key")])), vec![]),
        (encoded(&Request::CancelWait()), b"\0\x05\0\0\0\0\0\0\0value\x01".to_vec()),
        (encoded(&Request::Take(Key(b"/queue"))), vec![]),
        (encoded(&Request::CancelWait()), vec![1]),
        (encoded(&Request::Check(vec![Key(b"/queue")])), vec![0]),
    ]);
    let store = connect(address);
    store.set_timeout(SOON);
    assert_eq!(store.get("key").unwrap(), b"value");
    assert!(
        matches!(store.queue_pop("queue"), Err(error) if error.kind() == ErrorKind::StoreTimeout)
    );
    assert!(store.check(&["queue"]).unwrap());
    drop(store);
    server.join().unwrap();
}

#[test]
fn one_store_has_two_doors() {
    let secret = Secret::random().unwrap();
    let endpoint = Endpoint::Unix(format!("drumline-doors-{}", std::process::id()));
    let doors = [
        Door::Secured { endpoint: endpoint.clone(), secret: secret.clone(), level: Level::Auth },
        Door::Loopback { host: "127.0.0.1".into(), port: 0 },
    ];
    let server = TcpStoreServer::open(&doors, 1 << 20).unwrap();
    let address = server.address().unwrap();
    assert_eq!(server.endpoint(), &endpoint);
    let ours = TcpStore::connect_secured(&endpoint, &secret, HANG).unwrap();
    let theirs = connect(address);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| theirs.get("key"));
        ours.set("key", b"value").unwrap();
        assert_eq!(waiter.join().unwrap().unwrap(), b"value");
    });
    // Each door asks for what it asks for.
    assert!(TcpStore::connect_secured(&endpoint, &Secret::random().unwrap(), HANG).is_err());
    let stranger = TcpStore::connect_secured(
        &format!("tcp://{address}").parse().unwrap(),
        &secret,
        Duration::from_millis(100),
    );
    assert!(stranger.is_err());
    // One that cannot be opened opens none, and there must be one.
    let other = Endpoint::Unix(format!("drumline-doors-other-{}", std::process::id()));
    let impossible = [
        Door::Secured { endpoint: other.clone(), secret: secret.clone(), level: Level::Auth },
        Door::Loopback { host: "192.0.2.1".into(), port: 0 },
    ];
    TcpStoreServer::open(&impossible, 1 << 20).unwrap_err();
    TcpStoreServer::bind_secured(&other, &secret).unwrap();
    let error = TcpStoreServer::open(&[], 1 << 20).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Argument, "{error}");
}

#[test]
fn a_store_that_is_full_says_so_and_goes_on() {
    let doors = [Door::Loopback { host: "127.0.0.1".into(), port: 0 }];
    let store = TcpStore::to_own(TcpStoreServer::open(&doors, 10_000).unwrap()).unwrap();
    store.set("old", &[0; 9_000]).unwrap();
    for error in [
        store.set("new", &[0; 2_000]).unwrap_err(),
        store.queue_push("new", &[0; 2_000]).unwrap_err(),
        store.compare_set("new", b"", &[0; 2_000]).unwrap_err(),
    ] {
        let error = error.to_string();
        assert!(error.contains("new") && error.contains("may be full"), "{error}");
    }
    assert!(!store.check(&["new"]).unwrap());
    store.set("old", b"").unwrap();
    store.set("new", &[0; 2_000]).unwrap();
}

#[test]
fn thousands_wait_on_one_server() {
    const CLIENTS: usize = 4000;
    // Both ends are in this process.
    raise_descriptor_limit(2 * CLIENTS as u64 + 500);
    let store = host();
    let address = store.address().unwrap();
    let hello = [
        encoded(&Request::Validate(MAGIC)),
        encoded(&Request::Add(Key(b"/here"), 1)),
        encoded(&Request::Wait(vec![Key(b"/gate")])),
    ]
    .concat();
    let mut clients: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let mut stream = connect_raw(address);
            stream.write_all(&hello).unwrap();
            stream.read_exact(&mut [0; 8]).unwrap();
            stream
        })
        .collect();
    assert_eq!(store.add("here", 0).unwrap(), CLIENTS as i64);
    // One that talks is served beside all that are silent.
    let talker = connect(address);
    for round in 0..100 {
        assert_eq!(talker.add("rounds", 1).unwrap(), round + 1);
    }
    store.multi_set(&[("gate", b"open")]).unwrap();
    for stream in &mut clients {
        let mut reply = [9];
        stream.read_exact(&mut reply).unwrap();
        assert_eq!(reply, [0]);
        stream.write_all(&encoded(&Request::Set(Key(b"/bye"), Value(b"")))).unwrap();
    }
    drop((clients, talker));
    assert!(store.wait_for_departure(HANG));
}

#[test]
fn workers_are_counted() {
    let store = host();
    let address = store.address().unwrap();
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(move || connect(address).wait_for_workers(4, HANG).unwrap());
        }
        store.wait_for_workers(4, HANG).unwrap();
    });
    let error = store.wait_for_workers(6, SOON).unwrap_err().to_string();
    assert!(error.contains("5 of 6 have joined"), "{error}");
}

#[test]
fn the_host_can_wait_until_the_others_have_gone() {
    let store = host();
    assert!(store.wait_for_departure(HANG));
    let client = connect(store.address().unwrap());
    assert!(!store.wait_for_departure(SOON));
    let idle = connect_raw(store.address().unwrap());
    thread::scope(|scope| {
        scope.spawn(move || {
            client.get("go").unwrap();
        });
        store.set("go", b"").unwrap();
        // Neither its own connections nor a stranger's count.
        assert!(store.wait_for_departure(HANG));
    });
    drop(idle);
}

fn encoded(request: &Request<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    request.encode(&mut bytes);
    bytes
}

/// An end of stream or a reset; anything else, such as our own time-out, fails.
fn assert_closed(mut stream: TcpStream) {
    match stream.read(&mut [0; 16]) {
        Ok(count) => assert_eq!(count, 0),
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
    }
}

fn raise_descriptor_limit(wanted: u64) {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|current| current < wanted) {
        limit.current = Some(limit.maximum.map_or(wanted, |maximum| maximum.min(wanted)));
        setrlimit(Resource::Nofile, limit).unwrap();
    }
}
