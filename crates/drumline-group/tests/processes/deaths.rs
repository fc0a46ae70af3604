//! Ranks that are killed or stopped, as real processes: who is blamed, how fast, what is left.
//!
//! The ranks are this test program again, with `DEATHS_RANK` in the environment.

use std::{
    collections::BTreeSet,
    env,
    ffi::OsString,
    fs,
    io::{BufRead, BufReader},
    process::{Child, ChildStdout, Stdio},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use drumline_group::{
    Config, ErrorKind, ProcessGroup, ReduceOp,
    auth::Secret,
    rendezvous::Endpoint,
    store::{
        Store,
        tcp::{TcpStore, TcpStoreServer},
    },
};
use drumline_testing::{itself, now_us};
use rustix::process::{Pid, Signal, kill_process};

const WORLD: usize = 4;

/// One job at a time, so that what is left over belongs to the test that looks.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn one_at_a_time() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a rank does: works until something fails, and tells what.
#[test]
fn rank_process() {
    let Ok(rank) = env::var("DEATHS_RANK") else { return };
    let rank: usize = rank.parse().unwrap();
    let variable = |name: &str| env::var(name).unwrap();
    tracing_to_stdout();
    let secret = Secret::new(variable("DEATHS_SECRET")).unwrap();
    let endpoint = Endpoint::Unix(variable("DEATHS_STORE"));
    let store = TcpStore::connect_secured(&endpoint, &secret, Duration::from_secs(60)).unwrap();
    let config = Config::default()
        .timeout(Duration::from_millis(variable("DEATHS_TIMEOUT_MS").parse().unwrap()))
        // Long enough for peers to say that they wait, on a busy machine.
        .warn_after(Duration::from_secs(2))
        .shared_memory(variable("DEATHS_OVER") == "shared")
        .unix_sockets(variable("DEATHS_OVER") != "tcp")
        .secret(secret);
    let patient = config.clone().timeout(Duration::from_secs(60));
    let store: Arc<dyn Store> = Arc::new(store);
    // Start-up is not what is tried here.
    let meeting =
        drumline_group::rendezvous::connect("meeting", store.clone(), rank, WORLD, &patient)
            .unwrap();
    let group = drumline_group::rendezvous::connect("world", store, rank, WORLD, &config).unwrap();
    meeting.barrier().unwrap();
    let mut registered = group.alloc_registered::<f32>(300_000).unwrap();
    if env::var_os("DEATHS_FORKS").is_some() {
        // Ranks are connected once they have called each other.
        work(&group, &mut registered, 0).unwrap();
        println!("forked {}", drumline_shm::fork_idle(300).unwrap().as_raw_nonzero());
    }
    println!("ready");

    let rounds: usize = variable("DEATHS_ROUNDS").parse().unwrap();
    for round in 0..rounds {
        let result = work(&group, &mut registered, round);
        if let Err(error) = result {
            assert_eq!(error.kind(), ErrorKind::Collective, "{error}");
            let culprit = error.culprit().map_or(-1, |rank| rank as i64);
            println!("failed {} {culprit} {error}", now_us());
            // Whoever is late must not change what has been given back.
            registered.fill(7.0);
            thread::sleep(Duration::from_millis(variable("DEATHS_LINGER_MS").parse().unwrap()));
            assert!(registered.iter().all(|value| *value == 7.0), "a late rank has written here");
            println!("untouched");
            return;
        }
    }
    println!("done {}", now_us());
    drop(meeting);
    group.destroy().unwrap();
}

/// One round of calls of all kinds; checks the sums.
fn work(
    group: &ProcessGroup,
    registered: &mut drumline_group::RegisteredBuffer<f32>,
    round: usize,
) -> drumline_group::Result<()> {
    let expected = (WORLD * (WORLD + 1) / 2) as f32;
    let own = (group.rank() + 1) as f32;
    registered.fill(own);
    group.all_reduce(registered, ReduceOp::Sum)?;
    assert_all(registered, expected, "registered", round);

    let mut small = vec![own; 1 + round % 5000];
    group.all_reduce(&mut small, ReduceOp::Sum)?;
    assert_all(&small, expected, "small", round);

    let works: Vec<_> =
        (0..3).map(|_| group.all_reduce_async(vec![own; 2000], ReduceOp::Sum).unwrap()).collect();
    for work in works {
        assert!(work.wait()?.iter().all(|value: &f32| *value == expected));
    }
    let mut gathered = vec![0_u8; WORLD];
    group.all_gather(&[group.rank() as u8], &mut gathered)?;
    assert_eq!(gathered, [0, 1, 2, 3]);
    group.broadcast(&mut small, round % WORLD)
}

fn assert_all(values: &[f32], expected: f32, what: &str, round: usize) {
    if let Some(index) = values.iter().position(|value| *value != expected) {
        let wrong = values.iter().filter(|value| **value != expected).count();
        let value = values[index];
        panic!("{what}, round {round}: {wrong} wrong, the first at {index}: {value}");
    }
}

/// Warnings go to the parent, too.
fn tracing_to_stdout() {
    struct Lines;
    impl std::io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            print!("{}", String::from_utf8_lossy(bytes));
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::WARN)
        .with_ansi(false)
        .with_writer(|| Lines)
        .init();
}

