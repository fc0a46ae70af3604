//! What ranks write into their error files, and what becomes of it, with real processes.

use std::{env, fs, path::Path};

use rustix::process::Signal;
use tempfile::TempDir;

use crate::launch::{Ended, Launch};

fn job(options: &[&str], script: &str) -> Launch {
    let shell = ["--nproc-per-node", "2", "--", "sh", "-c", script];
    Launch::new(options.iter().chain(&shell))
}

fn run(script: &str) -> Ended {
    job(&[], script).start().end()
}

/// A rank 1 that writes this and exits with 3. Rank 0 waits.
fn rank_1_writes(text: &str) -> String {
    format!(
        "[ $RANK = 1 ] || exec sleep 100; echo tail >&2; printf '{text}' > $TORCHELASTIC_ERROR_FILE; exit 3"
    )
}

/// What torch's `@record` writes.
const FAILURE: &str = r#"{"message": {"message": "ValueError: no data", "extraInfo": {"py_callstack":
    "Traceback (most recent call last):\\n  File x\\nValueError: no data\\n", "timestamp": "1764055200"}}}"#;

#[test]
fn the_report_has_the_traceback_of_the_first_failure_and_so_has_the_file_of_the_launcher() {
    let outer = TempDir::new().unwrap();
    let own = outer.path().join("error.json");
    let launch = job(&[], &rank_1_writes(FAILURE));
    let ended = launch.variable("TORCHELASTIC_ERROR_FILE", own.to_str().unwrap()).start().end();
    assert_eq!(ended.code, 3, "{}", ended.stderr);
    let report = ended.report();
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    assert!(report[0].starts_with("drumline: rank 1 (pid "), "{report:?}");
    assert!(report[0].contains(") exited with code 3 after "), "{report:?}");
    assert!(
        report[0].contains(&format!("Z on {host} (drumline explain the-launcher)")),
        "{report:?}"
    );
    let told = [
        "drumline: it wrote to its error file:",
        "    Traceback (most recent call last):",
        "      File x",
        "    ValueError: no data",
    ];
    assert_eq!(report[1..5], told);
    let json: serde_json::Value = serde_json::from_slice(&fs::read(&own).unwrap()).unwrap();
    assert_eq!(json["message"]["message"], "ValueError: no data");
    assert_eq!(json["message"]["errorCode"], 3);
    assert_eq!(json["message"]["extraInfo"]["timestamp"], "1764055200");
}

