//! The gate on real sockets, among strangers.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, TcpStream},
    os::unix::net::UnixStream,
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use drumline_shm::Unforked;
use rustix::event::PollFlags;

use super::{
    call::{Address, CallError, check_peer, open, say, shake, shake_hands},
    gate::{Admission, Arrival, GUESTS_MAX, Gate, Listener},
    sleep_until,
    stream::Stream,
};
use crate::auth::{Channel, Expected, Handshake, Hello, Level, Nonce, Secret};

/// Nothing here takes this long unless it hangs.
const HANG: Duration = Duration::from_secs(60);

fn secret() -> Option<Secret> {
    Some(Secret::new(*b"a secret for the tests of gates").unwrap())
}

fn hello(rank: usize) -> Hello {
    Hello { channel: Channel::Points, rank, world_size: 4, group: 11 }
}

fn gate(listener: Listener) -> (Gate, Address) {
    let expected = Expected { ranks: 1..4, world_size: 4, group: 11 };
    let admission =
        Admission::Handshake { ours: hello(0), expected, secret: secret(), level: Level::Auth };
    let address = Address::Tcp(listener.address().unwrap_or(([0, 0, 0, 0], 0).into()));
    (Gate::new(listener, admission).unwrap(), address)
}

fn tcp_gate() -> (Gate, Address) {
    gate(Listener::tcp((Ipv4Addr::LOCALHOST, 0).into()).unwrap())
}

fn unix_gate() -> (Gate, Address) {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("drumline-test-{}-{number}", std::process::id());
    let (gate, _) = gate(Listener::unix(&name).unwrap());
    (gate, Address::Unix(name))
}

/// Connects as `rank`, with as many attempts as needed: a flood of others may push it out.
fn call(address: &Address, rank: usize, secret: Option<Secret>) -> Result<Stream, CallError> {
    let deadline = Instant::now() + HANG;
    loop {
        let expected = Expected { ranks: 0..1, world_size: 4, group: 11 };
        let nonce = Nonce::random().unwrap();
        let handshake = Handshake::call(hello(rank), expected, secret.clone(), nonce);
        let stream = open(address, deadline)?;
        match shake_hands(stream, handshake, secret.is_some(), deadline) {
            Ok(stream) => return Ok(stream),
            Err(CallError::HungUp(_)) => assert!(Instant::now() < deadline),
            Err(error) => return Err(error),
        }
    }
}

/// Runs the gate until a connection is accepted. Checks that there are never too many guests.
fn first(gate: &mut Gate) -> Arrival {
    let deadline = Instant::now() + HANG;
    loop {
        assert!(Instant::now() < deadline, "nobody comes in");
        sleep_until(gate, PollFlags::IN, gate.deadline().unwrap_or(deadline).min(deadline));
        let arrivals = gate.admit(Instant::now()).unwrap();
        assert!(gate.guests() <= GUESTS_MAX);
        if let Some(arrival) = arrivals.into_iter().next() {
            return arrival;
        }
    }
}

#[test]
fn who_belongs_here_is_let_in_over_tcp_and_unix() {
    for (mut gate, address) in [tcp_gate(), unix_gate()] {
        thread::scope(|scope| {
            let peer = scope.spawn(|| {
                let mut stream = call(&address, 2, secret()).unwrap();
                stream.set_nonblocking(false).unwrap();
                stream.write_all(b"right behind").unwrap();
                stream
            });
            let mut arrival = first(&mut gate);
            assert_eq!(arrival.hello, Some(hello(2)));
            let peer = peer.join().unwrap();
            // No byte behind the handshake is lost.
            arrival.stream.set_nonblocking(false).unwrap();
            let mut bytes = [0; 12];
            arrival.stream.read_exact(&mut bytes).unwrap();
            assert_eq!(&bytes, b"right behind");
            drop(peer);
        });
    }
}

