//! Launcher and keepers are killed and stopped, alone and together, while ranks start, run, start again and end: no rank is
//! left, and no two worlds run at once.

use std::{
    fs,
    io::Read,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use drumline_testing::network::skip;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::{
    hosts::{Meeting, Town, summing},
    launch::{Launch, Started, eventually, is_anyone_marked},
};

/// The launcher, and the keepers below it, the last of which is the parent of the ranks.
const CHAIN: usize = 4;

/// Those of the chain that are there.
fn chain(launcher: &Started) -> Vec<Pid> {
    let mut chain: Vec<Pid> = launcher.pid().into_iter().collect();
    while let Some(last) = chain.last().filter(|_| chain.len() < CHAIN) {
        let last = last.as_raw_pid();
        let children = fs::read_to_string(format!("/proc/{last}/task/{last}/children"));
        let child = children.unwrap_or_default().split_whitespace().next().map(str::to_owned);
        let Some(child) = child.and_then(|it| Pid::from_raw(it.parse().ok()?)) else { break };
        chain.push(child);
    }
    chain
}

fn send(signal: Signal, to: &[Pid]) {
    // Who has ended meanwhile needs no signal.
    for pid in to {
        let _ = kill_process(*pid, signal);
    }
}

/// The processes of `chain` whose bit is set.
fn some(chain: &[Pid], bits: u64) -> Vec<Pid> {
    let is_in = |at: &usize| bits >> at & 1 == 1;
    (0..chain.len()).filter(is_in).map(|at| chain[at]).collect()
}

/// Whoever of launcher and keepers is killed at once, and whichever of the others is stopped then. What ranks have started
/// ends, too, unless nobody is left to end it.
#[test]
fn nothing_outlives_launcher_and_keepers_that_are_killed_at_once() {
    const ALL: u64 = (1 << CHAIN) - 1;
    let escape = "(setsid sh -c 'echo away; exec sleep 1003' &)";
    // Of the launcher alone another test tells.
    let cases = [(0b0010, 0), (0b0100, 0), (0b1001, 0), (0b0111, 0), (0b1101, 0), (0b1110, 0)];
    let cases = cases.into_iter().chain([(0b0001, 0b0010), (0b0001, 0b1000), (0b1001, 0b0100)]);
    let cases: Vec<(u64, u64)> = cases.chain([(ALL, 0)]).collect();
    let run = |&(killed, stopped): &(u64, u64)| {
        let (starts, count) = if killed == ALL { ("echo away", 2) } else { (escape, 2) };
        let mut launch = Launch::script(2, &format!("{starts}; exec sleep 1000"));
        launch.wait_for("away", count);
        let chain = chain(&launch);
        assert_eq!(chain.len(), CHAIN);
        let stopped = some(&chain, stopped);
        send(Signal::STOP, &stopped);
        send(Signal::KILL, &some(&chain, killed));
        let marker = launch.marker.clone();
        let own = |pid: &Pid| stopped.contains(pid);
        eventually("no rank is left", || !is_marked_but(&marker, own));
        send(Signal::CONT, &stopped);
        launch.wait();
        eventually("no process is left", || !is_anyone_marked(&marker));
    };
    thread::scope(|scope| cases.iter().for_each(|case| drop(scope.spawn(move || run(case)))));
}

/// The launcher does not wait for a keeper that is stopped.
#[test]
fn a_keeper_that_is_stopped_is_told_of_and_nothing_goes_on() {
    let mut launch = Launch::script(2, "echo ready; exec sleep 1000");
    launch.wait_for("ready", 2);
    let keeper = chain(&launch)[CHAIN - 1];
    send(Signal::STOP, &[keeper]);
    let ended = launch.end();
    assert_eq!(ended.code, 1, "{}", ended.stderr);
    assert!(
        ended.stderr.contains(&format!("keeper (pid {keeper}) is stopped")),
        "{}",
        ended.stderr
    );
}

/// The ranks of a host whose launcher and keepers are all stopped: they have a guard of their own.
#[test]
fn ranks_end_by_themselves_if_launcher_and_keepers_are_stopped_and_the_lease_runs_out() {
    let Some(town) = Town::of(2) else { return };
    let meeting = town.meeting("2", "file", town.shared.path().join("job").to_str().unwrap());
    let start = |host| summing(&meeting, host, &[]).variable("HOSTS_TEST_SUM", "stays").start();
    let mut hosts = [0, 1].map(start);
    hosts.iter_mut().for_each(|host| host.wait_for("late sum 10", 2));
    let chain = chain(&hosts[1]);
    assert_eq!(chain.len(), CHAIN);
    send(Signal::STOP, &chain);
    let (marker, own) = (hosts[1].marker.clone(), |pid: &Pid| chain.contains(pid));
    let nsenter = Pid::from_child(&hosts[1].child);
    eventually("no rank is left", || !is_marked_but(&marker, |pid| own(pid) || *pid == nsenter));
    send(Signal::CONT, &chain);
    hosts[1].signal(Signal::CONT);
    hosts.iter().for_each(|host| host.signal(Signal::TERM));
    for mut host in hosts {
        host.wait();
        eventually("no process is left", || !is_anyone_marked(&host.marker));
    }
}

/// Traces a process until its input ends.
const DEBUGGER: &str = "import ctypes, sys
PTRACE_SEIZE = 0x4206
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
if ptrace(PTRACE_SEIZE, int(sys.argv[1]), None, None):
    sys.exit(f'no trace: errno {ctypes.get_errno()}')
print('traced', flush=True)
sys.stdin.read()";

/// The kernel shows that such a rank has ended, and not yet how. Its keeper waits for that, and sleeps.
#[test]
fn a_rank_that_ends_under_a_debugger_keeps_no_core_busy_and_is_told_of_later() {
    // Traced, it would stop at each signal, such as that of the end of a child.
    let mut launch = Launch::script(1, "mkfifo go; echo rank $$; read line <go; exit 3");
    launch.wait_for("\n", 1);
    let printed = String::from_utf8_lossy(&launch.printed).into_owned();
    let rank: i32 = printed.split_whitespace().last().unwrap().parse().unwrap();
    let keeper = chain(&launch)[CHAIN - 1];
    let mut debugger = Command::new("python3")
        .args(["-S", "-c", DEBUGGER, &rank.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut told = [0; 7];
    if debugger.stdout.take().unwrap().read_exact(&mut told).is_err() {
        assert!(!debugger.wait().unwrap().success());
        return skip("no process may be traced here");
    }
    let go = launch.directory.path().join("go");
    fs::write(&go, "\n").unwrap();
    fs::remove_file(go).unwrap();
    let state = |pid: i32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        stat.rsplit_once(") ").unwrap().1.chars().next().unwrap()
    };
    eventually("the rank has ended", || state(rank) == 'Z');
    eventually("the keeper sleeps", || {
        let mut looks = 0..20;
        looks.all(|_| {
            thread::sleep(Duration::from_millis(5));
            state(keeper.as_raw_pid()) == 'S'
        })
    });
    assert!(launch.is_running());
    drop(debugger.stdin.take());
    assert!(debugger.wait().unwrap().success());
    let ended = launch.end();
    assert_eq!(ended.code, 3, "{}", ended.stderr);
}

/// A rank that no library of ours helps. It writes down when it runs, and in which world.
const RANK: &str = "import os, sys, time
ends = float(sys.argv[2]) + time.monotonic()
journal = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
while time.monotonic() < ends:
    os.write(journal, f'{time.monotonic_ns()} {os.environ[\"DRUMLINE_STORE\"]}\\n'.encode())
    time.sleep(0.01)
os._exit(int(sys.argv[3]))";

/// Two hosts. On one of them some of launcher and keepers are killed, or stopped for a while.
fn history(town: &Town, seed: u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let journal = TempDir::new_in(town.shared.path()).unwrap();
    let file = |name: &str| journal.path().join(name).to_str().unwrap().to_owned();
    fs::write(file("journal"), "").unwrap();
    let meeting: Meeting<'_> = town.meeting("1:2", "file", &file("meeting"));
    // They run until they are ended, or fail, or succeed.
    let (lasts, code) = [("1000", "0"), ("1.5", "1"), ("2.5", "0")][rng.usize(0..3)];
    let journal = file("journal");
    let arguments = ["--max-restarts", "3", "--no-python", "python3", "-S", "-c", RANK];
    let arguments: Vec<&str> = arguments.into_iter().chain([&*journal, lasts, code]).collect();
    let mut hosts = [0, 1].map(|host| meeting.host(host, &arguments).start());
    thread::sleep(Duration::from_millis(rng.u64(0..3_000)));

    let hit = rng.usize(0..2);
    let chain = chain(&hosts[hit]);
    let all = (1 << CHAIN) - 1;
    let bits = rng.u64(1..all);
    let chosen = some(&chain, bits);
    if rng.bool() {
        // If all are killed, the kernel kills the ranks.
        let chosen = if rng.u8(0..4) == 0 { chain } else { chosen };
        send(Signal::KILL, &chosen);
    } else {
        send(Signal::STOP, &chosen);
        thread::sleep(Duration::from_millis(rng.u64(500..6_000)));
        send(Signal::CONT, &chosen);
        // `nsenter` stops with the launcher, and does not go on with it.
        hosts[hit].signal(Signal::CONT);
    }
    thread::sleep(Duration::from_millis(rng.u64(0..5_000)));
    for host in &mut hosts {
        host.signal(Signal::TERM);
    }
    for host in &mut hosts {
        host.wait();
        eventually("no process is left", || !is_anyone_marked(&host.marker));
    }

    let journal = fs::read_to_string(&journal).unwrap();
    let mut worlds: Vec<(&str, u64, u64)> = Vec::new();
    for line in journal.lines() {
        let (time, world) = line.split_once(' ').unwrap();
        let time: u64 = time.parse().unwrap();
        match worlds.iter_mut().find(|(known, ..)| *known == world) {
            Some((_, first, last)) => (*first, *last) = (time.min(*first), time.max(*last)),
            None => worlds.push((world, time, time)),
        }
    }
    worlds.sort_by_key(|(_, first, _)| *first);
    for pair in worlds.windows(2) {
        assert!(pair[0].2 < pair[1].1, "seed {seed}: two worlds at once: {worlds:?}");
    }
}

fn histories(seeds: std::ops::Range<u64>, at_once: u64) {
    let Some(town) = Town::of(2) else { return };
    let town = &town;
    thread::scope(|scope| {
        for first in 0..at_once.min(seeds.end) {
            let seeds = seeds.clone();
            scope.spawn(move || {
                for seed in seeds.skip(first as usize).step_by(at_once as usize) {
                    history(town, seed);
                }
            });
        }
    });
}

#[test]
fn two_worlds_never_run_at_once_whoever_is_killed_or_stopped() {
    histories(0..4, 4);
}

#[test]
#[ignore = "takes minutes: make soak"]
fn two_worlds_never_run_at_once_whoever_is_killed_or_stopped_five_hundred_times() {
    histories(0..500, 12);
}

/// Whether a living process has `marker` in its environment, but for some.
fn is_marked_but(marker: &str, but: impl Fn(&Pid) -> bool) -> bool {
    let numbers = fs::read_dir("/proc").unwrap().flatten();
    let pids = numbers.filter_map(|it| Pid::from_raw(it.file_name().to_str()?.parse().ok()?));
    let mut environments = pids
        .filter(|pid| !but(pid))
        .filter_map(|pid| fs::read(format!("/proc/{pid}/environ")).ok());
    environments.any(|text| text.split(|&byte| byte == 0).any(|it| it == marker.as_bytes()))
}
