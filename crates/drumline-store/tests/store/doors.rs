//! Who comes in through a door without a secret, who is waited for, and what others' text looks like.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    thread,
    time::{Duration, Instant},
};

use drumline_error::ErrorKind;
use drumline_store::store::{
    FileStore, Store,
    tcp::{
        TcpStore,
        protocol::{Key, MAGIC, Request, Value},
        server::{Refusal, STRANGERS_BYTES_MAX, Server},
    },
};

const HANG: Duration = Duration::from_secs(60);

fn encoded(requests: &[Request<'_>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    requests.iter().for_each(|request| request.encode(&mut bytes));
    bytes
}

/// What torch sends: it greets, sets a key, and hears the echo of its PING.
fn as_torch(store: &TcpStore, requests: &[Request<'_>]) -> TcpStream {
    let mut stream = TcpStream::connect(store.address().unwrap()).unwrap();
    stream.set_read_timeout(Some(HANG)).unwrap();
    stream.write_all(&encoded(&[Request::Validate(MAGIC)])).unwrap();
    stream.write_all(&encoded(requests)).unwrap();
    stream.write_all(&encoded(&[Request::Ping(7)])).unwrap();
    stream.read_exact(&mut [0; 4]).unwrap();
    stream
}

#[test]
fn an_idle_client_of_another_program_holds_up_nobody() {
    let store = TcpStore::host("127.0.0.1", 0).unwrap();
    let idle = as_torch(&store, &[Request::Set(Key(b"/key"), Value(b"value"))]);
    let start = Instant::now();
    assert!(store.wait_for_departure(HANG));
    assert!(start.elapsed() < HANG / 2, "it was waited for");
    drop(idle);
}

#[test]
fn a_client_of_another_program_that_has_joined_is_waited_for() {
    let store = TcpStore::host("127.0.0.1", 0).unwrap();
    let mut rank = TcpStream::connect(store.address().unwrap()).unwrap();
    rank.write_all(&encoded(&[Request::Validate(MAGIC), Request::Add(Key(b"init/"), 1)])).unwrap();
    rank.read_exact(&mut [0; 8]).unwrap();
    assert!(!store.wait_for_departure(Duration::from_millis(30)));
    drop(rank);
    assert!(store.wait_for_departure(HANG));
}

#[test]
fn another_user_does_not_come_in_unless_one_insists() {
    use rustix::{process::Uid, thread::set_thread_res_uid};
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: only root can be somebody else");
        return;
    }
    let nobody = Uid::from_raw(65_534);
    let own = TcpStore::host("127.0.0.1", 0).unwrap();
    let anyone = TcpStore::host_exposed("127.0.0.1", 0).unwrap();
    for (store, comes_in) in [(&own, false), (&anyone, true)] {
        thread::scope(|scope| {
            scope.spawn(|| {
                set_thread_res_uid(nobody, nobody, nobody).unwrap();
                let mut stream = TcpStream::connect(store.address().unwrap()).unwrap();
                stream.set_read_timeout(Some(HANG)).unwrap();
                // Either may fail: it is hung up on.
                let hello = [Request::Validate(MAGIC), Request::Set(Key(b"/k"), Value(b"v"))];
                let _ = stream.write_all(&encoded(&hello));
                let _ = stream.write_all(&encoded(&[Request::Ping(7)]));
                assert_eq!(stream.read_exact(&mut [0; 4]).is_ok(), comes_in);
            });
        });
        assert_eq!(store.check(&["k"]).unwrap(), comes_in);
    }
}

/// Any user may be first to listen at a port that others will call.
#[test]
fn a_port_that_another_user_holds_is_no_store_unless_one_insists() {
    use rustix::{process::Uid, thread::set_thread_res_uid};
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: only root can be somebody else");
        return;
    }
    let nobody = Uid::from_raw(65_534);
    let theirs = |host: &'static str| {
        thread::spawn(move || {
            set_thread_res_uid(nobody, nobody, nobody).unwrap();
            TcpStore::host_exposed(host, 0)
        })
    };
    for (host, called) in [
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "localhost"),
        ("::", "::ffff:127.0.0.1"),
        ("::1", "::1"),
    ] {
        // Some hosts have no IPv6.
        let Ok(theirs) = theirs(host).join().unwrap() else { continue };
        let port = theirs.address().unwrap().port();
        let start = Instant::now();
        let error = TcpStore::connect(called, port, HANG).unwrap_err().to_string();
        assert!(start.elapsed() < HANG / 2, "it was called again and again");
        for part in [
            &format!("port {port}")[..],
            "user 65534",
            "user 0",
            "DRUMLINE_SECRET",
            "DRUMLINE_TRUST_STORE=1",
        ] {
            assert!(error.contains(part), "{error}");
        }
        assert!(theirs.list_keys().unwrap().is_empty());
        TcpStore::connect_trusting(called, port, HANG).unwrap().set("k", b"v").unwrap();
    }
    // Of root, and of the own user.
    let roots = TcpStore::host_exposed("127.0.0.1", 0).unwrap();
    thread::scope(|scope| {
        let port = roots.address().unwrap().port();
        TcpStore::connect("127.0.0.1", port, HANG).unwrap();
        scope.spawn(move || {
            set_thread_res_uid(nobody, nobody, nobody).unwrap();
            let own = TcpStore::host("127.0.0.1", 0).unwrap();
            TcpStore::connect("127.0.0.1", own.address().unwrap().port(), HANG).unwrap();
            TcpStore::connect("127.0.0.1", port, HANG).unwrap();
        });
    });
}