#[test]
fn after_a_stranger_the_gate_accepts_nobody_for_a_moment() {
    let (mut gate, address) = tcp_gate();
    let port = gate.address().unwrap();
    let mut stranger = TcpStream::connect(port).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\n").unwrap();
    // The gate's clock stands still, so the moment does not pass.
    let now = Instant::now();
    while gate.objection().is_none() {
        assert!(now.elapsed() < HANG, "the stranger is not heard");
        assert!(gate.admit(now).unwrap().is_empty());
    }
    let over = gate.deadline().unwrap();
    assert!(now < over && over <= now + Duration::from_millis(100));
    let _waits = TcpStream::connect(port).unwrap();
    assert!(gate.admit(now).unwrap().is_empty() && gate.guests() == 0);
    while gate.guests() == 0 {
        assert!(now.elapsed() < HANG, "the gate does not go on");
        assert!(gate.admit(over).unwrap().is_empty());
    }
    thread::scope(|scope| {
        let rank = scope.spawn(|| call(&address, 2, secret()).unwrap());
        assert_eq!(first(&mut gate).hello, Some(hello(2)));
        drop(rank.join().unwrap());
    });
}

#[test]
fn who_does_not_know_the_secret_is_told_so() {
    for (mut gate, address) in [tcp_gate(), unix_gate()] {
        thread::scope(|scope| {
            let wrong = Some(Secret::new(*b"a secret that is another").unwrap());
            let (own, other) = (&address, &address);
            let strangers = [
                (scope.spawn(move || call(own, 1, wrong)), "does not know this job's secret"),
                (scope.spawn(move || call(other, 1, None)), "it has a secret"),
            ];
            let _right = scope.spawn(|| {
                thread::sleep(Duration::from_millis(50));
                call(&address, 3, secret()).unwrap()
            });
            assert_eq!(first(&mut gate).hello, Some(hello(3)));
            // The strangers may have been slower than the peer: let them finish.
            while strangers.iter().any(|(stranger, _)| !stranger.is_finished()) {
                assert!(gate.admit(Instant::now()).unwrap().is_empty());
            }
            for (stranger, part) in strangers {
                let error = stranger.join().unwrap().unwrap_err().to_string();
                assert!(error.contains(part), "{error}");
            }
        });
    }
}

/// Linux keeps users per thread, so a thread can have another user. That needs root.
#[test]
fn another_user_does_not_pass_although_it_knows_the_secret() {
    use rustix::{process::geteuid, thread::set_thread_res_uid};
    if !geteuid().is_root() {
        println!("SKIPPED: only root can be somebody else");
        return;
    }
    let nobody = rustix::process::Uid::from_raw(65_534);
    for as_nobody in [false, true] {
        let (mut gate, address) = unix_gate();
        thread::scope(|scope| {
            let address = &address;
            let caller = scope.spawn(move || {
                if as_nobody {
                    set_thread_res_uid(nobody, nobody, nobody).unwrap();
                }
                let deadline = Instant::now() + HANG;
                let expected = Expected { ranks: 0..1, world_size: 4, group: 11 };
                let nonce = Nonce::random().unwrap();
                let handshake = Handshake::call(hello(1), expected, secret(), nonce);
                let stream = open(address, deadline).unwrap();
                // Only the answerer checks users here, because the caller accepts a gate of root.
                shake_hands(stream, handshake, true, deadline).is_ok()
            });
            if as_nobody {
                while !caller.is_finished() {
                    assert!(gate.admit(Instant::now()).unwrap().is_empty());
                }
            } else {
                assert_eq!(first(&mut gate).hello, Some(hello(1)));
            }
            assert_eq!(caller.join().unwrap(), !as_nobody);
        });
    }
}

