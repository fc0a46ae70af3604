//! Segments between two processes, one of which sleeps, writes or is killed.
//!
//! The other process is this test program, started again for the test `other_process` alone. That
//! test finds its part and its parent's address in the environment.

use std::env;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use drumline_kernels::copy;
use drumline_shm::{
    Announcement, Credentials, Parity, PeerSegment, PidFd, Segment, SegmentSize, SpinLimit,
    handover, spin, spin_limit,
};
use rustix::event::{PollFd, PollFlags, poll};

use crate::LONG;

const SIZE: SegmentSize = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// One of two processes.
struct Rank {
    own: Segment,
    peer: PeerSegment,
    stream: UnixStream,
}

impl Rank {
    fn meet(stream: UnixStream) -> Rank {
        let own = Segment::create(SIZE).unwrap();
        handover::send(&stream, &own.handles().unwrap(), deadline()).unwrap();
        let peer = PeerSegment::map(handover::receive(&stream, deadline()).unwrap()).unwrap();
        Rank { own, peer, stream }
    }

    fn post(&self) {
        let count = self.own.posted() + 1;
        self.own.post_and_wake(Parity::of(count), [&self.peer]);
    }

    /// Announces a number for the next post.
    fn announce(&self, number: u64) {
        let announcement = Announcement { digest: number, place: !number };
        let mut description = [0; 64];
        description[..8].copy_from_slice(&number.to_ne_bytes());
        self.own.announce(Parity::of(self.own.posted() + 1), announcement, &description);
    }

    /// The number that the peer announced for its `count`th post, which it has made.
    fn announced(&self, count: u64) -> u64 {
        let parity = Parity::of(count);
        let Announcement { digest, place } = self.peer.announcement(parity);
        let description = self.peer.description(parity);
        assert_eq!((place, &description[..8]), (!digest, &digest.to_ne_bytes()[..]));
        digest
    }

    /// Waits until the peer has posted `count` times: spins up to `limit`, then sleeps.
    fn await_post(&self, count: u64, limit: SpinLimit) {
        let posted = || self.peer.last_posted() >= count;
        while !spin(limit, posted, || true) {
            let asleep = self.own.prepare_sleep();
            if !posted() {
                let mut wakers =
                    [PollFd::new(&asleep, PollFlags::IN), PollFd::new(&self.stream, PollFlags::IN)];
                let woken = poll(&mut wakers, Some(&LONG)).unwrap();
                assert!(woken > 0, "a wake-up was lost: {} of {count}", self.peer.last_posted());
                assert!(wakers[1].revents().is_empty(), "the peer has ended");
            }
        }
    }

    /// Waits until the peer has closed its socket.
    fn hung_up(&self) {
        let mut socket = [PollFd::new(&self.stream, PollFlags::IN)];
        assert_eq!(poll(&mut socket, Some(&LONG)).unwrap(), 1);
    }
}

/// Starts the other process with `part` and waits until it connects.
fn start(part: &str) -> (Child, UnixStream) {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let name = format!("drumline-shm-test-{}-{number}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let listener = UnixListener::bind_addr(&address).unwrap();
    let child = Command::new(env::current_exe().unwrap())
        .args(["processes::other_process", "--exact", "--ignored", "--nocapture"])
        .envs([("TEST_PART", part), ("TEST_ADDRESS", &name)])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    assert_eq!(poll(&mut [PollFd::new(&listener, PollFlags::IN)], Some(&LONG)).unwrap(), 1);
    (child, listener.accept().unwrap().0)
}

fn assert_ended_well(mut child: Child) {
    assert!(child.wait().unwrap().success(), "the other process failed");
}

const AWAKE: SpinLimit = SpinLimit { looks: u32::MAX, yields: 0 };
const AT_ONCE: SpinLimit = SpinLimit { looks: 0, yields: 0 };

/// Limits of spinning, one for each round. They depend on `seed` alone; some say to sleep at once.
fn limits(seed: u64, spinning: SpinLimit) -> impl FnMut() -> SpinLimit {
    let mut state = seed;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let looks = (state >> 32) as u32 % (2 * spinning.looks);
        if state.is_multiple_of(8) { AT_ONCE } else { SpinLimit { looks, ..spinning } }
    }
}

