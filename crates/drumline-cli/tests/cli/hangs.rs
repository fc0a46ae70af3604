//! Ranks that hang.

use std::{env, thread, time::Duration};

use drumline::{Step, step};

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
    let how = ") hung: it began step 2 and no other within 500ms (--step-timeout) [errors.md#the-launcher]";
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