#[test]
fn a_slow_stranger_is_dropped_and_what_it_says_kept_nowhere() {
    let (mut gate, address) = tcp_gate();
    let Address::Tcp(socket) = address else { panic!("not TCP") };
    let mut silent = TcpStream::connect(socket).unwrap();
    let mut slow = TcpStream::connect(socket).unwrap();
    let greeting = hello(1).encode(Some(Level::Auth), &Nonce([0; 32]));
    let start = Instant::now();
    for (second, byte) in greeting.iter().enumerate().take(20) {
        slow.write_all(&[*byte]).unwrap();
        // The test sets the gate's clock: a byte comes every quarter of a second.
        let now = start + Duration::from_millis(250) * second as u32;
        sleep_until(&gate, PollFlags::IN, start + HANG);
        while gate.guests() < 2 && second == 0 {
            gate.admit(now).unwrap();
        }
        assert!(gate.admit(now).unwrap().is_empty());
    }
    let late = gate.deadline().unwrap() + Duration::from_millis(1);
    assert!(late > start + Duration::from_secs(4));
    assert!(gate.admit(late.max(start + Duration::from_secs(10))).unwrap().is_empty());
    assert_eq!(gate.guests(), 0);
    for stream in [&mut silent, &mut slow] {
        stream.set_read_timeout(Some(HANG)).unwrap();
        assert!(matches!(stream.read(&mut [0; 1]), Ok(0) | Err(_)));
    }
    assert_eq!(gate.deadline(), None);
}

/// `idle` connections that send nothing, and one that belongs here.
fn a_crowd_keeps_nobody_out(idle: usize) {
    let (mut gate, address) = tcp_gate();
    let Address::Tcp(socket) = address else { panic!("not TCP") };
    thread::scope(|scope| {
        let crowd = scope.spawn(move || -> Vec<TcpStream> {
            (0..idle).map(|_| TcpStream::connect(socket).unwrap()).collect()
        });
        let address = &address;
        let peer = scope.spawn(move || {
            // While the crowd is arriving.
            thread::sleep(Duration::from_millis(20));
            call(address, 1, secret()).unwrap()
        });
        assert_eq!(first(&mut gate).hello, Some(hello(1)));
        while !crowd.is_finished() {
            assert!(gate.admit(Instant::now()).unwrap().is_empty());
            assert!(gate.guests() <= GUESTS_MAX);
        }
        // When the whole crowd has arrived.
        let crowd = crowd.join().unwrap();
        let second = scope.spawn(move || call(address, 2, secret()).unwrap());
        assert_eq!(first(&mut gate).hello, Some(hello(2)));
        drop((crowd, peer.join().unwrap(), second.join().unwrap()));
    });
}

fn raise_descriptor_limit(wanted: u64) {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|current| current < wanted) {
        limit.current = Some(limit.maximum.map_or(wanted, |maximum| maximum.min(wanted)));
        setrlimit(Resource::Nofile, limit).unwrap();
    }
}

#[test]
fn a_thousand_idle_connections_keep_nobody_out() {
    raise_descriptor_limit(2048);
    a_crowd_keeps_nobody_out(1_000);
}

#[test]
#[ignore = "needs 12,000 descriptors and some seconds"]
fn ten_thousand_idle_connections_keep_nobody_out() {
    raise_descriptor_limit(12_000);
    a_crowd_keeps_nobody_out(10_000);
}

#[test]
fn silence_and_an_end_are_told_apart() {
    use std::io::{Error, ErrorKind};

    use super::stream::is_silence;
    assert!(is_silence(&Error::from_raw_os_error(110)), "ETIMEDOUT");
    assert!(is_silence(&Error::from_raw_os_error(113)), "EHOSTUNREACH");
    assert!(!is_silence(&ErrorKind::ConnectionReset.into()));
}

#[test]
fn an_address_is_free_again_and_a_caller_is_refused_although_a_fork_lives() {
    let (gate, address) = tcp_gate();
    let Address::Tcp(socket) = address else { panic!("not TCP") };
    let waits = open(&address, Instant::now() + HANG).unwrap();
    let fork = drumline_shm::fork_idle(60).unwrap();
    drop(gate);
    // Nothing listens any more, not even for the caller that was not accepted yet.
    sleep_until(&waits, PollFlags::IN, Instant::now() + HANG);
    assert!(matches!(open(&address, Instant::now() + HANG), Err(error) if
        error.kind() == std::io::ErrorKind::ConnectionRefused));
    drop(waits);
    Listener::tcp(socket).unwrap();
    rustix::process::kill_process(fork, rustix::process::Signal::KILL).unwrap();
    rustix::process::waitpid(Some(fork), rustix::process::WaitOptions::empty()).unwrap();
}