struct Job {
    ranks: Vec<(Child, BufReader<ChildStdout>)>,
    forks: Vec<Pid>,
    _server: TcpStoreServer,
}

#[derive(Clone, Copy)]
struct Settings {
    over: &'static str,
    /// Whether each rank forks a child, which does nothing and outlives it.
    forks: bool,
    timeout_ms: u64,
    linger_ms: u64,
    rounds: usize,
}

impl Job {
    fn start(number: usize, settings: Settings) -> Job {
        let secret = "a secret of this test only";
        let name = format!("deaths-{}-{}-{number}", std::process::id(), settings.over);
        let endpoint = Endpoint::Unix(name.clone());
        let server =
            TcpStoreServer::bind_secured(&endpoint, &Secret::new(secret).unwrap()).unwrap();
        let mut ranks: Vec<_> = (0..WORLD)
            .map(|rank| {
                let mut command = itself("deaths::rank_process");
                if settings.forks {
                    command.env("DEATHS_FORKS", "1");
                }
                let mut child = command
                    .env("DEATHS_RANK", rank.to_string())
                    .env("DEATHS_STORE", &name)
                    .env("DEATHS_SECRET", secret)
                    .env("DEATHS_OVER", settings.over)
                    .env("DEATHS_TIMEOUT_MS", settings.timeout_ms.to_string())
                    .env("DEATHS_LINGER_MS", settings.linger_ms.to_string())
                    .env("DEATHS_ROUNDS", settings.rounds.to_string())
                    .stdout(Stdio::piped())
                    .stdin(Stdio::null())
                    .spawn()
                    .unwrap();
                let output = BufReader::new(child.stdout.take().unwrap());
                (child, output)
            })
            .collect();
        let mut forks = Vec::new();
        for (_, output) in &mut ranks {
            if settings.forks {
                let told = next_line(output, "forked ");
                let (_, number) = told.split_once("forked ").unwrap();
                forks.extend(Pid::from_raw(number.trim().parse().unwrap()));
            }
            next_line(output, "ready");
        }
        Job { ranks, forks, _server: server }
    }

    fn signal(&self, rank: usize, signal: Signal) {
        let pid = Pid::from_child(&self.ranks[rank].0);
        kill_process(pid, signal).unwrap();
    }

    fn line(&mut self, rank: usize, word: &str) -> String {
        next_line(&mut self.ranks[rank].1, word)
    }

