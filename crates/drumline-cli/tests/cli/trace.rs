//! Traces of jobs of real processes, through the command line.

use std::{
    collections::BTreeMap,
    env, fs,
    path::Path,
    process::{Command, Output},
    thread,
    time::Duration,
};

use drumline::{ProcessGroup, ReduceOp, rendezvous::is_launched};
use rustix::process::{Signal, getpid, kill_process};
use serde_json::Value;
use tempfile::TempDir;

const CALLS: u64 = 20;

/// The program of a rank. Outside of a job, as a test, it does nothing.
#[test]
fn rank() {
    if !is_launched() {
        return;
    }
    let group = ProcessGroup::from_env().unwrap();
    for call in 0..CALLS {
        let mut data = vec![1.0_f32; 1 + call as usize * 1_000];
        group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    }
    if group.rank() == 1 && env::var_os("TRACE_TEST_KILL").is_some() {
        // Waits until the last call is on disk.
        let file = Path::new(&env::var("DRUMLINE_TRACE").unwrap()).join("rank-1.json");
        let last = format!("\"sequence\":{}", CALLS - 1);
        while !fs::read_to_string(&file).unwrap().contains(&last) {
            thread::sleep(Duration::from_millis(5));
        }
        kill_process(getpid(), Signal::KILL).unwrap();
    }
    group.barrier().unwrap();
    group.destroy().unwrap();
}

fn drumline(arguments: &[&str], variables: &[(&str, &Path)]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_drumline"))
        .args(arguments)
        .envs(variables.iter().copied())
        .env_remove("RUST_LOG")
        .output()
        .unwrap()
}

/// A job of three ranks that writes to `dir`.
fn job(dir: &Path, variables: &[(&str, &Path)]) -> Output {
    let program = env::current_exe().unwrap();
    let program = program.to_str().unwrap();
    let run = ["run", "--nproc-per-node", "3", "--no-torch-store", "--kill-after", "60s", "--"];
    // Ranks that lose a peer write that down and end by themselves. On a busy machine SIGTERM would come before.
    let patient = ["env", "--ignore-signal=TERM"];
    let rank = [program, "--exact", "trace::rank", "--nocapture"];
    let arguments = [&run[..], &patient, &rank].concat();
    drumline(&arguments, &[&[("DRUMLINE_TRACE", dir)], variables].concat())
}

fn merged(dir: &Path) -> Vec<Value> {
    let out = dir.join("all ranks.json");
    let output =
        drumline(&["trace", "merge", dir.to_str().unwrap(), "-o", out.to_str().unwrap()], &[]);
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("events of 3 ranks"), "{output:?}");
    serde_json::from_slice(&fs::read(out).unwrap()).unwrap()
}

/// What a page holds for its program: what stands between the marks of `page.html`.
fn page(dir: &Path) -> Value {
    let output = drumline(&["trace", "page", dir.to_str().unwrap()], &[]);
    assert!(output.status.success(), "{output:?}");
    let text = fs::read_to_string(dir.join("trace.html")).unwrap();
    let mark = r#"<script type="application/json" id="trace">"#;
    let (before, data) = text.split_once(mark).unwrap();
    // The first end, as a browser sees it.
    let (data, behind) = data.split_once("</").unwrap();
    for from_elsewhere in ["http:", "https:", " src=", " href=", "import(", "fetch("] {
        let is_there = before.contains(from_elsewhere) || behind.contains(from_elsewhere);
        assert!(!is_there, "{from_elsewhere}");
    }
    serde_json::from_str(data).unwrap()
}