/// The kernel no longer knows the other end of a connection that was reset. It is not taken for a stranger's.
#[test]
fn a_connection_that_is_gone_is_nobody_elses() {
    let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = Address::Tcp(listener.local_addr().unwrap());
    let stream = open(&address, Instant::now() + HANG).unwrap();
    check_peer(&stream, false).unwrap();
    // The connection waits to be accepted, so the kernel resets it.
    drop(listener);
    sleep_until(&stream, PollFlags::IN, Instant::now() + HANG);
    let checked = check_peer(&stream, false);
    assert!(matches!(checked, Err(CallError::HungUp(_))), "{checked:?}");
}

/// As between two containers that share a network: neither has a number for the other's process.
#[test]
fn a_process_of_another_pid_namespace_is_known_by_its_user() {
    const MEET: &str = "DRUMLINE_TEST_MEET";
    const APART: [&str; 3] = ["--map-root-user", "--pid", "--fork"];
    if let Ok(name) = std::env::var(MEET) {
        let stream = open(&Address::Unix(name), Instant::now() + HANG).unwrap();
        check_peer(&stream, true).unwrap();
        assert_eq!(stream.peer(), "a process of this host");
        return;
    }
    if !Command::new("unshare").args(APART).arg("true").status().is_ok_and(|done| done.success()) {
        // Also where DRUMLINE_TEST_HOSTS is set: that asks for network namespaces.
        return eprintln!("skipped: unshare makes no namespaces of users and processes here");
    }
    let (_gate, address) = unix_gate();
    let Address::Unix(name) = address else { panic!("not a Unix socket") };
    let itself = "net::tests::a_process_of_another_pid_namespace_is_known_by_its_user";
    let mut there = Command::new("unshare");
    there.args(APART).arg(std::env::current_exe().unwrap()).args(["--exact", itself]);
    let done = there.env(MEET, name).output().unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
fn a_handshake_goes_on_when_a_full_socket_takes_more() {
    let (mut full, mut theirs) = UnixStream::pair().unwrap();
    full.set_nonblocking(true).unwrap();
    let mut filled = 0;
    while let Ok(bytes) = full.write(&[0; 4096]) {
        filled += bytes;
    }
    let expected = Expected { ranks: 0..1, world_size: 4, group: 11 };
    let mut handshake = Handshake::call(hello(1), expected, None, Nonce::random().unwrap());
    let greeting = handshake.output().to_vec();
    let mut stream = Stream::Unix(Unforked::open(|| Ok(full)).unwrap());
    assert!(!shake(&mut stream, &mut handshake).unwrap());
    assert_eq!(handshake.output(), greeting);

    theirs.read_exact(&mut vec![0; filled]).unwrap();
    assert!(say(&mut stream, &mut handshake).unwrap());
    let mut heard = vec![0; greeting.len()];
    theirs.read_exact(&mut heard).unwrap();
    assert_eq!(heard, greeting);
    drop(theirs);
    assert!(matches!(shake(&mut stream, &mut handshake), Err(CallError::HungUp(_))));
}

/// Otherwise callers would wait in vain for an end that neither reads nor writes.
#[test]
fn a_caller_that_cannot_be_heard_is_hung_up() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    theirs.shutdown(std::net::Shutdown::Read).unwrap();
    let expected = Expected { ranks: 0..1, world_size: 4, group: 11 };
    let mut handshake = Handshake::call(hello(1), expected, None, Nonce::random().unwrap());
    let result = shake(&mut Stream::Unix(Unforked::open(|| Ok(ours)).unwrap()), &mut handshake);
    assert!(matches!(result, Err(CallError::HungUp(_))), "{result:?}");
}