#[test]
fn each_rank_of_each_world_has_a_file_of_its_own_that_nobody_else_reads_and_that_goes() {
    let script = "echo $TORCHELASTIC_ERROR_FILE; d=${TORCHELASTIC_ERROR_FILE%/*/error.json}
        stat -c %a $d; ls -A $d/$RANK; echo x > $TORCHELASTIC_ERROR_FILE
        [ $TORCHELASTIC_RESTART_COUNT$RANK = 00 ] && { until [ -e $d/1/error.json ]; do sleep 0.01; done; exit 4; }
        [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exec sleep 100";
    let ended = job(&["--max-restarts", "1", "--restart-delay", "0"], script).start().end();
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    let mut paths = Vec::new();
    for (rank, lines) in ended.lines_by_rank() {
        let of_rank: Vec<_> = lines.iter().filter(|line| line.ends_with(".json")).collect();
        assert!(of_rank.iter().all(|path| path.ends_with(&format!("/{rank}/error.json"))));
        assert_eq!(lines.iter().filter(|line| **line == "700").count(), 2, "{lines:?}");
        // Two paths and two modes; no file was there before.
        assert_eq!((of_rank.len(), lines.len()), (2, 4), "{lines:?}");
        paths.extend(of_rank.into_iter().map(|path| (*path).to_owned()));
    }
    paths.sort();
    paths.dedup();
    assert_eq!(paths.len(), 4, "{paths:?}");
    assert!(paths.iter().all(|path| !Path::new(path).parent().unwrap().exists()));
}

#[test]
fn damaged_files_are_quoted_and_nothing_that_a_rank_puts_there_stops_the_launcher() {
    for (script, told) in [
        (rank_1_writes(r#"{"message": {"mess"#), "it is not JSON: EOF while parsing"),
        (rank_1_writes(r"\033[2J\377"), "it is not JSON: expected value"),
        (rank_1_writes(""), "it is empty"),
        (rank_1_writes("[]"), "it is no object of JSON"),
    ] {
        let ended = run(&script);
        assert_eq!(ended.code, 3, "{}", ended.stderr);
        let report = ended.report();
        let why = format!("drumline: its error file is damaged: {told}");
        assert!(report[1].starts_with(&why), "{report:?}");
        assert!(report.contains(&"    tail"), "{report:?}");
        assert!(!ended.stderr.contains('\x1b'), "{report:?}");
    }
    for (put, told) in [
        ("truncate -s 1G $f", "it has more than 1 MiB"),
        ("mkfifo $f", "it is no regular file"),
        ("mkdir $f", "it is no regular file"),
        ("ln -s /dev/zero $f", "it is no regular file"),
        ("ln -s $f $f", "it cannot be read: Too many levels"),
    ] {
        let ended = run(&format!(
            "[ $RANK = 1 ] || exec sleep 100; f=$TORCHELASTIC_ERROR_FILE; {put}; exit 3"
        ));
        assert_eq!(ended.code, 3, "{}", ended.stderr);
        let why = format!("drumline: its error file is damaged: {told}");
        assert!(ended.report()[1].starts_with(&why), "{put}: {}", ended.stderr);
        assert!(ended.stderr.len() < 10_000);
    }
}

#[test]
fn a_rank_that_removes_its_directory_is_reported_as_any_other() {
    let ended =
        run("[ $RANK = 1 ] || exec sleep 100; rm -r ${TORCHELASTIC_ERROR_FILE%/*/*}; exit 3");
    assert_eq!(ended.code, 3, "{}", ended.stderr);
    assert_eq!(ended.report()[1], "drumline: it wrote nothing to its stderr");
}

#[test]
fn with_a_directory_for_logs_error_files_stay() {
    let logs = TempDir::new().unwrap();
    let dir = ["--log-dir", logs.path().to_str().unwrap()];
    let ended = job(&dir, &rank_1_writes(FAILURE)).start().end();
    assert_eq!(ended.code, 3, "{}", ended.stderr);
    let run = fs::read_dir(logs.path()).unwrap().next().unwrap().unwrap().path();
    let kept = fs::read_to_string(run.join("attempt_0/1/error.json")).unwrap();
    assert!(kept.contains("ValueError: no data"), "{kept}");
    // Rank 0 has written nothing.
    assert_eq!(fs::read_dir(run.join("attempt_0")).unwrap().count(), 1);
}

#[test]
fn the_private_directory_goes_also_if_the_launcher_is_killed() {
    let mut launch =
        job(&[], "echo x > $TORCHELASTIC_ERROR_FILE; echo ready; exec sleep 100").start();
    launch.wait_for("ready", 2);
    launch.signal(Signal::KILL);
    // `end` checks that no file is left.
    assert_eq!(launch.end().code, 128 + 9);
}

#[test]
fn a_place_for_temporary_files_that_is_not_there_is_told_and_the_job_goes_on() {
    let script = "echo ${TORCHELASTIC_ERROR_FILE-none}";
    let launch = job(&[], script).variable("TMPDIR", "/no/such/place");
    let ended = launch.variable("TORCHELASTIC_ERROR_FILE", "/outer").start().end();
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    assert_eq!(ended.sorted_stdout(), ["[0] none", "[1] none"]);
    assert!(ended.stderr.contains("in /no/such/place: "), "{}", ended.stderr);
}

#[test]
fn a_rank_that_dies_before_it_meets_the_others_is_named() {
    let drumline = env!("CARGO_BIN_EXE_drumline");
    let bench = format!("exec {drumline} bench all_reduce --sizes 8 --rounds 1");
    let ended = run(&format!("[ $RANK = 1 ] && exit 4; {bench}"));
    assert_eq!(ended.code, 4, "{}", ended.stderr);
    let report = ended.report();
    assert!(report[0].starts_with("drumline: rank 1 (pid "), "{report:?}");
    assert!(
        report.last().unwrap().starts_with("drumline: ended the other ranks: 0 ("),
        "{report:?}"
    );
}

/// What a rank says that has lost rank 1.
const LOST: &str = "group \"world\", rank 0: barrier, call #3, failed after 2.0ms: the process of rank 1 has ended; \
                    look at what rank 1 printed last (drumline explain peer_exited)";

/// Rank 0 fails first and has only lost rank 1. Whatever rank 1 does, it is the one that is reported.
#[test]
fn a_rank_that_has_only_lost_another_one_is_not_blamed() {
    let writes = format!("printf '{FAILURE}' > $TORCHELASTIC_ERROR_FILE");
    let exits = "exited with code 3";
    let upon = "failed, and did not end by itself: ";
    for (culprit, code, how) in [
        // It ends later, by itself or not.
        ("$go; exit 3".to_owned(), 3, exits),
        (format!("{writes}; $go; exit 3"), 3, exits),
        (format!("{writes}; $go; exec sleep 100"), 1, upon),
        ("$go; exec sleep 100".to_owned(), 1, upon),
        ("trap 'exit 7' TERM; $go; sleep 100 & wait".to_owned(), 1, upon),
        // The rank that lost it is the one that has failed.
        ("$go; exit 0".to_owned(), 1, ""),
    ] {
        let go = "go=\"touch ${TORCHELASTIC_ERROR_FILE%/*/*}/go\"";
        let lost =
            format!("until [ -e ${{go#* }} ]; do sleep 0.01; done; echo '{LOST}' >&2; exit 1");
        let script = format!("{go}; [ $RANK = 1 ] || {{ {lost}; }}; {culprit}");
        let ended = run(&script);
        let report = ended.report();
        let rank = if how.is_empty() { 0 } else { 1 };
        assert!(report[0].starts_with(&format!("drumline: rank {rank} (pid ")), "{report:?}");
        assert!(report[0].contains(how), "{culprit}: {report:?}");
        assert_eq!(ended.code, code, "{culprit}: {report:?}");
        let has_file = culprit.starts_with("printf");
        assert_eq!(report.contains(&"    ValueError: no data"), has_file, "{report:?}");
    }
}

/// The program of a rank that takes its time to end when it panics. Outside of a job, as a test, it does nothing.
#[test]
fn rank_that_panics_slowly() {
    struct Slow;
    impl Drop for Slow {
        fn drop(&mut self) {
            std::thread::sleep(std::time::Duration::from_millis(300));
        }
    }
    let Ok(rank) = env::var("RANK") else { return };
    drumline::train::record_panics();
    let _slow = Slow;
    let config = drumline::Config::from_env().unwrap();
    let group = drumline::init_process_group("env://", &config).unwrap();
    assert_ne!(rank, "1", "no data");
    group.barrier().unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn a_panic_of_rust_that_unwinds_slowly_is_the_first_failure() {
    let this = env::current_exe().unwrap();
    let program = [this.to_str().unwrap(), "--exact", "error_files::rank_that_panics_slowly"];
    let ended = Launch::new(["--nproc-per-node", "3", "--"].iter().chain(&program)).start().end();
    let report = ended.report();
    assert!(report[0].starts_with("drumline: rank 1 (pid "), "{report:?}");
    assert!(report.iter().any(|line| line.contains("no data")), "{report:?}");
}

/// The program of a rank. Outside of a job, as a test, it does nothing.
#[test]
fn rank_that_panics() {
    if env::var("RANK").as_deref() != Ok("1") {
        return;
    }
    drumline::train::record_panics();
    panic!("no data");
}

#[test]
fn a_panic_of_rust_is_in_the_report_with_its_backtrace() {
    let this = env::current_exe().unwrap();
    let program = [this.to_str().unwrap(), "--exact", "error_files::rank_that_panics"];
    let ended = Launch::new(["--nproc-per-node", "2", "--"].iter().chain(&program)).start().end();
    assert_eq!(ended.code, 101, "{}", ended.stderr);
    let report = ended.report();
    assert_eq!(report[1], "drumline: it wrote to its error file:");
    assert!(
        report[2].starts_with("    thread '") && report[2].contains("' panicked at "),
        "{report:?}"
    );
    assert_eq!(report[3..5], ["    no data", "    stack backtrace:"]);
    assert!(report[5].contains("rank_that_panics"), "{report:?}");
}

/// The program of a rank whose neighbour leaves early. Outside of a job, as a test, it does nothing.
#[test]
fn rank_that_returns_its_error() -> drumline::Result<()> {
    if env::var("RANK").is_err() {
        return Ok(());
    }
    let group = drumline::ProcessGroup::from_env()?;
    match group.rank() {
        0 => group.barrier(),
        _ => Ok(()),
    }
}

#[test]
fn an_error_that_main_returns_is_in_the_report_with_rank_advice_and_page() {
    let this = env::current_exe().unwrap();
    let test = "error_files::rank_that_returns_its_error";
    let program = [this.to_str().unwrap(), "--exact", test, "--nocapture"];
    let ended = Launch::new(["--nproc-per-node", "2", "--"].iter().chain(&program)).start().end();
    assert_ne!(ended.code, 0, "{}", ended.stderr);
    let report = ended.report().join("\n");
    let told = "Error: group \"world\", rank 0: barrier";
    assert!(report.contains(told), "{report}");
    let left =
        "rank 1 has closed the group and will not take part; it made fewer calls than this rank";
    assert!(report.contains(&format!("{left} (drumline explain peer_left)")), "{report}");
}