/// Collectives of a page by rank, as `calls` has those of the merged file; times are in nanoseconds.
fn calls_of_page(page: &Value) -> BTreeMap<u64, Vec<(&str, u64, i64, i64)>> {
    let mut calls = BTreeMap::<_, Vec<_>>::new();
    for row in page["rows"].as_array().unwrap() {
        let numbers: Vec<i64> =
            row["calls"].as_array().unwrap().iter().map(|it| it.as_i64().unwrap()).collect();
        for call in numbers.chunks_exact(8).filter(|call| call[6] >= 0) {
            let name = page["names"][call[0] as usize].as_str().unwrap();
            let calls = calls.entry(row["rank"].as_u64().unwrap()).or_default();
            calls.push((name, call[6] as u64, call[1], call[1] + call[2]));
        }
    }
    calls
}

/// Collectives by rank: (name, sequence, start, end).
fn calls(events: &[Value]) -> BTreeMap<u64, Vec<(&str, u64, f64, f64)>> {
    let mut calls = BTreeMap::<_, Vec<_>>::new();
    for event in events.iter().filter(|event| event["cat"] == "collective") {
        let start = event["ts"].as_f64().unwrap();
        calls.entry(event["pid"].as_u64().unwrap()).or_default().push((
            event["name"].as_str().unwrap(),
            event["args"]["sequence"].as_u64().unwrap(),
            start,
            start + event["dur"].as_f64().unwrap(),
        ));
    }
    calls
}

#[test]
fn all_ranks_of_a_job_are_shown_below_each_other() {
    let dir = TempDir::new().unwrap();
    let output = job(dir.path(), &[]);
    assert!(output.status.success(), "{output:?}");
    for rank in 0..3 {
        let text = fs::read(dir.path().join(format!("rank-{rank}.json"))).unwrap();
        assert!(serde_json::from_slice::<Vec<Value>>(&text).is_ok(), "a file of its own is whole");
    }
    let events = merged(dir.path());
    let of_process = |name: &str| -> Vec<_> {
        let named = events.iter().filter(|event| event["name"] == name);
        named.map(|event| (event["pid"].as_u64().unwrap(), event["args"].to_string())).collect()
    };
    assert_eq!(of_process("process_name").len(), 3);
    for (rank, arguments) in of_process("process_sort_index") {
        assert_eq!(arguments, format!("{{\"sort_index\":{rank}}}"));
    }
    let calls = calls(&events);
    let names = |rank| -> Vec<_> { calls[&rank].iter().map(|it| (it.0, it.1)).collect() };
    assert_eq!(names(0).len() as u64, CALLS + 1);
    assert_eq!((names(1), names(2)), (names(0), names(0)), "every rank has made the same calls");
    for call in 0..calls[&0].len() {
        // No rank gets the sum before all ranks have begun. The clocks of a virtual machine's cores
        // may differ by some microseconds.
        let begun = calls.values().map(|it| it[call].2).fold(f64::MIN, f64::max);
        let ended = calls.values().map(|it| it[call].3).fold(f64::MAX, f64::min);
        assert!(begun <= ended + 50.0, "call {call} has begun at {begun} and ended at {ended}");
    }
    let arrows = events.iter().filter(|event| event["cat"] == "same call").count() as u64;
    assert_eq!(arrows, 3 * (CALLS + 1));

    let page = page(dir.path());
    let drawn = calls_of_page(&page);
    // Times of the page begin with the first event.
    let zero = calls[&0][0].2 - drawn[&0][0].2 as f64 / 1_000.0;
    for (rank, calls) in &calls {
        let expected: Vec<_> =
            calls.iter().map(|it| (it.0, it.1, it.2 - zero, it.3 - zero)).collect();
        let near = |ns: i64, us: f64| (ns as f64 / 1_000.0 - us).abs() < 0.002;
        assert_eq!(drawn[rank].len(), expected.len());
        for (it, expected) in drawn[rank].iter().zip(&expected) {
            assert_eq!((it.0, it.1), (expected.0, expected.1), "rank {rank}");
            assert!(near(it.2, expected.2) && near(it.3, expected.3), "{it:?}, {expected:?}");
        }
    }
    let rows = page["rows"].as_array().unwrap();
    for rank in 0..3 {
        let row = rows.iter().find(|row| row["rank"] == rank && row["group"] == 0).unwrap();
        let calls: Vec<Value> = serde_json::from_value(row["calls"].clone()).unwrap();
        for call in calls.chunks_exact(8) {
            let sequence = call[6].as_u64().unwrap() as usize;
            let starts: Vec<i64> = drawn.values().map(|calls| calls[sequence].2).collect();
            let (last, own) = (starts.iter().max().unwrap(), &drawn[&rank][sequence]);
            assert_eq!(call[4], (*last.min(&own.3) - own.2).max(0), "waited for the last");
            assert_eq!(starts[call[5].as_u64().unwrap() as usize], *last, "that was the last");
        }
    }
    let bytes = |name: &str| -> u64 {
        let number = page["names"].as_array().unwrap().iter().position(|it| it == name).unwrap();
        let numbers = rows.iter().flat_map(|row| row["calls"].as_array().unwrap().chunks_exact(8));
        numbers.filter(|call| call[0] == number).map(|call| call[3].as_u64().unwrap()).sum()
    };
    assert_eq!(bytes("all_reduce"), 3 * 4 * (0..CALLS).map(|call| 1 + call * 1_000).sum::<u64>());

    let output = drumline(&["trace", "summary", dir.path().to_str().unwrap()], &[]);
    let text = String::from_utf8(output.stdout).unwrap();
    println!("{text}");
    let row = text.lines().find(|line| line.starts_with("all_reduce ")).unwrap();
    assert_eq!(row.split_whitespace().nth(1), Some((3 * CALLS).to_string().as_str()));
    assert!(text.contains("came last") && text.contains("rendezvous"), "{text}");
}

