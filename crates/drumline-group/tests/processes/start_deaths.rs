//! Ranks that are killed while the others start up, or make groups, as under torchrun: the store is somebody else's and
//! outlives the ranks.
//!
//! The ranks are this test program again, with `STARTS` in the environment.

use std::{
    env,
    io::{BufRead as _, BufReader},
    ops::Range,
    process::{Child, ChildStdout, Stdio},
    thread,
    time::Duration,
};

use drumline_group::{
    Config, Error, GroupOptions, ProcessGroup, ReduceOp, init_process_group,
    store::{
        Store as _,
        tcp::{TcpStore, TcpStoreServer},
    },
};
use drumline_testing::{itself, now_us};
use rustix::process::{Pid, Signal, kill_process};

/// The ranks of most jobs.
const WORLD: usize = 4;

/// The ranks of a job in two circles.
const TWO_CIRCLES: usize = 20;

/// To tell a hang from a busy machine. The time limit of start-up is longer.
const NAMED_WITHIN: Duration = Duration::from_secs(30);

/// What carries the calls.
const OVERS: [&str; 3] = ["shared", "unix", "tcp"];

/// What ranks do over and over.
const WHATS: [&str; 4] = ["first", "again", "groups", "halves"];

/// What a rank does: starts up, again and again, until something fails, and says what.
#[test]
fn starting_rank() {
    let Ok(what) = env::var("STARTS") else { return };
    let over = env::var("STARTS_OVER").unwrap();
    let config = Config::from_env()
        .unwrap()
        .timeout(Duration::from_secs(120))
        .shared_memory(over == "shared")
        .unix_sockets(over != "tcp");
    let late: u64 = env::var("STARTS_LATE_MS").unwrap().parse().unwrap();
    thread::sleep(Duration::from_millis(late));
    println!("begins {}", now_us());
    let Err(error) = start_over(&what, &config) else { return println!("done") };
    let culprit = error.culprit().map_or(-1, |rank| rank as i64);
    println!("failed {} {culprit} {error}", now_us());
    // Its process outlives its failure.
    thread::sleep(NAMED_WITHIN);
}

fn start_over(what: &str, config: &Config) -> Result<(), Error> {
    let join = || init_process_group("env://", config);
    let mut world = join()?;
    match what {
        "once" => return world.barrier(),
        "apart" => return meet_apart(&world),
        "without" => return meet_without_one(&world),
        "rest" => return go_on_without_one(&world),
        _ => {}
    }
    loop {
        match what {
            "first" => thread::sleep(Duration::from_millis(1)),
            "again" => {
                world.destroy()?;
                world = join()?;
            }
            "groups" => group_of(&world, 0..world.world_size())?,
            _ => {
                let middle = world.world_size() / 2;
                let is_left = world.rank() < middle;
                group_of(&world, if is_left { 0..middle } else { middle..world.world_size() })?;
                world.barrier()?;
            }
        }
        if what == "first" {
            world.barrier()?;
        }
    }
}

/// All ranks sum in a group. Rank 1 stays in it, and is killed. Ranks 0 and 3 wait for it there and fail, and live on. Rank
/// 2 has left the group, and waits for rank 3 in another one. Over TCP it has no connection to rank 1.
fn meet_apart(world: &ProcessGroup) -> Result<(), Error> {
    let all = world.new_group(&[0, 1, 2, 3], &GroupOptions::default())?;
    all.all_reduce(&mut [1.0_f32; 10], ReduceOp::Sum)?;
    match world.rank() {
        1 => thread::sleep(NAMED_WITHIN),
        2 => {
            all.leave(Duration::ZERO)?;
            println!("\nhas left");
            world.new_group(&[2, 3], &GroupOptions::default())?;
        }
        _ => all.destroy()?,
    }
    Ok(())
}

/// Rank 1 is killed while rank 2 waits for it to make a group. The others wait for both, and hear first that rank 2 leaves.
fn meet_without_one(world: &ProcessGroup) -> Result<(), Error> {
    world.barrier()?;
    match world.rank() {
        1 => thread::sleep(NAMED_WITHIN),
        2 => {
            println!("\nwaits");
            drop(world.new_group(&[1, 2], &GroupOptions::default())?);
        }
        _ => world.barrier()?,
    }
    Ok(())
}