#[test]
#[ignore = "started by the other tests"]
fn other_process() {
    let name = env::var("TEST_ADDRESS").expect("the other tests start this one");
    let address = SocketAddr::from_abstract_name(name).unwrap();
    let stream = UnixStream::connect_addr(&address).unwrap();
    let part = env::var("TEST_PART").unwrap();
    match part.split_once(' ').unwrap_or((&part, "")) {
        ("answer", rounds) => {
            let rank = Rank::meet(stream);
            let mut limit = limits(88_172_645_463_325_252, spin_limit(2));
            for round in 1..=rounds.parse().unwrap() {
                rank.await_post(round, limit());
                rank.announce(rank.announced(round));
                rank.post();
            }
            rank.hung_up();
        }
        ("sleep", _) => {
            let rank = Rank::meet(stream);
            let asleep = rank.own.prepare_sleep();
            rank.post();
            let mut wakers = [PollFd::new(&asleep, PollFlags::IN)];
            poll(&mut wakers, Some(&LONG)).unwrap();
            panic!("this process should not wake");
        }
        // Keeps writing to the parent's buffer, also after the parent has detached it.
        ("scribble", _) => {
            let rank = Rank::meet(stream);
            rank.await_post(1, AT_ONCE);
            let offset = rank.announced(1) as usize;
            for turn in 1_i64.. {
                copy(rank.peer.arena(offset, 5000).unwrap(), (&[turn; 5000][..]).into());
                rank.own.post(Parity::Even);
                if rank.peer.last_posted() == 2 {
                    break;
                }
            }
        }
        ("small-files", _) => {
            let limit = rustix::process::Rlimit { current: Some(1 << 20), maximum: None };
            rustix::process::setrlimit(rustix::process::Resource::Fsize, limit).unwrap();
            let refused = Segment::create(SIZE).unwrap_err().to_string();
            assert!(refused.contains("ulimit -f"), "{refused}");
        }
        ("crash", directory) => {
            use rustix::process::{Resource, Rlimit, Signal, getpid, kill_process, setrlimit};
            env::set_current_dir(directory).unwrap();
            setrlimit(Resource::Core, Rlimit { current: None, maximum: None }).unwrap();
            // The kernel takes a while to write it.
            let memory = std::hint::black_box(vec![7_u8; 256 << 20]);
            kill_process(getpid(), Signal::ABORT).unwrap(); // Rust handles SIGSEGV
            drop((memory, stream));
        }
        (other, _) => panic!("no part {other:?}"),
    }
}

/// Plays ping-pong. In each round, both sides choose at random whether to spin or to sleep.
fn ping_pong(rounds: u64) {
    let (child, stream) = start(&format!("answer {rounds}"));
    let rank = Rank::meet(stream);
    let mut limit = limits(3_141_592_653_589_793, spin_limit(2));
    let mut slept = 0_u64;
    let began = Instant::now();
    for round in 1..=rounds {
        rank.announce(round << 40);
        rank.post();
        let limit = limit();
        slept += u64::from(limit == AT_ONCE);
        rank.await_post(round, limit);
        assert_eq!(rank.announced(round), round << 40);
    }
    let each_us = began.elapsed().as_secs_f64() * 1e6 / rounds as f64;
    println!("{rounds} rounds, {slept} of them without spinning: {each_us:.2} us each");
    assert_eq!(rank.peer.last_posted(), rounds);
    drop(rank);
    assert_ended_well(child);
}

#[test]
fn no_wake_up_is_lost_between_processes() {
    ping_pong(20_000);
}

