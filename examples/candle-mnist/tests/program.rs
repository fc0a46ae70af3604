//! The program as a user starts it: alone, as a job of two processes, and killed and resumed.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

const PROGRAM: &str = env!("CARGO_BIN_EXE_candle-mnist");

/// The program in `directory` with the built-in digits, on `ranks` ranks.
fn command(directory: &Path, ranks: usize, arguments: &str) -> Command {
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
    // One thread: the matrices are small, and other tests run beside this one.
    command.current_dir(directory).env_clear().env("RAYON_NUM_THREADS", "1");
    command.args(arguments.split_whitespace());
    command
}

fn succeeds(mut command: Command) -> String {
    let output = command.output().unwrap();
    let [stdout, stderr] = [output.stdout, output.stderr].map(|it| String::from_utf8(it).unwrap());
    assert!(output.status.success(), "{command:?}: {stdout}{stderr}");
    stdout
}

/// The digests that the ranks print.
fn digests(stdout: &str) -> Vec<&str> {
    stdout.lines().filter_map(|line| Some(line.split_once("variables ")?.1)).collect()
}

/// The files of checkpoints in rising order.
fn checkpoints(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|it| it == "safetensors"))
        .collect();
    paths.sort();
    paths
}

fn accuracy(stdout: &str) -> f64 {
    let (_, after) = stdout.rsplit_once("test accuracy ").expect("no accuracy");
    after.split(' ').next().unwrap().parse().unwrap()
}

#[test]
fn alone_and_on_two_ranks_it_learns_and_the_ranks_end_equal() {
    let directory = tempfile::tempdir().unwrap();
    for ranks in [1, 2] {
        let arguments = format!("--limit 960 --epochs 2 --lr 0.002 --out out-{ranks}");
        let stdout = succeeds(command(directory.path(), ranks, &arguments));
        let digests = digests(&stdout);
        assert_eq!(digests.len(), ranks, "{stdout}");
        assert!(digests.iter().all(|digest| *digest == digests[0]), "{stdout}");
        assert!(accuracy(&stdout) > 65.0, "{stdout}");
    }
}

/// The processes of ranks in `directory`.
fn ranks_in(directory: &Path) -> Vec<Pid> {
    let directory = directory.canonicalize().unwrap();
    let ranks = fs::read_dir("/proc").unwrap().filter_map(|entry| {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let pid = Pid::from_raw(name.parse().ok()?)?;
        let its = fs::read_link(format!("/proc/{name}/cwd")).ok()?;
        let environment = fs::read(format!("/proc/{name}/environ")).unwrap_or_default();
        let is_rank = environment.split(|byte| *byte == 0).any(|it| it.starts_with(b"RANK="));
        (its == directory && is_rank).then_some(pid)
    });
    ranks.collect()
}

/// Kills a rank when the job has saved `more` steps. Returns whether the job was still running.
fn kill_after(job: &mut Child, directory: &Path, victim: usize, more: usize) -> bool {
    // Far more than anything here takes: it only tells a hang from slowness.
    const HANG: Duration = Duration::from_secs(120);
    let saved = || checkpoints(&directory.join("parts")).len();
    let (until, started) = (saved() + more, Instant::now());
    while saved() < until {
        if job.try_wait().unwrap().is_some() {
            return false;
        }
        assert!(started.elapsed() < HANG, "the job hangs");
        thread::sleep(Duration::from_millis(1));
    }
    if let Some(pid) = ranks_in(directory).into_iter().nth(victim) {
        let _ = kill_process(pid, Signal::KILL); // It may be faster than we are.
    }
    !job.wait().unwrap().success()
}

#[test]
fn a_job_that_is_killed_again_and_again_ends_with_the_same_bits() {
    let directory = tempfile::tempdir().unwrap();
    let run = |out: &str| {
        let common = "--limit 640 --epochs 3 --checkpoint-every 1 --keep 99";
        command(directory.path(), 2, &format!("{common} --out {out}"))
    };
    let whole = succeeds(run("whole"));
    let saved = checkpoints(&directory.path().join("whole"));
    assert_eq!(saved.len(), 30);
    // Weights are random and cannot be seeded in candle: both trainings share the first step.
    let parts = directory.path().join("parts");
    fs::create_dir(&parts).unwrap();
    fs::copy(&saved[0], parts.join(saved[0].file_name().unwrap())).unwrap();
    let mut kills = 0;
    for (victim, more) in [(0, 3), (1, 5), (0, 8)] {
        let mut job = run("parts").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        kills += usize::from(kill_after(&mut job, directory.path(), victim, more));
    }
    assert!(kills > 0, "no job was killed");
    let resumed = succeeds(run("parts"));
    assert_eq!(digests(&resumed), digests(&whole));
    let (ours, wanted) = (checkpoints(&parts), saved);
    assert_eq!(ours.len(), wanted.len());
    for (ours, wanted) in ours.iter().zip(&wanted) {
        assert!(fs::read(ours).unwrap() == fs::read(wanted).unwrap(), "{ours:?} differs");
    }
}

#[test]
fn a_data_set_that_is_not_there_is_an_error_on_every_rank() {
    let directory = tempfile::tempdir().unwrap();
    let output = command(directory.path(), 2, "--data nowhere").output().unwrap();
    assert!(!output.status.success());
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("nowhere holds no data set"), "{stderr}");
}
