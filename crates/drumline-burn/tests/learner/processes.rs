//! Ranks as processes, of which one is killed.

use std::{
    env, fs,
    path::Path,
    process::{Child, Stdio},
    thread,
};

use burn::train::FileApplicationLoggerInstaller;
use drumline::{Config, ProcessGroup, init_process_group};
use drumline_burn::distribute;
use drumline_testing::{eventually, itself};
use tempfile::TempDir;

use crate::{
    files,
    network::{Network, Notes},
    training::{Setup, device, error, learner},
};

const RANKS: usize = 3;
const DIRECTORY: &str = "LEARNER_TEST_DIRECTORY";
const RANK: &str = "LEARNER_TEST_RANK";
const EPOCHS: &str = "LEARNER_TEST_EPOCHS";
/// Whether rank 0 validates for ever.
const PARKS: &str = "LEARNER_TEST_PARKS";

fn kills() -> usize {
    env::var("LEARNER_TEST_KILLS").map_or(4, |kills| kills.parse().unwrap())
}

/// The group of ranks that meet in a directory.
pub(crate) fn meet(directory: &Path, rank: &str, ranks: usize) -> ProcessGroup {
    let store = directory.join("store");
    let url = format!("file://{}?rank={rank}&world_size={ranks}", store.display());
    init_process_group(&url, &Config::default()).unwrap()
}

/// A rank, in a process of its own. It writes what burn lets it write.
#[test]
#[ignore = "other tests start it"]
fn rank() {
    let (Some(directory), Ok(rank)) = (env::var_os(DIRECTORY), env::var(RANK)) else { return };
    let directory = Path::new(&directory);
    let group = meet(directory, &rank, RANKS);
    let beat = directory.join(format!("beat-{rank}"));
    let mut notes = Notes::default().at_step(move |step| {
        fs::write(&beat, step.to_string()).unwrap();
    });
    if env::var_os(PARKS).is_some() {
        let beat = directory.join("validates");
        notes = notes.at_validation(move || {
            fs::write(&beat, "").unwrap();
            loop {
                thread::park();
            }
        });
    }
    let epochs = env::var(EPOCHS).map_or(1_000_000, |epochs| epochs.parse().unwrap());
    let setup = Setup { epochs, ..Setup::new(0..90, 3) };
    let model = Network::new(1, 8, notes, &device());
    let artifacts = directory.join(format!("artifacts-{rank}"));
    let training = files::training(&setup, &artifacts).with_application_logger(Some(Box::new(
        FileApplicationLoggerInstaller::new(artifacts.join("experiment.log")),
    )));
    let result = distribute(training, &group).launch(learner(model));
    let outcome = directory.join(format!("outcome-{rank}"));
    fs::write(&outcome, error(&result)).unwrap();
}

pub(crate) struct Rank(pub(crate) Child);

impl Drop for Rank {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// Starts all ranks, with these variables.
fn start(directory: &Path, variables: &[(&str, &str)]) -> Vec<Rank> {
    (0..RANKS).map(|rank| start_one(directory, rank, variables)).collect()
}

fn start_one(directory: &Path, rank: usize, variables: &[(&str, &str)]) -> Rank {
    let mut command = itself("processes::rank");
    command.envs(variables.iter().copied());
    command.env(DIRECTORY, directory).env(RANK, rank.to_string());
    Rank(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
}

#[test]
fn a_killed_rank_ends_launch_on_the_others_which_name_it() {
    for kill in 0..kills() {
        let directory = TempDir::new().unwrap();
        let mut ranks = start(directory.path(), &[]);
        let victim = kill % RANKS;
        let step_of = |rank: usize| {
            let beat = fs::read_to_string(directory.path().join(format!("beat-{rank}")));
            beat.ok().and_then(|beat| beat.parse::<usize>().ok()).unwrap_or(0)
        };
        // Some of these steps are just before rank 0 validates.
        let step = 5 + 7 * kill;
        eventually("the ranks to train", || {
            for (rank, child) in ranks.iter_mut().enumerate() {
                assert_eq!(child.0.try_wait().unwrap(), None, "rank {rank} has ended");
            }
            (0..RANKS).all(|rank| step_of(rank) >= step)
        });
        kill_one(&mut ranks, victim, directory.path());
    }
}

/// Kills a rank. `launch` must return on the others, and name it.
fn kill_one(ranks: &mut [Rank], victim: usize, directory: &Path) {
    ranks[victim].0.kill().unwrap(); // with SIGKILL
    for rank in (0..RANKS).filter(|&rank| rank != victim) {
        let child = &mut ranks[rank].0;
        eventually("the others to end", || child.try_wait().unwrap().is_some());
        let outcome = fs::read_to_string(directory.join(format!("outcome-{rank}"))).unwrap();
        assert!(outcome.contains(&format!("rank {victim}")), "{outcome}");
    }
}

#[test]
fn ranks_that_wait_for_validation_see_rank_0_die() {
    let directory = TempDir::new().unwrap();
    let mut ranks = start(directory.path(), &[(PARKS, "1")]);
    eventually("rank 0 to validate", || directory.path().join("validates").exists());
    kill_one(&mut ranks, 0, directory.path());
}

#[test]
fn rank_0_alone_has_a_log_and_metrics() {
    let directory = TempDir::new().unwrap();
    let mut ranks = start(directory.path(), &[(EPOCHS, "2")]);
    for rank in &mut ranks {
        eventually("the ranks to end", || rank.0.try_wait().unwrap().is_some());
    }
    for rank in 0..RANKS {
        let path = |name: &str| directory.path().join(format!("{name}-{rank}"));
        assert_eq!(fs::read_to_string(path("outcome")).unwrap(), "");
        let written = files::files(&path("artifacts"));
        let has = |name: &str| written.iter().any(|path| path.ends_with(name));
        let logs = ["experiment.log", "Loss.log", "model-2.bpk"].map(has);
        assert_eq!(logs, [rank == 0; 3], "rank {rank}: {written:?}");
        assert!(rank == 0 || written.is_empty(), "rank {rank}: {written:?}");
    }
}