#[test]
#[ignore = "takes minutes: cargo test -p drumline-shm --test segments a_million -- --ignored"]
fn a_million_rounds_lose_no_wake_up() {
    ping_pong(1_000_000);
}

#[test]
fn a_killed_sleeper_is_noticed_in_the_same_poll() {
    let (mut child, stream) = start("sleep");
    let process = PidFd::of_peer(&stream).unwrap();
    let rank = Rank::meet(stream);
    rank.await_post(1, AT_ONCE);
    assert!(!process.has_exited().unwrap());
    assert_eq!(Credentials::of_peer(&rank.stream).unwrap().pid, Some(child.id()));

    let asleep = rank.own.prepare_sleep();
    child.kill().unwrap();
    let mut wakers = [PollFd::new(&asleep, PollFlags::IN), PollFd::new(&process, PollFlags::IN)];
    assert_eq!(poll(&mut wakers, Some(&LONG)).unwrap(), 1);
    assert!(wakers[0].revents().is_empty());
    assert!(process.has_exited().unwrap());
    drop(asleep);

    // By its line the dead peer still sleeps. Ringing its doorbell is harmless.
    rank.post();
    child.wait().unwrap();
    assert!(process.has_exited().unwrap(), "also after it was reaped");
    rank.post();
    assert_eq!(rank.peer.last_posted(), 1);
    copy(rank.peer.slot_mut(Parity::Even, 0..4).unwrap(), (&[1_u8; 4][..]).into());
}

#[test]
fn a_process_that_crashes_is_seen_while_its_core_is_written() {
    if std::fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap().trim_end() != "core" {
        return eprintln!("skipped: core files go elsewhere");
    }
    let directory = tempfile::tempdir().unwrap();
    let (mut child, stream) = start(&format!("crash {}", directory.path().display()));
    let process = PidFd::of_peer(&stream).unwrap();
    while !process.dumps_core() {
        assert!(!process.has_exited().unwrap(), "its end came first");
    }
    child.wait().unwrap();
    assert!(!process.dumps_core());
}

#[test]
fn a_slow_process_cannot_write_to_a_detached_buffer() {
    let (child, stream) = start("scribble");
    let rank = Rank::meet(stream);
    let buffer = rank.own.arena().allocate::<i64>(5000).unwrap();
    rank.announce(rank.own.arena().offset_of(&buffer).unwrap() as u64);
    rank.post();

    while rank.peer.last_posted() < 100 {
        rank.await_post(rank.peer.last_posted() + 1, AWAKE);
    }
    rank.own.arena().detach(&buffer).unwrap();
    let taken_back = buffer.to_vec();
    assert!(taken_back.iter().all(|value| *value >= 1), "what was written before is gone");
    rank.await_post(rank.peer.last_posted() + 100, AWAKE);
    assert_eq!(*buffer, taken_back, "a late write came through");
    rank.post();
    assert_ended_well(child);
    assert_eq!(*buffer, taken_back);
}

#[test]
fn a_file_size_limit_is_an_error_not_a_signal() {
    assert_ended_well(start("small-files").0);
}

#[test]
fn latency_is_printed() {
    const ROUNDS: u64 = 20_000;
    let (child, stream) = start(&format!("answer {ROUNDS}"));
    let rank = Rank::meet(stream);
    let limit = spin_limit(2);
    let mut times_ns: Vec<u128> = (1..=ROUNDS)
        .map(|round| {
            let began = Instant::now();
            rank.announce(round);
            rank.post();
            rank.await_post(round, limit);
            assert_eq!(rank.announced(round), round);
            began.elapsed().as_nanos() / 2
        })
        .collect();
    times_ns.sort_unstable();
    let at = |percent: usize| times_ns[times_ns.len() * percent / 100];
    println!("one way: median {} ns, 10 % {} ns, 90 % {} ns", at(50), at(10), at(90));
    drop(rank);
    assert_ended_well(child);
}
