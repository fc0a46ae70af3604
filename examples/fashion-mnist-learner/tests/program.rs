//! The program as a user starts it: alone, and as a job of two processes.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    path::Path,
    process::{Command, Output, Stdio},
};

use drumline_testing::eventually;
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

/// A job of this program.
fn job(directory: &Path, ranks: &str, arguments: &[&str]) -> Command {
    let launcher = Path::new(PROGRAM).with_file_name("drumline");
    assert!(launcher.exists(), "build it first: cargo build -p drumline-cli");
    let mut command = Command::new(launcher);
    command.current_dir(directory).env_clear().args(["run", "--nproc-per-node", ranks, PROGRAM]);
    command.args(arguments);
    command
}

/// The same on two ranks.
fn on_two(directory: &Path, arguments: &[&str]) -> String {
    last_line(&job(directory, "2", arguments).output().unwrap())
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

#[test]
fn shards_give_one_result_on_any_number_of_ranks_also_if_one_is_killed() {
    let arguments = ["--epochs", "2", "--batch-size", "4", "--shards", "8"];
    let directories: [TempDir; 3] = std::array::from_fn(|_| TempDir::new().unwrap());
    let [one, three, killed] = directories.each_ref().map(TempDir::path);
    // A launcher writes the rank in front.
    let digest = |line: String| line.rsplit_once("parameters: ").unwrap().1.to_owned();
    let expected = digest(alone(one, &arguments));
    assert_eq!(digest(last_line(&job(three, "3", &arguments).output().unwrap())), expected);

    let mut job = job(killed, "3", &arguments);
    let job = job.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Rank 0 has begun to train. Another one does then what it did.
    let begun = killed.join("runs/fashion-mnist-learner/train/epoch-1/Loss.log");
    eventually("the ranks to train", || begun.exists());
    let is_rank_0 = |process: &Path| {
        let variables = fs::read(process.join("environ")).unwrap_or_default();
        let is_here = fs::read_link(process.join("cwd")).is_ok_and(|it| it == killed);
        is_here && variables.split(|it| *it == 0).any(|it| it == b"RANK=0")
    };
    let mut processes = fs::read_dir("/proc").unwrap().map(|it| it.unwrap().path());
    let rank_0 = processes.find(|it| is_rank_0(it)).unwrap();
    let number = rank_0.file_name().unwrap();
    assert!(Command::new("kill").arg("-9").arg(number).status().unwrap().success());
    let output = job.wait_with_output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(told.contains("the job had gone on without: 0 (SIGKILL)"), "{told}");
    assert_eq!(digest(last_line(&output)), expected);
    assert!(accuracy(killed, 2) > 50.0);
}
