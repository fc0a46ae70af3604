//! The file of `--report`.

use std::fs;

use serde_json::Value;

use crate::launch::{Ended, Launch};

/// How a job of two ranks ended that runs this script, and what its report says.
fn run(options: &[&str], script: &str) -> (Ended, Value) {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("report.json");
    let report = format!("--report={}", path.display());
    let words = [&report, "--nproc-per-node", "2"].into_iter().chain(options.iter().copied());
    let ended = Launch::new(words.chain(["--", "sh", "-c", script])).start().end();
    let text = fs::read_to_string(&path).unwrap();
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1, "nothing is left beside it");
    (ended, serde_json::from_str(&text).unwrap())
}

#[test]
fn the_report_tells_how_each_rank_ended_and_who_was_first() {
    let script = "[ $RANK = 1 ] && { echo out of patience >&2; exit 7; }; exec sleep 100";
    let (ended, report) = run(&[], script);
    assert_eq!((ended.code, &report["exit_code"]), (7, &7.into()));
    assert_eq!(
        (&report["first_failure"], &report["stderr"][0]),
        (&1.into(), &"out of patience".into())
    );
    assert!(report["stopped_by"].is_null() && report["error"].is_null());
    let ranks = report["ranks"].as_array().unwrap();
    let told: Vec<_> = ranks.iter().map(|rank| (&rank["exit_code"], &rank["told"])).collect();
    assert_eq!(told, [(&(-15).into(), &"SIGTERM".into()), (&7.into(), &Value::Null)]);
    for (number, rank) in ranks.iter().enumerate() {
        assert_eq!((&rank["rank"], &rank["local_rank"]), (&number.into(), &number.into()));
        assert!(rank["pid"].as_u64().unwrap() > 1 && rank["ended_at"].as_f64().unwrap() > 1.7e9);
    }
}

#[test]
fn after_a_restart_the_report_is_about_the_last_world() {
    let script = "exit $((3 * (1 - TORCHELASTIC_RESTART_COUNT)))";
    let (ended, report) = run(&["--max-restarts", "1", "--restart-delay", "0"], script);
    assert_eq!((ended.code, &report["exit_code"], &report["restarts"]), (0, &0.into(), &1.into()));
    assert!(report["first_failure"].is_null());
}

#[test]
fn the_report_has_the_launchers_own_error_and_the_signal_that_stopped_it() {
    // Above rank 0 is the keeper, and above that the launcher.
    let script = "[ $RANK = 0 ] && kill -TERM $(awk '{print $4}' /proc/$PPID/stat); exec sleep 100";
    let (ended, report) = run(&["--max-restarts", "1"], script);
    assert_eq!((ended.code, &report["stopped_by"]), (143, &"SIGTERM".into()), "{}", ended.stderr);

    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("report.json");
    let report = format!("--report={}", path.display());
    let ended = Launch::new([report.as_str(), "--", "no-such-program"]).start().end();
    let report: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!((ended.code, &report["exit_code"]), (127, &127.into()));
    assert!(report["error"].as_str().unwrap().contains("no-such-program not found"));
}
