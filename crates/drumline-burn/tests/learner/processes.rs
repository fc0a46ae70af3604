//! Ranks as processes, of which one is killed.

use std::{
    env,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use drumline::{Config, init_process_group};
use drumline_burn::distribute;
use tempfile::TempDir;

use crate::{
    network::{Network, Notes},
    training::{Setup, device, error, learner},
};

const RANKS: usize = 3;
const DIRECTORY: &str = "LEARNER_TEST_DIRECTORY";
const RANK: &str = "LEARNER_TEST_RANK";

fn kills() -> usize {
    env::var("LEARNER_TEST_KILLS").map_or(4, |kills| kills.parse().unwrap())
}

/// A rank, in a process of its own.
#[test]
#[ignore = "other tests start it"]
fn rank() {
    let (Some(directory), Ok(rank)) = (env::var_os(DIRECTORY), env::var(RANK)) else { return };
    let directory = Path::new(&directory);
    let url =
        format!("file://{}?rank={rank}&world_size={RANKS}", directory.join("store").display());
    let group = init_process_group(&url, &Config::default()).unwrap();
    let beat = directory.join(format!("beat-{rank}"));
    let notes = Notes::default().at_step(move |step| {
        std::fs::write(&beat, step.to_string()).unwrap();
    });
    let setup = Setup { epochs: 1_000_000, ..Setup::new(0..90, 3) };
    let model = Network::new(1, 8, notes, &device());
    let training = setup.training(directory);
    let result = distribute(training, &group).launch(learner(model));
    let outcome = directory.join(format!("outcome-{rank}"));
    std::fs::write(&outcome, error(&result)).unwrap();
}

struct Rank(Child);

impl Drop for Rank {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

fn start(directory: &Path, rank: usize) -> Rank {
    let program = env::current_exe().unwrap();
    let mut command = Command::new(program);
    command.args(["processes::rank", "--exact", "--ignored"]);
    command.env(DIRECTORY, directory).env(RANK, rank.to_string());
    Rank(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
}

/// Waits until `is_met`. The limit only ends a test that would hang.
fn until(what: &str, mut is_met: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_met() {
        assert!(began.elapsed() < Duration::from_secs(120), "waited for {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_killed_rank_ends_launch_on_the_others_which_name_it() {
    for kill in 0..kills() {
        let directory = TempDir::new().unwrap();
        let mut ranks: Vec<Rank> = (0..RANKS).map(|rank| start(directory.path(), rank)).collect();
        let victim = kill % RANKS;
        let step_of = |rank: usize| {
            let beat = std::fs::read_to_string(directory.path().join(format!("beat-{rank}")));
            beat.ok().and_then(|beat| beat.parse::<usize>().ok()).unwrap_or(0)
        };
        // Some of these steps are just before rank 0 validates.
        let step = 5 + 7 * kill;
        until("the ranks to train", || {
            for (rank, child) in ranks.iter_mut().enumerate() {
                assert_eq!(child.0.try_wait().unwrap(), None, "rank {rank} has ended");
            }
            (0..RANKS).all(|rank| step_of(rank) >= step)
        });
        ranks[victim].0.kill().unwrap(); // with SIGKILL
        for rank in (0..RANKS).filter(|&rank| rank != victim) {
            let child = &mut ranks[rank].0;
            until("the others to end", || child.try_wait().unwrap().is_some());
            let outcome = directory.path().join(format!("outcome-{rank}"));
            let outcome = std::fs::read_to_string(outcome).unwrap();
            assert!(outcome.contains(&format!("rank {victim}")), "kill {kill}: {outcome}");
        }
    }
}
