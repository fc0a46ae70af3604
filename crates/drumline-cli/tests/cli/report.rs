//! The file of `--report`.

use std::{
    fs,
    os::unix::fs::{FileTypeExt, symlink},
    path::Path,
    process::{Command, Output},
};

use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::Value;

use crate::launch::{Ended, FIND_LAUNCHER, Launch};

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
    let script = format!("{FIND_LAUNCHER} [ $RANK = 0 ] && kill -TERM $launcher; exec sleep 100");
    let (ended, report) = run(&["--max-restarts", "1"], &script);
    assert_eq!((ended.code, &report["stopped_by"]), (143, &"SIGTERM".into()), "{}", ended.stderr);

    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("report.json");
    let report = format!("--report={}", path.display());
    let ended = Launch::new([report.as_str(), "--", "no-such-program"]).start().end();
    let report: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!((ended.code, &report["exit_code"]), (127, &127.into()));
    assert!(report["error"].as_str().unwrap().contains("no-such-program not found"));
}

fn pipe_at(path: &Path) {
    mknodat(CWD, path, FileType::Fifo, Mode::RWXU, 0).unwrap();
}

/// A job with `--report=r.json` in this directory. `before` is a line of the shell that becomes the launcher: `$$` is the
/// launcher's process.
fn job_after(before: &str, directory: &Path) -> Output {
    let line = format!("{before}; exec $DRUMLINE run --report=r.json -- true");
    let mut shell = Command::new("sh");
    shell
        .args(["-c", &line])
        .current_dir(directory)
        .env("DRUMLINE", env!("CARGO_BIN_EXE_drumline"));
    shell.output().unwrap()
}

/// Where others may write, too, they may have put links or pipes at every name that they can foresee.
#[test]
fn a_report_goes_through_no_link_and_waits_for_no_pipe() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    fs::write(at("victim"), "precious").unwrap();
    symlink("victim", at("r.json")).unwrap();
    let planted = ["ln -s victim r.json.$$", "ln -s victim .r.json.$$", "mkfifo r.json.$$"];
    for before in planted {
        let ended = job_after(before, root.path());
        assert!(ended.status.success(), "{before}: {}", String::from_utf8_lossy(&ended.stderr));
        assert_eq!(fs::read(at("victim")).unwrap(), b"precious", "{before}");
        let report: Value = serde_json::from_slice(&fs::read(at("r.json")).unwrap()).unwrap();
        assert_eq!(report["exit_code"], 0, "{before}");
        assert!(fs::symlink_metadata(at("r.json")).unwrap().is_file(), "{before}");
    }
}

#[test]
fn a_report_that_cannot_be_written_is_refused_before_anything_starts() {
    let root = tempfile::tempdir().unwrap();
    pipe_at(&root.path().join("pipe"));
    for (place, why) in [
        (root.path().join("pipe"), "it is no regular file"),
        (root.path().to_owned(), "it is no regular file"),
        ("/dev/null".into(), "it is no regular file"),
        (root.path().join("none/r.json"), "No such file or directory"),
    ] {
        let report = format!("--report={}", place.display());
        let ended = Launch::new([report.as_str(), "echo", "started"]).start().end();
        assert_eq!((ended.code, &ended.stdout[..]), (2, &b""[..]), "{}", ended.stderr);
        assert!(ended.stderr.contains(why), "{}", ended.stderr);
    }
    assert!(fs::metadata("/dev/null").unwrap().file_type().is_char_device());
}
