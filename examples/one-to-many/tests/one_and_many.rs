//! Each training as a program of one process and as one of two.

#![allow(clippy::unwrap_used)]

use std::{path::Path, process::Command};

const PROGRAM: &str = env!("CARGO_BIN_EXE_one-to-many");

/// Runs `training` in `directory`, on the built-in digits. Returns whether it succeeded, and what it printed.
fn run(directory: &Path, training: &str, ranks: usize) -> (bool, String, String) {
    let mut command = match ranks {
        1 => Command::new(PROGRAM),
        _ => {
            // It lies beside the program: testing the whole workspace builds both.
            let launcher = Path::new(PROGRAM).with_file_name("drumline");
            assert!(launcher.exists(), "build it first: cargo build -p drumline-cli");
            let mut command = Command::new(launcher);
            command.args(["run", "--nproc-per-node", &ranks.to_string(), PROGRAM]);
            command
        }
    };
    command.current_dir(directory).env_clear().env("RAYON_NUM_THREADS", "1").arg(training);
    let output = command.output().unwrap();
    let [out, err] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    (output.status.success(), out, err)
}

/// The test accuracies that `training` ends with, one for each rank.
fn accuracies(training: &str, ranks: usize) -> Vec<f64> {
    let directory = tempfile::tempdir().unwrap();
    let (succeeded, out, err) = run(directory.path(), training, ranks);
    assert!(succeeded, "{training}: {out}{err}");
    let told = out.lines().filter_map(|line| Some(line.split_once("test accuracy ")?.1));
    told.map(|accuracy| accuracy.trim_end_matches(" %").parse().unwrap()).collect()
}

fn learns(training: &str, ranks: usize) {
    let found = accuracies(training, ranks);
    assert_eq!(found.len(), ranks, "{training}");
    assert!(found.iter().all(|accuracy| *accuracy == found[0]), "{training}: {found:?} differ");
    assert!(found[0] > 65.0, "{training} on {ranks} ranks: {found:?}");
}

#[test]
fn the_learner_learns_on_one_and_on_two_ranks() {
    learns("learner", 1);
    learns("learner", 2);
    learns("wrapped", 2);
}

#[test]
fn the_loop_in_burn_learns_on_one_and_on_two_ranks() {
    learns("burn", 1);
    learns("burn", 2);
}

#[test]
fn the_loop_in_candle_learns_on_one_and_on_two_ranks() {
    learns("candle", 1);
    learns("candle", 2);
}

#[test]
fn a_learner_that_fails_is_a_program_that_fails() {
    for (training, ranks) in [("learner", 1), ("learner", 2), ("wrapped", 2)] {
        let directory = tempfile::tempdir().unwrap();
        // No checkpoint can be written there.
        std::fs::create_dir_all(directory.path().join("runs/learner")).unwrap();
        std::fs::write(directory.path().join("runs/learner/checkpoint"), "a file").unwrap();
        let (succeeded, out, err) = run(directory.path(), training, ranks);
        assert!(!succeeded, "{training}: {out}{err}");
        assert!(!out.contains("test accuracy"), "{training}: {out}");
    }
}
