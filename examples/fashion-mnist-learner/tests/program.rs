//! The program as a user starts it: alone, and as a job of two processes.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_fashion-mnist-learner");

/// The last line of a program that has succeeded.
fn last_line(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text.lines().last().unwrap().to_owned()
}

/// Runs the program in `directory`, with the built-in digits.
fn alone(directory: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new(PROGRAM);
    last_line(&command.current_dir(directory).env_clear().args(arguments).output().unwrap())
}

/// The same on two ranks.
fn on_two(directory: &Path, arguments: &[&str]) -> String {
    let launcher = Path::new(PROGRAM).with_file_name("drumline");
    assert!(launcher.exists(), "build it first: cargo build -p drumline-cli");
    let mut command = Command::new(launcher);
    command.current_dir(directory).env_clear().args(["run", "--nproc-per-node", "2", PROGRAM]);
    last_line(&command.args(arguments).output().unwrap())
}

/// The accuracy of the last validation of epoch `epoch`.
fn accuracy(directory: &Path, epoch: usize) -> f64 {
    let path = format!("runs/fashion-mnist-learner/valid/epoch-{epoch}/Accuracy.log");
    let text = fs::read_to_string(directory.join(path)).unwrap();
    let value = text.lines().last().unwrap().split(',').next().unwrap();
    value.parse().unwrap()
}

#[test]
fn it_learns_alone_and_on_two_ranks() {
    for run in [alone, on_two] {
        let directory = TempDir::new().unwrap();
        let line = run(directory.path(), &["--epochs", "2"]);
        assert!(line.contains("parameters: "), "{line}");
        let accuracy = accuracy(directory.path(), 2);
        assert!(accuracy > 70.0, "{accuracy} % after two epochs");
        let checkpoints = directory.path().join("runs/fashion-mnist-learner/checkpoint");
        assert!(checkpoints.join("model-2.bpk").exists());
    }
}

#[test]
fn two_ranks_resume_at_an_epoch() {
    let directory = TempDir::new().unwrap();
    on_two(directory.path(), &["--epochs", "1"]);
    on_two(directory.path(), &["--epochs", "2", "--resume", "1"]);
    assert!(accuracy(directory.path(), 2) > 70.0);
}
