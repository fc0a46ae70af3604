//! `kill -9` of processes under a `Learner` at random moments.

use std::{env, fs, path::Path, process::Stdio, thread, time::Duration};

use drumline::{Config, init_process_group};
use drumline_testing::{eventually, itself};
use tempfile::TempDir;

use crate::{
    network::Notes,
    processes::Rank,
    resumed::{Program, copy, saved},
};

const RANKS: usize = 2;
const EPOCHS: usize = 5;
const DIRECTORY: &str = "LEARNER_KILLED_DIRECTORY";
const NAME: &str = "LEARNER_KILLED_NAME";
const LAUNCH: &str = "LEARNER_KILLED_LAUNCH";
const RANK: &str = "LEARNER_KILLED_RANK";
const LAST_EPOCH: &str = "LEARNER_KILLED_LAST_EPOCH";

/// A rank, in a process of its own. It goes on after the newest epoch.
#[test]
#[ignore = "other tests start it"]
fn rank() {
    let (Some(directory), Ok(rank)) = (env::var_os(DIRECTORY), env::var(RANK)) else { return };
    let [name, launch, epochs] = [NAME, LAUNCH, LAST_EPOCH].map(|name| env::var(name).unwrap());
    let directory = Path::new(&directory);
    let store = directory.join(format!("store-{name}-{launch}"));
    let url = format!("file://{}?rank={rank}&world_size={RANKS}", store.display());
    let group = init_process_group(&url, &Config::default()).unwrap();
    let beat = directory.join(format!("beat-{launch}-{rank}"));
    let notes = Notes::default().at_step(move |step| fs::write(&beat, step.to_string()).unwrap());
    // Ranks on other hosts have other directories.
    let artifacts = directory.join(format!("{name}-{rank}"));
    let program = Program { wraps: true, notes, ..Program::new(epochs.parse().unwrap()) };
    let digest = program.run(&group, &artifacts, None).unwrap();
    fs::write(directory.join(format!("end-{name}-{rank}")), digest.to_string()).unwrap();
}

struct Job<'a> {
    directory: &'a Path,
    /// Of the training, whose files are in `NAME-0`.
    name: &'a str,
    epochs: usize,
}

impl Job<'_> {
    fn start(&self, launch: usize) -> Vec<Rank> {
        let start = |rank: usize| {
            let mut command = itself("killed::rank");
            command.env(DIRECTORY, self.directory).env(NAME, self.name);
            command.env(LAUNCH, launch.to_string()).env(RANK, rank.to_string());
            command.env(LAST_EPOCH, self.epochs.to_string());
            Rank(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
        };
        (0..RANKS).map(start).collect()
    }

    /// The digests that the ranks have written at the end.
    fn end(&self) -> Vec<String> {
        let of = |rank| self.directory.join(format!("end-{}-{rank}", self.name));
        (0..RANKS).map(|rank| fs::read_to_string(of(rank)).unwrap()).collect()
    }

    fn run(&self) -> Vec<String> {
        for mut rank in self.start(0) {
            eventually("the rank to end", || rank.0.try_wait().unwrap().is_some());
        }
        self.end()
    }

    /// Kills a rank at a random moment and starts both again, until both come to their end. Returns how often.
    fn run_with_kills(&self, random: &mut u64) -> (Vec<String>, usize) {
        for launch in 1.. {
            *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let victim = (*random >> 60) as usize % RANKS;
            // An epoch has 10 steps.
            let step = (*random >> 40) as usize % 30;
            let mut ranks = self.start(launch);
            let beat = self.directory.join(format!("beat-{launch}-{victim}"));
            let step_of_victim = || -> usize {
                fs::read_to_string(&beat).ok().and_then(|beat| beat.parse().ok()).unwrap_or(0)
            };
            eventually("the victim to train, or to end", || {
                ranks[victim].0.try_wait().unwrap().is_some() || step_of_victim() > step
            });
            thread::sleep(Duration::from_micros((*random >> 20) % 5_000)); // anywhere in a step
            ranks[victim].0.kill().ok();
            let mut have_ended = true;
            for rank in &mut ranks {
                eventually("the rank to end", || rank.0.try_wait().unwrap().is_some());
                have_ended &= rank.0.wait().unwrap().success();
            }
            if have_ended {
                return (self.end(), launch - 1);
            }
        }
        unreachable!("launches do not end")
    }
}

/// Returns how often a process was killed.
fn ends_with_the_same_bits(random: &mut u64) -> usize {
    let directory = TempDir::new().unwrap();
    let job = |name, epochs| Job { directory: directory.path(), name, epochs };
    // burn names parameters by numbers of chance, so both go on from one epoch.
    job("first", 1).run();
    let path = |name: &str| directory.path().join(name);
    copy(&path("first-0"), &path("whole-0"));
    copy(&path("first-0"), &path("parts-0"));
    let whole = job("whole", EPOCHS).run();
    let (parts, kills) = job("parts", EPOCHS).run_with_kills(random);
    assert_eq!(whole[0], whole[1]);
    assert_eq!(parts, whole, "after {kills} kills");
    let same = saved(&path("parts-0"), EPOCHS) == saved(&path("whole-0"), EPOCHS);
    assert!(same, "other bits in the checkpoint after {kills} kills");
    kills
}

#[test]
fn a_learner_that_is_killed_again_and_again_ends_with_the_same_bits() {
    let mut random = 3;
    assert!(ends_with_the_same_bits(&mut random) > 0, "the program ended before it was killed");
}

#[test]
#[ignore = "takes minutes: make soak runs it"]
fn so_it_does_after_a_hundred_kills() {
    let (mut random, mut kills) = (4, 0);
    while kills < 100 {
        kills += ends_with_the_same_bits(&mut random);
    }
    println!("{kills} kills");
}
