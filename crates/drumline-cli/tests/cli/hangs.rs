//! Ranks that hang.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Duration,
};

use drumline::{Step, step};

use tempfile::TempDir;

use crate::launch::{Ended, Launch};

/// A job of two ranks that run the test `rank` of this file.
fn job(options: &[&str], rank: &str) -> Launch {
    let this = env::current_exe().unwrap();
    let ranks = ["--nproc-per-node", "2", "--", this.to_str().unwrap(), "--exact"];
    let program = [format!("hangs::{rank}"), "--nocapture".into()];
    let options = options.iter().copied().chain(ranks).map(str::to_owned);
    Launch::new(options.chain(program))
}

fn line<'a>(ended: &'a Ended, part: &str) -> &'a str {
    let line = ended.stderr.lines().find(|line| line.contains(part));
    line.unwrap_or_else(|| panic!("no {part:?} in {}", ended.stderr))
}

/// The program of a rank. Outside of a job, as a test, it does nothing.
#[test]
fn rank_1_hangs_in_step_2() {
    let Ok(rank) = env::var("RANK") else { return };
    for number in 0.. {
        assert_eq!(step(number), Step::Continue);
        if rank == "1" && number == 2 {
            thread::sleep(Duration::from_secs(1000));
        }
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_rank_that_begins_no_further_step_is_named_and_the_job_fails() {
    let ended = job(&["--step-timeout", "500ms"], "rank_1_hangs_in_step_2").start().end();
    assert_eq!(ended.code, 128 + 9, "{}", ended.stderr);
    let report = ended.report();
    assert!(report[0].starts_with("drumline: rank 1 (pid "), "{report:?}");
    let how = ") hung: it began step 2 and no other within 500ms (--step-timeout) (drumline explain the-launcher)";
    assert!(report[0].ends_with(how), "{report:?}");
    assert!(line(&ended, "the last steps").contains(": 1 (2); 0 ("), "{report:?}");
    assert!(line(&ended, "nanosleep").starts_with("    rank 1: "), "{report:?}");
    assert_eq!(*report.last().unwrap(), "drumline: ended the other ranks: 0 (SIGTERM)");
    assert!(!ended.stderr.contains("hint"), "{report:?}");
}

/// The program of a rank.
#[test]
fn rank_hangs_once() {
    let Ok(count) = env::var("TORCHELASTIC_RESTART_COUNT") else { return };
    assert_eq!(step(7), Step::Continue);
    if count == "0" {
        thread::sleep(Duration::from_secs(1000));
    }
}

#[test]
fn a_job_in_which_a_rank_hangs_starts_again() {
    let options = ["--step-timeout", "0.4", "--max-restarts", "1", "--restart-delay", "0"];
    let ended = job(&options, "rank_hangs_once").start().end();
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    assert!(line(&ended, ") hung: ").contains("it began step 7"), "{}", ended.stderr);
    // Both ranks hang in this step, and which one does first is not known.
    for rank in ["    rank 0: ", "    rank 1: "] {
        assert!(ended.stderr.lines().any(|line| line.starts_with(rank)), "{}", ended.stderr);
    }
    assert_eq!(line(&ended, ": restart "), "drumline: restart 1 of 1 now");
}

/// The program of a rank: it makes steps for some time.
#[test]
fn rank_makes_steps() {
    if env::var("RANK").is_err() {
        return;
    }
    for number in 0..100 {
        assert_eq!(step(number), Step::Continue);
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn ranks_that_go_on_or_make_no_steps_do_not_hang() {
    let ended = job(&["--step-timeout", "1500ms"], "rank_makes_steps").start().end();
    assert_eq!((ended.code, ended.stderr.as_str()), (0, ""));
    let silent = ["--step-timeout", "50ms", "--", "sleep", "0.7"];
    let ended = Launch::new(silent).start().end();
    assert_eq!((ended.code, ended.stderr.as_str()), (0, ""));
}

#[test]
fn no_step_takes_no_time() {
    let ended = Launch::new(["--step-timeout", "0", "true"]).start().end();
    assert_eq!(ended.code, 2);
    assert!(ended.stderr.contains("--step-timeout: every step takes longer"), "{}", ended.stderr);
}

/// What the timers of torch write, without torch.
const TIMER: &str = r#"
import json, os, time

def write(data):
    with open(os.open(os.environ["TORCHELASTIC_TIMER_FILE"], os.O_WRONLY | os.O_NONBLOCK), "wb") as file:
        file.write(data)

def send(scope, when, signal=9):
    line = {"version": 1, "pid": os.getpid(), "scope_id": scope, "expiration_time": when, "signal": signal}
    write(json.dumps(line).encode() + b"\n")
"#;

/// Starts two ranks that run this program under this interpreter, with timers.
fn with_timers(python: &Path, options: &[&str], program: &str) -> Launch {
    let ranks = ["--nproc-per-node", "2", "--", python.to_str().unwrap(), "-c", program];
    Launch::new(options.iter().chain(&ranks)).variable("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
}

#[test]
fn a_timer_of_torch_that_expires_ends_its_process() {
    let program = format!(
        r#"{TIMER}
for n in range(20):
    send("step", time.time() + 0.5)
    time.sleep(0.005)
    send("step", -1, 0)
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    send("epoch 1", time.time() + 0.3)
    time.sleep(1000)
elif os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(1000)
"#
    );
    let restarts = ["--max-restarts", "1", "--restart-delay", "0"];
    let ended = with_timers(Path::new("python3"), &restarts, &program).start().end();
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    let first = line(&ended, "hung: ");
    assert!(first.starts_with("drumline: rank 1 (pid "), "{first}");
    let how = ") hung: the timer \"epoch 1\" has expired (SIGKILL, torch's expires) (drumline explain the-launcher)";
    assert!(first.ends_with(how), "{first}");
    assert!(line(&ended, "sleep").starts_with("    python3 ("), "{}", ended.stderr);
    assert_eq!(ended.stderr.matches("hung").count(), 1, "{}", ended.stderr);
}

#[test]
fn a_process_that_a_rank_has_started_may_have_a_timer_and_strangers_are_left_alone() {
    let mut stranger = Command::new("sleep").arg("1000").spawn().unwrap();
    let program = format!(
        r#"{TIMER}
if os.environ["RANK"] == "0":
    write(json.dumps({{"version": 1, "pid": {}, "scope_id": "x", "expiration_time": 1, "signal": 9}}).encode() + b"\n")
    if os.fork() == 0:
        send("child", time.time() + 0.2, 15)
time.sleep(1000)
"#,
        stranger.id()
    );
    let shared = TempDir::new().unwrap();
    let pipe = shared.path().join("timers");
    let launch = with_timers(Path::new("python3"), &[], &program);
    let ended = launch.variable("TORCHELASTIC_TIMER_FILE", pipe.to_str().unwrap()).start().end();
    assert_eq!(ended.code, 128 + 15, "{}", ended.stderr);
    let first = line(&ended, "hung: ");
    assert!(first.starts_with("drumline: rank 0 (pid "), "{first}");
    assert!(first.contains("the timer \"child\" of its process "), "{first}");
    assert!(stranger.try_wait().unwrap().is_none(), "the timer of a stranger was obeyed");
    stranger.kill().unwrap();
    stranger.wait().unwrap();
    assert!(!pipe.exists(), "the pipe is left");
}

#[test]
fn damaged_timers_are_told_once() {
    let program = format!(
        r#"{TIMER}
if os.environ["RANK"] == "0":
    for data in [b"garbage\n", b"\xff\n", b"{{}}\n", b"x" * 10000, b"\n", b'{{"pid": "one"}}\n']:
        write(data)
    send("after all", time.time() + 0.1)
time.sleep(1000)
"#
    );
    let ended = with_timers(Path::new("python3"), &[], &program).start().end();
    assert_eq!(ended.code, 128 + 9, "{}", ended.stderr);
    assert!(line(&ended, "hung: ").contains("\"after all\""), "{}", ended.stderr);
    assert_eq!(ended.stderr.matches("is no timer of torch's").count(), 1, "{}", ended.stderr);
    assert!(line(&ended, "is no timer").contains("garbage"), "{}", ended.stderr);
}

#[test]
fn a_file_in_place_of_the_pipe_is_not_touched() {
    let shared = TempDir::new().unwrap();
    let file = shared.path().join("precious");
    fs::write(&file, "data").unwrap();
    let launch = with_timers(Path::new("python3"), &[], "print('started')");
    let ended = launch.variable("TORCHELASTIC_TIMER_FILE", file.to_str().unwrap()).start().end();
    assert_eq!((ended.code, &ended.stdout[..]), (1, &b""[..]), "{}", ended.stderr);
    assert!(ended.stderr.contains("precious: there is something"), "{}", ended.stderr);
    assert_eq!(fs::read(file).unwrap(), b"data");
}

#[test]
fn unmodified_timers_of_torch_work() {
    let Some(python) = python_with_torch() else { return };
    let program = r#"
import os, time
import torch.distributed.elastic.timer as timer
timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
with timer.expires(after=60, scope="in time"):
    pass
if os.environ["RANK"] == "1":
    with timer.expires(after=0.5, scope="too late"):
        time.sleep(1000)
time.sleep(1000)
"#;
    let ended = with_timers(&python, &[], program).start().end();
    assert_eq!(ended.code, 128 + 9, "{}", ended.stderr);
    let first = line(&ended, "hung: ");
    assert!(first.starts_with("drumline: rank 1 (pid "), "{first}");
    assert!(first.contains("too late"), "{first}");
}

/// `DRUMLINE_TEST_PYTHON`, or what `make torch-venv` has installed.
pub(crate) fn python_with_torch() -> Option<PathBuf> {
    if let Some(python) = env::var_os("DRUMLINE_TEST_PYTHON") {
        return Some(python.into());
    }
    let environment = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/torch-venv");
    if !environment.join("installed").exists() {
        println!("skipped: there is no torch; `make torch-venv` installs it");
        return None;
    }
    Some(environment.join("bin/python"))
}

/// torchrun would end a job that waits in the kernel for so long. `--step-timeout` ends every hang.
#[test]
fn a_limit_for_waits_in_the_kernel_is_told_to_have_no_effect() {
    for (seconds, has_warned) in [("120", true), ("-1", false)] {
        let launch = Launch::new(["true"]);
        let launch = launch.variable("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", seconds);
        let ended = launch.start().end();
        let told =
            ended.stderr.contains("no effect here: TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT");
        assert_eq!((ended.code, told), (0, has_warned), "{}", ended.stderr);
    }
}