#[test]
fn a_rank_that_was_killed_is_in_the_merged_file() {
    let dir = TempDir::new().unwrap();
    let output = job(dir.path(), &[("TRACE_TEST_KILL", Path::new("1"))]);
    assert_eq!(output.status.code(), Some(128 + 9), "{output:?}");
    let events = merged(dir.path());
    let calls = calls(&events);
    assert_eq!(calls[&1].len() as u64, CALLS);
    let failures: Vec<_> = events.iter().filter(|event| event["name"] == "failed").collect();
    assert!(
        failures.iter().any(|it| it["args"]["text"].to_string().contains("rank 1")),
        "{failures:?}"
    );
    let page = page(dir.path());
    assert_eq!(calls_of_page(&page)[&1].len() as u64, CALLS);
    let marks = page["marks"].as_array().unwrap();
    assert!(marks.iter().any(|it| it[2] == "failed" && it[3].to_string().contains("rank 1")));
}

#[test]
fn names_of_other_ranks_are_text_on_the_page() {
    let dir = TempDir::new().unwrap();
    let hostile = "</script><!--<script>alert(1)</script><img src=x onerror=alert(1)>&quot;";
    let file = include_str!("hostile-rank.json").replace("NAME", hostile);
    fs::write(dir.path().join("rank-0.json"), file).unwrap();
    let page = page(dir.path());
    let call = &page["rows"][0];
    assert_eq!(
        (&page["names"][0], &call["name"], &page["marks"][0][3]),
        (&hostile.into(), &hostile.into(), &hostile.into())
    );
    assert!(page["ranks"][0][1].as_str().unwrap().contains(hostile), "{page}");
}

#[test]
fn what_cannot_be_read_is_named() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().to_str().unwrap();
    let output = drumline(&["trace", "merge", path], &[]);
    assert_eq!(output.status.code(), Some(1));
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        stderr.starts_with(&format!("drumline: trace {path}: no file rank-N.json")),
        "{stderr}"
    );
    fs::write(dir.path().join("rank-0.json"), "[\n{}\n]\n").unwrap();
    let output = drumline(&["trace", "summary", path], &[]);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(stderr.contains("rank-0.json, line 2: this is no trace"), "{stderr}");
}
