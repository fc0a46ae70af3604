//! Ranks that are killed in a group whose backend notices nothing: the guard names them on all survivors.
//!
//! The ranks are this test program again, with `GUARD_RANK` in the environment.

use std::{
    env,
    io::{BufRead, BufReader, Lines, Write},
    process::{Child, ChildStdout, Stdio},
    sync::{Arc, OnceLock},
    time::Duration,
};

use drumline_group::{
    Config, ReduceOp,
    auth::Secret,
    rendezvous::Endpoint,
    store::{
        Store,
        tcp::{TcpStore, TcpStoreServer},
    },
};
use drumline_testing::{itself, now_us};
use rustix::process::{Signal, getpid, kill_process};

use crate::common::{
    failure,
    tacit::{Stage, register},
};

const SECRET: &str = "a secret of this test only";

/// Where the victim dies.
static DEATH: OnceLock<String> = OnceLock::new();
const VICTIM: usize = 1;
/// The call in which the victim dies, if it dies in one.
const LAST: u64 = 3;

fn die_if(moment: &str) {
    if DEATH.get().is_some_and(|death| death == moment) {
        println!("dies {}", now_us());
        kill_process(getpid(), Signal::KILL).unwrap();
    }
}

#[test]
fn rank_process() {
    let Ok(rank) = env::var("GUARD_RANK") else { return };
    let rank: usize = rank.parse().unwrap();
    let variable = |name: &str| env::var(name).unwrap();
    let moment = variable("GUARD_MOMENT");
    if rank == VICTIM {
        DEATH.set(moment.clone()).unwrap();
    }
    register("tacit", true, |_, stage, sequence| {
        if sequence == LAST {
            die_if(if stage == Stage::Begun { "begun" } else { "half sent" });
        }
    });
    let secret = Secret::new(SECRET).unwrap();
    let endpoint = Endpoint::Unix(variable("GUARD_STORE"));
    let store = TcpStore::connect_secured(&endpoint, &secret, Duration::from_secs(60)).unwrap();
    let store: Arc<dyn Store> = Arc::new(store);
    let is_tcp = variable("GUARD_OVER") == "tcp";
    let config = Config::default()
        .backend("tacit")
        .timeout(Duration::from_secs(300))
        .shared_memory(!is_tcp)
        .unix_sockets(!is_tcp)
        .secret(secret);
    let world_size = variable("GUARD_WORLD").parse().unwrap();
    let group =
        drumline_group::rendezvous::connect("world", store, rank, world_size, &config).unwrap();
    for _ in 0..LAST {
        let mut sum = [1];
        group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(sum, [world_size as i32]);
    }
    die_if("before");
    if moment == "idle" {
        println!("idle");
        std::io::stdin().read_line(&mut String::new()).unwrap();
        die_if("idle");
    }
    let result = match &*moment {
        "message" if rank == VICTIM => {
            // The others wait for its messages now, or will do so.
            die_if("message");
            Ok(())
        }
        "message" => group.recv(&mut [0_u8], VICTIM, 7),
        // A call in which the victim has sent half may end well for those that have got theirs.
        _ => (0..2).try_for_each(|_| group.all_reduce(&mut [1_u8; 3000], ReduceOp::Sum)),
    };
    let failed = failure(result.unwrap_err());
    let culprit = failed.culprit().map_or(-1, |rank| rank as i64);
    println!("failed {} {culprit} {} {failed}", now_us(), failed.cause.name());
}

struct Rank {
    child: Child,
    output: Lines<BufReader<ChildStdout>>,
}

impl Rank {
    fn start(rank: usize, world_size: usize, over: &str, moment: &str, store: &str) -> Rank {
        let mut child = itself("guard::rank_process")
            .env("GUARD_RANK", rank.to_string())
            .env("GUARD_WORLD", world_size.to_string())
            .env("GUARD_STORE", store)
            .env("GUARD_OVER", over)
            .env("GUARD_MOMENT", moment)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap()).lines();
        Rank { child, output }
    }

    /// The words after `word`, in the next line that has it.
    fn line(&mut self, word: &str) -> String {
        let mut seen = Vec::new();
        for line in &mut self.output {
            let line = line.unwrap();
            if let Some((_, rest)) = line.split_once(word) {
                return rest.to_owned();
            }
            seen.push(line);
        }
        panic!("a rank ended without saying {word:?}; it said {seen:#?}");
    }

    fn wake(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"go on\n").unwrap();
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn whoever_is_killed_is_named_on_all_survivors() {
    let mut delays = Vec::new();
    for over in ["shared", "tcp"] {
        for (number, moment) in
            ["before", "begun", "half sent", "message", "idle"].into_iter().enumerate()
        {
            for world_size in [2, 4] {
                let case = format!("{over}, {moment}, {world_size} ranks");
                let store = format!("guard-{}-{over}-{number}-{world_size}", std::process::id());
                let secret = Secret::new(SECRET).unwrap();
                let endpoint = Endpoint::Unix(store.clone());
                let _server = TcpStoreServer::bind_secured(&endpoint, &secret).unwrap();
                let start = |rank| Rank::start(rank, world_size, over, moment, &store);
                let mut ranks: Vec<Rank> = (0..world_size).map(start).collect();
                if moment == "idle" {
                    ranks.iter_mut().for_each(|rank| drop(rank.line("idle")));
                    ranks[VICTIM].wake();
                    ranks[VICTIM].child.wait().unwrap();
                    ranks
                        .iter_mut()
                        .enumerate()
                        .filter(|(rank, _)| *rank != VICTIM)
                        .for_each(|(_, rank)| rank.wake());
                }
                let died: i64 = ranks[VICTIM].line("dies ").parse().unwrap();
                for (rank, survivor) in ranks.iter_mut().enumerate() {
                    if rank != VICTIM {
                        let line = survivor.line("failed ");
                        let words: Vec<&str> = line.split(' ').collect();
                        // Over TCP a rank makes sure for a while, and another one may be faster.
                        let has_heard = over == "tcp" && words[2] == "reported";
                        let is_right = words[1] == VICTIM.to_string()
                            && (words[2] == "peer_exited" || has_heard)
                            && line.contains(&format!("the process of rank {VICTIM} has ended"));
                        assert!(is_right, "{case}: rank {rank} says {line}");
                        delays.push((words[0].parse::<i64>().unwrap() - died, case.clone()));
                    }
                }
            }
        }
    }
    delays.sort();
    let (median, worst) = (&delays[delays.len() / 2], &delays[delays.len() - 1]);
    println!(
        "named after {} us in the median, at worst after {} us: {}",
        median.0, worst.0, worst.1
    );
    // To tell a hang from a busy machine.
    assert!(worst.0 < 20_000_000, "{worst:?}");
}