/// Rank 1 is killed amid the calls of a group. The others make one without it, for which one of them comes late.
fn go_on_without_one(world: &ProcessGroup) -> Result<(), Error> {
    let all = world.new_group(&[0, 1, 2, 3], &GroupOptions::default())?;
    println!("\nhas met");
    let failed = loop {
        if let Err(error) = all.all_reduce(&mut [1.0_f32; 10], ReduceOp::Sum) {
            break error;
        }
    };
    assert_eq!(failed.culprit(), Some(1), "{failed}");
    if world.rank() == 3 {
        thread::sleep(Duration::from_millis(800));
    }
    let rest = world.new_group(&[0, 2, 3], &GroupOptions::default())?;
    rest.barrier()?;
    // All have heard of all before one leaves.
    rest.destroy()
}

fn group_of(world: &ProcessGroup, ranks: Range<usize>) -> Result<(), Error> {
    let ranks: Vec<usize> = ranks.collect();
    let group = world.new_group(&ranks, &GroupOptions::default())?;
    group.all_reduce(&mut [1.0_f32; 10], ReduceOp::Sum)?;
    group.destroy()
}

struct Job(Vec<(Child, BufReader<ChildStdout>)>);

impl Drop for Job {
    fn drop(&mut self) {
        for (child, _) in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Starts a job of `world` ranks. The rank `late`, if there is one of this number, comes late.
fn start(port: u16, attempt: usize, what: &str, over: &str, (world, late): (usize, usize)) -> Job {
    let start = |rank: usize| {
        let late_ms = if rank == late { 400 } else { 0 };
        let mut child = itself("start_deaths::starting_rank")
            .env("STARTS", what)
            .env("STARTS_OVER", over)
            .env("STARTS_LATE_MS", late_ms.to_string())
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", world.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("TORCHELASTIC_USE_AGENT_STORE", "True")
            .env("TORCHELASTIC_RESTART_COUNT", attempt.to_string())
            .stdout(Stdio::piped())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        (child, output)
    };
    Job((0..world).map(start).collect())
}

/// The key under which a process says that it is there.
fn process_key(attempt: usize, rank: usize) -> String {
    format!("start/{attempt}/drumline/world/process/{rank}")
}

fn random(seed: usize) -> usize {
    let mut x = (seed as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x ^= x >> 29;
    (x.wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 33) as usize
}

/// Kills a rank of `world` ranks at a random moment once it has written to the store that it is there, so many times. All
/// others must name it, also one that comes late.
fn kill_and_listen(world: usize, times: usize) {
    let server = TcpStoreServer::bind("127.0.0.1", 0).unwrap();
    let port = server.address().unwrap().port();
    let store = TcpStore::connect("127.0.0.1", port, NAMED_WITHIN).unwrap();
    let (mut delays, mut wrong) = (Vec::new(), Vec::new());
    for number in 0..times {
        let what = WHATS[number % WHATS.len()];
        let over = OVERS[number / WHATS.len() % OVERS.len()];
        let victim = random(number) % world;
        // Every other time one of the survivors, or nobody, comes late.
        let late = (victim + random(number + 31) % (2 * world)) % (2 * world);
        let late = if late == victim { world } else { late };
        let mut job = start(port, number, what, over, (world, late));
        store.wait(&[&process_key(number, victim)], NAMED_WITHIN).unwrap();
        let most = if what == "first" { 60_000 } else { 400_000 };
        thread::sleep(Duration::from_micros((random(number + 7919) % most) as u64));
        let killed = now_us();
        kill_process(Pid::from_child(&job.0[victim].0), Signal::KILL).unwrap();
        for survivor in (0..world).filter(|rank| *rank != victim) {
            let (began, failed, culprit, told) = failure(&mut job.0[survivor].1);
            if culprit != victim as i64 {
                wrong.push(format!(
                    "{what} over {over}, {number}, victim {victim}: rank {survivor} says: {told}"
                ));
                continue;
            }
            delays.push(Duration::from_micros((failed - killed.max(began)).max(0) as u64));
        }
    }
    delays.sort_unstable();
    let slow = delays.iter().filter(|delay| **delay > Duration::from_secs(1)).count();
    println!(
        "{times} kills, {} survivors named the right rank; median {:?}, worst {:?}, {slow} later than 1 s",
        delays.len(),
        delays[delays.len() / 2],
        delays[delays.len() - 1]
    );
    assert!(wrong.is_empty(), "{} did not:\n{}", wrong.len(), wrong.join("\n"));
    assert!(delays[delays.len() - 1] < NAMED_WITHIN);
}

/// When a rank began and when it failed, whom it blames, and what it says.
fn failure(output: &mut BufReader<ChildStdout>) -> (i64, i64, i64, String) {
    let mut seen = String::new();
    let mut began = 0;
    loop {
        let mut line = String::new();
        let bytes = output.read_line(&mut line).unwrap();
        assert!(bytes > 0, "a rank ended without a failure; it said:\n{seen}");
        let number = |word: Option<&str>| word.unwrap().trim().parse::<i64>().unwrap();
        if let Some((_, at)) = line.split_once("begins ") {
            began = number(Some(at));
        } else if let Some((_, told)) = line.split_once("failed ") {
            let mut words = told.splitn(3, ' ');
            let (at, culprit) = (number(words.next()), number(words.next()));
            return (began, at, culprit, words.next().unwrap().to_owned());
        }
        seen.push_str(&line);
    }
}

/// Kills rank 1 of a job once rank `waits` says that it has got so far. Returns the outputs of the others.
fn kill_after(
    what: &str,
    over: &str,
    waits: usize,
    says: &str,
    then: impl Fn(usize, &mut BufReader<ChildStdout>),
) {
    let server = TcpStoreServer::bind("127.0.0.1", 0).unwrap();
    let mut job = start(server.address().unwrap().port(), 0, what, over, (WORLD, WORLD));
    let mut said = (&mut job.0[waits].1).lines().map(Result::unwrap);
    assert!(said.any(|line| line == says), "{what} over {over}");
    kill_process(Pid::from_child(&job.0[1].0), Signal::KILL).unwrap();
    for rank in [0, 2, 3] {
        then(rank, &mut job.0[rank].1);
    }
}

#[test]
fn a_rank_that_waits_for_one_that_has_failed_elsewhere_hears_why() {
    for over in OVERS {
        kill_after("apart", over, 2, "has left", |rank, output| {
            let (.., culprit, told) = failure(output);
            assert_eq!(culprit, 1, "over {over}, rank {rank}: {told}");
        });
    }
}

#[test]
fn a_rank_that_cannot_make_a_group_says_whom_to_blame() {
    for over in OVERS {
        kill_after("without", over, 2, "waits", |rank, output| {
            let (.., culprit, told) = failure(output);
            assert_eq!(culprit, 1, "over {over}, rank {rank}: {told}");
        });
    }
}

#[test]
fn survivors_make_a_group_without_the_rank_that_was_killed() {
    for over in OVERS {
        kill_after("rest", over, 0, "has met", |rank, output| {
            let mut said = output.lines().map(Result::unwrap);
            let ends = |line: &String| ["done", "failed "].iter().any(|end| line.contains(end));
            assert_eq!(said.find(ends).as_deref(), Some("done"), "over {over}, rank {rank}");
        });
    }
}

/// What killed ranks have left in the store is not taken for ranks of the next start.
#[test]
fn ranks_that_start_again_in_the_same_store_wait_for_each_other() {
    let server = TcpStoreServer::bind("127.0.0.1", 0).unwrap();
    let port = server.address().unwrap().port();
    let store = TcpStore::connect("127.0.0.1", port, NAMED_WITHIN).unwrap();
    let job = start(port, 0, "once", "shared", (WORLD, 3));
    store.wait(&["start/0/drumline/world/ticket/2"], NAMED_WITHIN).unwrap();
    drop(job);
    let mut job = start(port, 1, "once", "shared", (WORLD, 2));
    for (rank, (_, output)) in job.0.iter_mut().enumerate() {
        let mut said = output.lines().map(Result::unwrap);
        let ends = |line: &String| ["done", "failed "].iter().any(|end| line.contains(end));
        assert_eq!(said.find(ends).as_deref(), Some("done"), "rank {rank}");
    }
}

#[test]
#[cfg_attr(feature = "soak", ignore = "the soak kills more often")]
fn a_rank_that_is_killed_amid_start_up_is_named_by_all() {
    kill_and_listen(WORLD, WHATS.len() * 3);
}

#[test]
fn a_rank_that_is_killed_amid_start_up_is_named_in_all_circles() {
    kill_and_listen(TWO_CIRCLES, WHATS.len());
}

#[test]
#[cfg(feature = "soak")]
fn a_rank_that_is_killed_amid_start_up_is_named_by_all_300_times() {
    kill_and_listen(WORLD, 300);
}
