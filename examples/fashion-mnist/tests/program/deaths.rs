//! Ranks that die in a training with shards: the others end it with the bits of an undisturbed one.

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    path::Path,
    process::{Child, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use drumline_testing::network::{self, Family, Network};
use rustix::process::{Signal, kill_process};
use tempfile::TempDir;

use crate::resume::{HANG, PROGRAM, Random, command, kill, processes, succeeds};

/// Three steps an epoch.
const TRAINING: &str =
    "--hidden 16 --shards 8 --limit 80 --batch-size 4 --epochs 2 --checkpoint-every 2 --out out";

/// The parameters, the optimizer's state and the losses at the end. Rank 0 prints a digest, but may die before.
fn result(directory: &Path) -> Vec<u8> {
    fs::read(directory.join("out/step-00000006.safetensors")).unwrap()
}

/// That of an undisturbed process.
fn undisturbed() -> Vec<u8> {
    let directory = tempfile::tempdir().unwrap();
    succeeds(command(directory.path(), 1, TRAINING));
    result(directory.path())
}

/// So many lines the ranks write in it together: one for each shard of each step.
const LINES: u64 = 8 * 3 * 2;

/// How ranks are connected.
const CONNECTIONS: [&[(&str, &str)]; 3] = [
    &[],
    &[("DRUMLINE_SHARED_MEMORY", "0")],
    &[("DRUMLINE_SHARED_MEMORY", "0"), ("DRUMLINE_UNIX_SOCKETS", "0")],
];

/// A job whose ranks write a line for each shard.
fn start(directory: &Path, ranks: usize, min_ranks: usize, connection: &[(&str, &str)]) -> Child {
    let mut job = command(directory, ranks, TRAINING);
    job.env("RUST_LOG", "warn,fashion_mnist=trace").envs(connection.iter().copied());
    job.env("DRUMLINE_MIN_RANKS", min_ranks.to_string());
    job.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Calls `act` when ranks of these launchers have begun so many shards, and waits for the end of all launchers. Returns what
/// they printed to stderr beside.
fn end(jobs: impl IntoIterator<Item = Child>, moments: &[u64], mut act: impl FnMut(u64)) -> String {
    let (sender, lines) = mpsc::channel();
    let read = |mut job: Child| {
        let (stdout, stderr) = (job.stdout.take().unwrap(), job.stderr.take().unwrap());
        let sender = sender.clone();
        thread::spawn(move || {
            let lines = BufReader::new(stderr).lines();
            lines.for_each(|line| sender.send(line.unwrap()).unwrap());
        });
        let reader = thread::spawn(move || {
            let mut text = String::new();
            BufReader::new(stdout).read_to_string(&mut text).unwrap();
            text
        });
        (job, reader)
    };
    let jobs: Vec<_> = jobs.into_iter().map(read).collect();
    drop(sender);
    let (mut told, mut begun) = (String::new(), 0);
    loop {
        let line = match lines.recv_timeout(HANG) {
            Ok(line) => line,
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => panic!("the job hangs: {told}"),
        };
        if line.contains("trains on images") {
            begun += 1;
            moments.iter().filter(|moment| **moment == begun).for_each(|moment| act(*moment));
        } else {
            told += &line;
            told.push('\n');
        }
    }
    let began = Instant::now();
    for (mut job, reader) in jobs {
        let status = loop {
            if let Some(status) = job.try_wait().unwrap() {
                break status;
            }
            assert!(began.elapsed() < HANG, "the launcher does not end: {told}");
            thread::sleep(Duration::from_millis(1));
        };
        let stdout = reader.join().unwrap();
        assert!(status.success(), "{status}: {stdout}{told}");
    }
    told
}

#[test]
fn a_rank_that_is_killed_costs_no_step_and_no_bit() {
    let rounds = if cfg!(feature = "soak") { 167 } else { 2 };
    let alone = undisturbed();
    let mut random = Random(1);
    let (mut times, mut told_in_all) = (0, String::new());
    for round in 0..rounds {
        for connection in CONNECTIONS {
            let directory = tempfile::tempdir().unwrap();
            let (victim, moment) = (random.below(4) as usize, 1 + random.below(LINES - 1));
            // Anywhere: in forward, backward, a collective, evaluation, or while a checkpoint is written.
            let later = Duration::from_micros(random.below(30_000));
            println!(
                "round {round}: rank {victim}, shard {moment}, {later:?} later, {connection:?}"
            );
            let job = start(directory.path(), 4, 2, connection);
            let told = end([job], &[moment], |_| {
                thread::sleep(later);
                kill(processes(directory.path(), Some(victim)));
            });
            assert!(result(directory.path()) == alone, "{told}");
            times += usize::from(told.contains("goes on without"));
            told_in_all += &told;
        }
    }
    // Some rank may have ended before.
    assert!(2 * times > rounds * CONNECTIONS.len(), "hardly a rank was killed: {told_in_all}");
}

#[test]
fn a_world_of_four_shrinks_to_one_rank() {
    let alone = undisturbed();
    let directory = tempfile::tempdir().unwrap();
    let mut victims = [0, 3, 1].into_iter();
    let told = end([start(directory.path(), 4, 1, &[])], &[5, 18, 30], |_| {
        kill(processes(directory.path(), victims.next()));
    });
    assert!(result(directory.path()) == alone, "{told}");
    assert!(told.contains("rank 2: goes on without 1, in a world of 1"), "{told}");
}

#[test]
fn two_ranks_die_at_once() {
    let alone = undisturbed();
    for connection in CONNECTIONS {
        let directory = tempfile::tempdir().unwrap();
        let told = end([start(directory.path(), 4, 2, connection)], &[19], |_| {
            let both = [1, 2].map(|rank| processes(directory.path(), Some(rank)));
            kill(both.concat());
        });
        assert!(result(directory.path()) == alone, "{told}");
    }
}

/// It holds the directory of the checkpoints, and would replace new files by old ones if it woke.
#[test]
fn rank_0_is_stopped_and_is_killed_before_the_others_go_on() {
    let alone = undisturbed();
    let directory = tempfile::tempdir().unwrap();
    let job = start(directory.path(), 3, 2, &[("DRUMLINE_TIMEOUT_S", "5")]);
    let told = end([job], &[12], |_| {
        for pid in processes(directory.path(), Some(0)) {
            kill_process(pid, Signal::STOP).unwrap();
        }
    });
    assert!(result(directory.path()) == alone, "{told}");
    assert!(told.contains("rank 2: goes on without 0, in a world of 2"), "{told}");
    assert!(told.contains("the job had gone on without: 0 (SIGKILL)"), "{told}");
}

/// The launcher of a host of three that see one directory. The first host has two ranks, the others have one.
fn start_on(network: &Network, host: usize, shared: &Path, output: fn() -> Stdio) -> Child {
    let ranks = if host == 0 { "2" } else { "1" };
    let mut job = network.on(host, shared);
    job.arg(Path::new(PROGRAM).with_file_name("drumline"));
    job.args(["run", "--nnodes=3", "--node-rank", &host.to_string(), "--rdzv-backend=c10d"]);
    job.args(["--rdzv-endpoint", &network.endpoint(0, 29400)]);
    job.args(["--rdzv-conf=last_call_timeout=0", "--nproc-per-node", ranks, PROGRAM]);
    job.args(TRAINING.split_whitespace());
    job.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    job.env("DRUMLINE_SECRET", "what only these hosts know")
        .env("RUST_LOG", "warn,fashion_mnist=trace");
    job.stdin(Stdio::null()).stdout(output()).stderr(output()).spawn().unwrap()
}

/// How a host is lost.
type Loss = fn(&Network, &TempDir, &Child);

#[test]
fn a_host_that_is_lost_costs_no_step_and_no_bit() {
    let ways: [(&str, Loss); 4] = [
        ("its cable is pulled", |network, _, _| network.pull_the_cable_of(2)),
        ("its power fails", |network, _, _| network.end_host(2)),
        ("its rank is killed", |_, shared, _| kill(processes(shared.path(), Some(3)))),
        ("its launcher is told to end", |_, _, job| network::signal(job, Signal::TERM)),
    ];
    let alone = undisturbed();
    let programs = Path::new(PROGRAM).parent().unwrap();
    for (way, lose) in ways {
        println!("{way}");
        let shared = tempfile::tempdir().unwrap();
        let Some(network) = Network::new(3, Family::V4, &[shared.path(), programs]) else { return };
        let start = |host, output| start_on(&network, host, shared.path(), output);
        let mut lost = start(2, Stdio::null);
        let left = [0, 1].map(|host| start(host, Stdio::piped));
        let told = end(left, &[12], |_| lose(&network, &shared, &lost));
        assert!(result(shared.path()) == alone, "{way}: {told}");
        assert!(told.contains("rank 2: goes on without 3, in a world of 3"), "{way}: {told}");
        let whole = "the job goes on without the ranks of host";
        assert!(told.contains(whole), "{way}: {told}");
        drop(network);
        lost.wait().unwrap();
    }
}