#[test]
fn what_strangers_have_in_buffers_together_is_limited() {
    let mut server = Server::with_limit(1 << 30);
    let greeting = encoded(&[Request::Validate(MAGIC)]);
    let big = vec![0; 8 << 20];
    let request = encoded(&[Request::Set(Key(b"/big"), Value(&big))]);
    let modest = server.connect_stranger();
    server.receive(modest, &greeting);
    let mut refused = 0;
    for _ in 0..50 {
        let stranger = server.connect_stranger();
        server.receive(stranger, &greeting);
        server.receive(stranger, &request[..request.len() - 1]);
        let load = server.load();
        assert!(load.input_bytes + load.output_bytes <= STRANGERS_BYTES_MAX, "{load:?}");
        for (id, refusal) in server.take_refused() {
            assert_eq!(refusal, Refusal::Crowded);
            assert_ne!(id, modest);
            refused += 1;
        }
    }
    assert!(refused > 40, "{refused}");
    server.receive(modest, &encoded(&[Request::Ping(7)]));
    assert_eq!(server.output(modest), [7, 0, 0, 0]);
    // Who has shown a secret is not counted.
    let friend = server.connect();
    server.receive(friend, &greeting);
    server.receive(friend, &request);
    assert!(server.take_refused().is_empty());
}

#[test]
fn keys_of_others_cannot_fake_lines_or_command_a_terminal() {
    let evil = "a\nERROR rank 3 died\x1b[2J";
    let shown = r"a\nERROR rank 3 died\u{1b}[2J";
    let directory = tempfile::tempdir().unwrap();
    let tcp = TcpStore::host("127.0.0.1", 0).unwrap();
    let file = FileStore::open(directory.path().join("store"), 1).unwrap();
    for store in [&tcp as &dyn Store, &file] {
        let timeout = store.wait(&[evil], Duration::ZERO).unwrap_err();
        assert_eq!(timeout.kind(), ErrorKind::StoreTimeout, "{timeout}");
        store.set(evil, b"no\nnumber\x1b[2J").unwrap();
        let add = store.add(evil, 1).unwrap_err();
        for error in [timeout, add] {
            let error = error.to_string();
            assert!(error.contains(shown) && !error.contains(['\n', '\x1b']), "{error}");
        }
        // Keys themselves are as they were given.
        assert_eq!(store.list_keys().unwrap(), [evil]);
    }
    // What the server writes to its log.
    let mut server = Server::default();
    let id = server.connect();
    let requests = [
        Request::Validate(MAGIC),
        Request::Set(Key(evil.as_bytes()), Value(b"x")),
        Request::Add(Key(evil.as_bytes()), 1),
    ];
    server.receive(id, &encoded(&requests));
    let (_, refusal) = server.take_refused().remove(0);
    let text = refusal.to_string();
    assert!(text.contains(shown) && !text.contains(['\n', '\x1b']), "{text}");
}

#[test]
fn a_file_store_is_a_regular_file() {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    let directory = tempfile::tempdir().unwrap();
    let fifo = directory.path().join("fifo");
    mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let start = Instant::now();
    for path in [fifo.as_path(), "/dev/zero".as_ref()] {
        let error = FileStore::open(path, 1).unwrap_err().to_string();
        assert!(error.contains("no regular file"), "{error}");
    }
    assert!(start.elapsed() < HANG / 2);
}