    fn end(mut self) {
        for fork in self.forks.drain(..) {
            kill_process(fork, Signal::KILL).expect("a fork has ended with its parent");
        }
        for (child, _) in &mut self.ranks {
            let _ = child.kill();
            child.wait().unwrap();
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for fork in self.forks.drain(..) {
            let _ = kill_process(fork, Signal::KILL);
        }
        for (child, _) in &mut self.ranks {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The next line that contains `word`.
fn next_line(output: &mut impl BufRead, word: &str) -> String {
    let mut seen = String::new();
    loop {
        let mut line = String::new();
        let bytes = output.read_line(&mut line).unwrap();
        assert!(bytes > 0, "a rank ended without saying {word:?}; it said:\n{seen}");
        if line.contains(word) {
            return line;
        }
        seen.push_str(&line);
    }
}

fn random(seed: usize) -> usize {
    let mut x = (seed as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x ^= x >> 29;
    (x.wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 33) as usize
}

/// Over what ranks talk, and whether each has forked a child.
const WAYS: [(&str, bool); 4] = [("shared", false), ("unix", false), ("tcp", false), ("tcp", true)];

/// To tell a hang from a busy machine; the time limit of the calls is 60 s.
const NAMED_WITHIN_US: i64 = 20_000_000;

/// Kills one of the ranks at a random moment, so many times. Prints how long it took until each survivor
/// named it.
fn kill_and_listen((over, forks): (&'static str, bool), times: usize) {
    let files_before = files_in_shm();
    let mut delays = Vec::new();
    for number in 0..times {
        let settings =
            Settings { over, forks, timeout_ms: 60_000, linger_ms: 0, rounds: usize::MAX };
        let mut job = Job::start(number, settings);
        let victim = random(number) % WORLD;
        thread::sleep(Duration::from_micros((random(number + 7919) % 60_000) as u64));
        let killed = now_us();
        job.signal(victim, Signal::KILL);
        for survivor in (0..WORLD).filter(|rank| *rank != victim) {
            let line = job.line(survivor, "failed ");
            let mut words = line.split(' ').skip_while(|word| *word != "failed").skip(1);
            let at: i64 = words.next().unwrap().parse().unwrap();
            let culprit = words.next().unwrap();
            assert_eq!(culprit, victim.to_string(), "rank {survivor} says: {line}");
            delays.push(at - killed);
        }
        job.end();
    }
    assert_nothing_is_left(&files_before);
    delays.sort_unstable();
    let (median, worst) = (delays[delays.len() / 2], delays[delays.len() - 1]);
    println!(
        "{over}{}: {times} kills, {} survivors named the right rank; median {:.1} ms, worst {:.1} ms",
        if forks { " with forks" } else { "" },
        delays.len(),
        median as f64 / 1e3,
        worst as f64 / 1e3
    );
    assert!(worst < NAMED_WITHIN_US, "{worst} us");
}

/// No file, socket or process of a job of this test program is left; so no segment either, since it has
/// no name and goes with the last process that has it.
fn assert_nothing_is_left(files_before: &BTreeSet<OsString>) {
    let own = format!("deaths-{}-", std::process::id());
    let until = Instant::now() + Duration::from_secs(20);
    // What was killed takes a moment to go.
    let mut left = what_is_left(&own);
    while !left.is_empty() && Instant::now() < until {
        thread::sleep(Duration::from_millis(10));
        left = what_is_left(&own);
    }
    assert!(left.is_empty(), "left: {left:?}");
    // What the fuzzer keeps there while it runs is not ours.
    let is_ours = |name: &OsString| {
        let name = name.to_string_lossy();
        name.contains("drumline") && !name.starts_with("drumline-fuzz-")
    };
    let files = files_in_shm();
    let new: Vec<_> = files.difference(files_before).filter(|name| is_ours(name)).collect();
    assert!(new.is_empty(), "files are left in /dev/shm: {new:?}");
}

/// Sockets named `own`, and processes that have it in their environment, as ranks and their forks do.
fn what_is_left(own: &str) -> Vec<String> {
    let sockets = fs::read_to_string("/proc/net/unix").unwrap();
    let sockets = sockets.lines().filter(|line| line.contains(own)).map(str::to_owned);
    let processes = fs::read_dir("/proc").unwrap().flatten().filter_map(|process| {
        let environment = fs::read(process.path().join("environ")).ok()?;
        let is_ours = environment.windows(own.len()).any(|part| part == own.as_bytes());
        is_ours.then(|| process.path().display().to_string())
    });
    sockets.chain(processes).collect()
}

fn files_in_shm() -> BTreeSet<OsString> {
    let files = fs::read_dir("/dev/shm");
    files.map(|files| files.flatten().map(|file| file.file_name()).collect()).unwrap_or_default()
}

#[test]
#[cfg_attr(feature = "soak", ignore = "the soak kills more often")]
fn survivors_name_the_rank_that_was_killed() {
    let _guard = one_at_a_time();
    for way in WAYS {
        kill_and_listen(way, 4);
    }
}

#[test]
#[cfg(feature = "soak")]
fn survivors_name_the_rank_that_was_killed_a_thousand_times() {
    let _guard = one_at_a_time();
    for way in WAYS {
        kill_and_listen(way, 250);
    }
}

/// Stopped, then continued in time: a warning names it, and all sums are right.
#[test]
fn a_rank_that_is_stopped_for_a_while_is_warned_of_and_waited_for() {
    let _guard = one_at_a_time();
    for over in ["shared", "tcp"] {
        let settings =
            Settings { over, forks: false, timeout_ms: 60_000, linger_ms: 0, rounds: 60 };
        let mut job = Job::start(1000, settings);
        job.signal(2, Signal::STOP);
        for rank in [0, 1, 3] {
            let warning = job.line(rank, "has been waiting");
            assert!(warning.contains("late=[2]"), "{warning}");
        }
        job.signal(2, Signal::CONT);
        for (child, _) in &mut job.ranks {
            assert!(child.wait().unwrap().success(), "a rank failed; look at its output above");
        }
    }
}

/// Stopped beyond the deadline: an error names it, and when it goes on it harms nothing.
#[test]
fn a_rank_that_is_stopped_too_long_is_named_and_can_harm_nothing_afterwards() {
    let _guard = one_at_a_time();
    for over in ["shared", "tcp"] {
        let settings = Settings {
            over,
            forks: false,
            timeout_ms: 3_000,
            linger_ms: 1_500,
            rounds: usize::MAX,
        };
        let mut job = Job::start(2000, settings);
        job.signal(2, Signal::STOP);
        for rank in [0, 1, 3] {
            let line = job.line(rank, "failed ");
            assert!(line.contains("an answer from rank 2;"), "{line}");
        }
        job.signal(2, Signal::CONT);
        for rank in [0, 1, 3] {
            job.line(rank, "untouched");
        }
        let told = job.line(2, "failed ");
        assert!(told.contains("reports"), "it should hear that it is late: {told}");
    }
}
