//! `kill -9` of a rank at random moments.

use std::{
    env,
    path::Path,
    process::{Child, Stdio},
    thread,
    time::Duration,
};

use candle_core::DType;
use drumline::{Config, checkpoint::CheckpointDirectory, init_process_group};
use drumline_testing::{eventually, itself};

use crate::resume::train;

const RANKS: usize = 2;
const STORE: &str = "TEST_KILLED_STORE";
const OUT: &str = "TEST_KILLED_OUT";
const RANK: &str = "TEST_KILLED_RANK";
const STOP: &str = "TEST_KILLED_STOP";

/// A rank, in a process of its own. It goes on from the newest checkpoint.
#[test]
#[ignore = "other tests start it"]
fn rank() {
    let (Some(store), Some(out)) = (env::var_os(STORE), env::var_os(OUT)) else { return };
    let [rank, stop] = [RANK, STOP].map(|name| env::var(name).unwrap());
    let store = Path::new(&store).display();
    let url = format!("file://{store}?rank={rank}&world_size={RANKS}");
    let group = init_process_group(&url, &Config::default()).unwrap();
    train(&group, &CheckpointDirectory::new(out), DType::F32, stop.parse().unwrap());
}

/// A process that does not outlive its test.
pub(crate) struct Rank(pub(crate) Child);

impl Drop for Rank {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

impl Rank {
    pub(crate) fn has_ended(&mut self) -> bool {
        self.0.try_wait().unwrap().is_some()
    }
}

fn start(out: &Path, launch: usize, stop: u64) -> Vec<Rank> {
    let start = |rank: usize| {
        let mut command = itself("killed::rank");
        command.env(OUT, out).env(STORE, out.with_extension(format!("store-{launch}")));
        command.env(RANK, rank.to_string()).env(STOP, stop.to_string());
        Rank(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    };
    (0..RANKS).map(start).collect()
}

/// Waits for all ranks. Returns whether all came to the end of the program.
fn wait(ranks: &mut [Rank]) -> bool {
    let mut all = true;
    for rank in ranks {
        eventually("a rank to end", || rank.has_ended());
        all &= rank.0.wait().unwrap().success();
    }
    all
}

/// Returns how often a rank was killed.
fn ends_with_the_same_bits(random: &mut u64) -> usize {
    let temporary = tempfile::tempdir().unwrap();
    let [first, whole, parts] = ["first", "whole", "parts"].map(|name| temporary.path().join(name));
    // Random weights cannot be seeded, so both go on from the first step.
    assert!(wait(&mut start(&first, 0, 1)));
    let newest = |out: &Path| CheckpointDirectory::new(out).newest().unwrap().unwrap();
    for out in [&whole, &parts] {
        let out = CheckpointDirectory::new(out);
        out.prepare().unwrap();
        out.save(1, &newest(&first).checkpoint).unwrap();
    }
    assert!(wait(&mut start(&whole, 0, u64::MAX)));

    let mut kills = 0;
    loop {
        *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let victim = (*random >> 60) as usize % RANKS;
        let step = newest(&parts).step + (*random >> 40) % 6;
        let mut ranks = start(&parts, kills, u64::MAX);
        eventually("the ranks to train, or to end", || {
            let steps = CheckpointDirectory::new(&parts).steps().unwrap();
            steps.last().is_some_and(|last| *last > step) || ranks[victim].has_ended()
        });
        thread::sleep(Duration::from_micros((*random >> 20) % 3_000)); // anywhere in a step
        ranks[victim].0.kill().ok(); // SIGKILL
        if wait(&mut ranks) {
            break;
        }
        kills += 1;
    }
    let (parts, whole) = (newest(&parts), newest(&whole));
    assert_eq!(parts.step, whole.step);
    assert!(parts.checkpoint == whole.checkpoint, "other bits after {kills} kills");
    kills
}

#[test]
fn a_training_that_is_killed_again_and_again_ends_with_the_same_bits() {
    let mut random = 5;
    assert!(ends_with_the_same_bits(&mut random) > 0, "the program ended before it was killed");
}

#[test]
#[ignore = "takes minutes: make soak runs it"]
fn so_it_does_after_a_hundred_kills() {
    let (mut random, mut kills) = (6, 0);
    while kills < 100 {
        kills += ends_with_the_same_bits(&mut random);
    }
    println!("{kills} kills");
}
