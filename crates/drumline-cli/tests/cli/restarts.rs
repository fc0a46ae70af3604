//! Jobs that start again after a failure.

use std::{env, fs};

use drumline::{Step, step};
use rustix::process::Signal;

use crate::launch::{Ended, Launch, eventually};

fn run(options: &[&str], script: &str) -> Ended {
    let shell = ["--nproc-per-node", "2", "--", "sh", "-c", script];
    Launch::new(options.iter().chain(&shell)).start().end()
}

/// The report without its times and process numbers.
fn told<'a>(ended: &'a Ended, part: &str) -> Vec<&'a str> {
    ended.report().into_iter().filter(|line| line.contains(part)).collect()
}

#[test]
fn all_ranks_start_again_until_a_world_ends_well() {
    let script = "echo $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS
                  [ $RANK$TORCHELASTIC_RESTART_COUNT = 00 ] && exit 5
                  [ $RANK$TORCHELASTIC_RESTART_COUNT = 11 ] && kill -9 $$
                  [ $TORCHELASTIC_RESTART_COUNT = 2 ] || exec sleep 100";
    let ended = run(&["--max-restarts", "3", "--restart-delay", "0"], script);
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    for lines in ended.lines_by_rank().into_values() {
        assert_eq!(lines, ["0 of 3", "1 of 3", "2 of 3"]);
    }
    let restarts = told(&ended, ": restart ");
    assert_eq!(restarts, ["drumline: restart 1 of 3 now", "drumline: restart 2 of 3 now"]);
    assert!(told(&ended, "rank 0 (pid ")[0].contains("exited with code 5"), "{}", ended.stderr);
    assert!(told(&ended, "rank 1 (pid ")[0].contains("SIGKILL"), "{}", ended.stderr);
}

#[test]
fn the_last_failure_decides_the_exit_code_and_the_report_says_why_there_is_no_restart() {
    let ending = |options: &[&str], code: u8, script: &str| {
        let options = options.iter().copied().chain(["--restart-delay", "0"]);
        let ended = run(&options.collect::<Vec<_>>(), script);
        assert_eq!(ended.code, i32::from(code), "{}", ended.stderr);
        let last = ended.report().last().unwrap().to_string();
        (last, told(&ended, ": restart ").len())
    };
    let why = |text: &str| format!("drumline: the job does not start again: {text}");
    let script = "exit $((5 + TORCHELASTIC_RESTART_COUNT))";
    let once = ending(&["--max-restarts", "1"], 6, script);
    assert_eq!(once, (why("its restart is used up"), 1));
    let stillborn = ending(&["--max-restarts", "9"], 7, script);
    assert_eq!(stillborn, (why("it has failed 3 times in a row before its first step"), 2));
    let usage = ending(&["--max-restarts", "9"], 2, "exit 2");
    let text = "exit code 2 says that another start would end in the same way";
    assert_eq!(usage, (why(text), 0));
    let (last, restarts) = ending(&[], 5, script);
    assert!(last.starts_with("drumline: ") && !last.contains("again") && restarts == 0, "{last}");
}

/// The program of a rank. Outside of a job, as a test, it does nothing.
#[test]
fn rank_with_steps() {
    let Ok(count) = env::var("TORCHELASTIC_RESTART_COUNT") else { return };
    assert_eq!(step(0), Step::Continue);
    assert_eq!(step(1), Step::Continue);
    if count != "4" {
        std::process::exit(5);
    }
}

#[test]
fn a_job_that_makes_steps_may_use_up_its_restarts() {
    let this = env::current_exe().unwrap();
    let options = ["--max-restarts", "4", "--restart-delay", "0", "--nproc-per-node", "2", "--"];
    let program = [this.to_str().unwrap(), "--exact", "restarts::rank_with_steps", "--nocapture"];
    let ended = Launch::new(options.iter().chain(&program)).start().end();
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    assert_eq!(told(&ended, ": restart ").len(), 4);
}

#[test]
fn every_world_has_stores_of_its_own() {
    let script = "echo $DRUMLINE_STORE; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 5";
    let ended = run(&["--max-restarts", "1", "--restart-delay", "0"], script);
    for (_, stores) in ended.lines_by_rank() {
        assert!(stores.len() == 2 && stores[0] != stores[1], "{stores:?}");
    }
}

#[test]
fn ctrl_c_ends_the_pause_before_a_restart() {
    let root = tempfile::tempdir().unwrap();
    let told = root.path().join("events");
    let events = format!("--events={}", told.display());
    let options = [events.as_str(), "--max-restarts", "1", "--restart-delay", "60m..60m"];
    let shell = ["--", "sh", "-c", "exit 5"];
    let started = Launch::new(options.iter().chain(&shell)).start();
    let has_ended = || fs::read_to_string(&told).is_ok_and(|it| it.contains("world_ends"));
    eventually("the world has ended", has_ended);
    started.signal(Signal::INT);
    let ended = started.end();
    // Between the end of the world and the pause the launcher prints, and may be interrupted there.
    assert!([130, 5].contains(&ended.code), "{}", ended.stderr);
    assert!(ended.code == 5 || ended.stderr.contains("of 1 in 3600s"), "{}", ended.stderr);
}
