//! Who hears what happens to a job.

use std::{fs, path::Path, process::Command};

use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::{hangs::python_with_torch, launch::Launch};

/// The name of each event, with what it says under these keys.
fn told(file: &Path, keys: &[&str]) -> Vec<String> {
    let text = fs::read_to_string(file).unwrap();
    let event = |line: &str| {
        let event: Value = serde_json::from_str(line).unwrap();
        assert_eq!(event["metadata"]["run_id"], "job-7", "{line}");
        assert!(event["timestamp"].as_u64().unwrap() > 1_600_000_000_000, "{line}");
        let values = keys.iter().map(|key| &event["metadata"][*key]);
        let values: Vec<_> = values.filter(|it| !it.is_null()).map(Value::to_string).collect();
        [event["name"].as_str().unwrap()]
            .into_iter()
            .map(str::to_owned)
            .chain(values)
            .collect::<Vec<_>>()
            .join(" ")
    };
    text.lines().map(event).collect()
}

/// A job that writes events to a file.
fn with_events(file: &Path, options: &[&str], script: &str) -> Launch {
    let events = ["--rdzv-id", "job-7", "--events", file.to_str().unwrap()];
    let shell = ["--", "sh", "-c", script];
    Launch::new(events.iter().chain(options).chain(&shell))
}

#[test]
fn events_tell_a_job_from_its_beginning_to_its_end() {
    let shared = TempDir::new().unwrap();
    let file = shared.path().join("events.jsonl");
    let options = ["--max-restarts", "1", "--restart-delay", "0"];
    let script = "[ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 5";
    let ended = with_events(&file, &options, script).start().end();
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    let keys = ["max_restarts", "agent_restarts", "global_rank", "exit_code", "outcome"];
    let told_first = told(&file, &keys);
    assert_eq!(
        told_first,
        [
            "job_begins 1",
            "world_starts 0",
            "worker_starts 0",
            "worker_ends 0 5",
            "world_ends 0 \"failed\"",
            "world_starts 1",
            "worker_starts 0",
            "worker_ends 0 0",
            "world_ends \"success\"",
            "job_ends 0",
        ]
    );
    // A second job adds its events.
    let mut started = with_events(&file, &[], "echo ready; exec sleep 100").start();
    started.wait_for("ready", 1);
    started.signal(Signal::TERM);
    assert_eq!(started.end().code, 128 + 15);
    let keys = ["signal", "outcome", "exit_code"];
    let second = &told(&file, &keys)[told_first.len()..];
    let expected = [
        "job_begins",
        "world_starts",
        "worker_starts",
        "job_is_stopped \"SIGTERM\"",
        "worker_ends \"SIGTERM\"",
        "world_ends \"stopped\"",
        "job_ends 143",
    ];
    assert_eq!(second, expected);
}

#[test]
fn a_rank_that_hangs_is_an_event() {
    let shared = TempDir::new().unwrap();
    let file = shared.path().join("events.jsonl");
    let write = r#"import os, time
pipe = os.open(os.environ["TORCHELASTIC_TIMER_FILE"], os.O_WRONLY | os.O_NONBLOCK)
os.write(pipe, b'{"pid": %d, "scope_id": "x", "expiration_time": 1, "signal": 9}\n' % os.getpid())
time.sleep(1000)"#;
    let script = format!("exec python3 -c '{}'", write.replace('\'', "'\"'\"'"));
    let launch = with_events(&file, &[], &script).variable("TORCHELASTIC_ENABLE_FILE_TIMER", "1");
    assert_eq!(launch.start().end().code, 128 + 9);
    let told = told(&file, &["how"]);
    let hang = told.iter().find(|line| line.starts_with("worker_hangs")).unwrap();
    assert!(hang.contains("has expired"), "{hang}");
}

#[test]
fn events_on_stderr_and_a_file_that_cannot_be_opened() {
    let ended = Launch::new(["--event-log-handler", "console", "true"]).start().end();
    assert_eq!(ended.code, 0);
    let first: Value = serde_json::from_str(ended.stderr.lines().next().unwrap()).unwrap();
    assert_eq!((&first["name"], &first["source"]), (&"job_begins".into(), &"AGENT".into()));
    let ended = Launch::new(["--events", "/nowhere/events", "echo", "started"]).start().end();
    assert_eq!((ended.code, &ended.stdout[..]), (1, &b""[..]));
    assert!(ended.stderr.contains("open /nowhere/events for events"), "{}", ended.stderr);
}

/// A pipe that nobody reads is full at some time. The job does not care.
#[test]
fn who_does_not_take_events_does_not_hold_up_the_job() {
    let shared = TempDir::new().unwrap();
    let pipe = shared.path().join("events.pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    // It is opened for reading and writing, so that opening it to write does not wait.
    let _reader = fs::OpenOptions::new().read(true).write(true).open(&pipe).unwrap();
    let options = ["--nproc-per-node", "512"];
    let ended = with_events(&pipe, &options, "exit 0").start().end();
    assert_eq!((ended.code, ended.stderr.as_str()), (0, ""));
}

#[test]
fn torch_reads_events() {
    let Some(python) = python_with_torch() else { return };
    let shared = TempDir::new().unwrap();
    let file = shared.path().join("events.jsonl");
    assert_eq!(with_events(&file, &[], "exit 0").start().end().code, 0);
    let program = "import sys\nfrom torch.distributed.elastic.events import Event, EventSource\n\
                   events = [Event.deserialize(line) for line in open(sys.argv[1])]\n\
                   workers = [it for it in events if it.source == EventSource.WORKER]\n\
                   print(len(events), [(it.name, it.metadata['exit_code']) for it in workers])";
    let read = Command::new(python).args(["-c", program]).arg(file).output().unwrap();
    assert_eq!(
        String::from_utf8_lossy(&read.stdout),
        "6 [('worker_ends', 0)]\n",
        "{}",
        String::from_utf8_lossy(&read.stderr)
    );
}
