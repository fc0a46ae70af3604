//! Who hears what happens to a job.

use std::{
    env, fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixDatagram},
    },
    path::Path,
    process::Command,
    thread,
    time::Duration,
};

use drumline::{Step, step};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::{
    hangs::python_with_torch,
    launch::{HANG, Launch, eventually},
};

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
    let shared = TempDir::new().unwrap();
    let pipe = shared.path().join("events.pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    // The reader may come later.
    for (place, why, code) in [
        ("/nowhere/events", "No such file or directory", 2),
        (pipe.to_str().unwrap(), "it is a pipe that no process reads", 1),
        (shared.path().to_str().unwrap(), "Is a directory", 2),
    ] {
        let ended = Launch::new(["--events", place, "echo", "started"]).start().end();
        assert_eq!((ended.code, &ended.stdout[..]), (code, &b""[..]), "{}", ended.stderr);
        let told = format!("open {place} for events: {why}");
        assert!(ended.stderr.contains(&told), "{}", ended.stderr);
    }
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

/// The program of a rank: it begins one step, and then waits. Outside of a job, as a test, it does nothing.
#[test]
fn rank_in_step_17() {
    if env::var("RANK").is_err() {
        return;
    }
    assert_eq!(step(17), Step::Continue);
    println!("begun");
    thread::sleep(Duration::from_secs(1000));
}

/// The address at which this job answers.
fn address(events: &Path) -> String {
    let first = || fs::read_to_string(events).ok()?.lines().next().map(str::to_owned);
    eventually("the job begins", || first().is_some());
    let event: Value = serde_json::from_str(&first().unwrap()).unwrap();
    event["metadata"]["health"].as_str().unwrap().to_owned()
}

/// Sends this to the address, and returns the answer.
fn ask(address: &str, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(HANG)).unwrap();
    stream.write_all(request).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn get(address: &str, path: &str) -> String {
    ask(address, format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes())
}

#[test]
fn health_and_metrics_are_told_over_http() {
    let shared = TempDir::new().unwrap();
    let events = shared.path().join("events.jsonl");
    let this = env::current_exe().unwrap();
    let program = [this.to_str().unwrap(), "--exact", "monitoring::rank_in_step_17", "--nocapture"];
    let options = ["--nproc-per-node", "2", "--health-port", "0", "--rdzv-id", "job-7"];
    let restarts = ["--max-restarts", "1", "--restart-delay", "60m..60m"];
    let to = ["--events", events.to_str().unwrap(), "--"];
    let all = options.iter().chain(&restarts).chain(&to).chain(&program);
    let mut started = Launch::new(all).start();
    started.wait_for("begun", 2);
    let address = address(&events);
    assert!(address.starts_with("127.0.0.1:"), "{address}");

    let answer = get(&address, "/health");
    assert!(
        answer.starts_with("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"),
        "{answer}"
    );
    let body: Value = serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap();
    assert_eq!((&body["state"], &body["run_id"]), (&"running".into(), &"job-7".into()));
    assert_eq!((&body["ranks_running"], &body["restarts"]), (&2.into(), &0.into()));
    let metrics = || get(&address, "/metrics");
    let has = |line: &str| metrics().lines().any(|it| it == line);
    eventually("the steps are told", || has("drumline_rank_last_step{rank=\"1\"} 17"));
    for line in ["drumline_ranks_running 2", "drumline_worlds_total 1", "drumline_healthy 1"] {
        assert!(has(line), "{line} is not in {}", metrics());
    }

    // Who is slow, or many, only holds up himself.
    let mut slow: Vec<TcpStream> =
        (0..100).map(|_| TcpStream::connect(&address).unwrap()).collect();
    slow.iter_mut().for_each(|stream| {
        let _ = stream.write_all(b"GET /hea");
    });
    assert!(get(&address, "/healthz").starts_with("HTTP/1.1 200 "));
    assert!(ask(&address, b"\x16\x03\x01 garbage\n").starts_with("HTTP/1.1 400 "));
    assert!(ask(&address, b"POST /health HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
    assert!(get(&address, "/").starts_with("HTTP/1.1 404 "));

    let pid = told(&events, &["worker_id"]);
    let pid = pid.iter().find_map(|line| line.strip_prefix("worker_starts ")).unwrap();
    assert!(Command::new("kill").args(["-9", pid]).status().unwrap().success());
    eventually("the failure is seen", || get(&address, "/health").starts_with("HTTP/1.1 503 "));
    assert!(get(&address, "/health").contains("\"healthy\":false,\"state\":\"failed\""));
    // The world ends now, or the job pauses already.
    started.signal(Signal::TERM);
    let ended = started.end();
    assert!([143, 137].contains(&ended.code), "{}", ended.stderr);
}

#[test]
fn the_port_is_taken_from_torchs_variable_and_one_in_use_is_refused() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let launch = Launch::new(["echo", "started"]).variable("TORCHELASTIC_HEALTH_CHECK_PORT", &port);
    let ended = launch.start().end();
    assert_eq!((ended.code, &ended.stdout[..]), (1, &b""[..]));
    let what = format!("listen at 127.0.0.1:{port} for questions about the health (--health-port)");
    assert!(ended.stderr.contains(&what), "{}", ended.stderr);
    let bad = Launch::new(["echo", "started"]).variable("TORCHELASTIC_HEALTH_CHECK_PORT", "http");
    let ended = bad.start().end();
    assert_eq!((ended.code, &ended.stdout[..]), (2, &b""[..]));
    assert!(
        ended.stderr.contains("TORCHELASTIC_HEALTH_CHECK_PORT=http: give a port"),
        "{}",
        ended.stderr
    );
}

#[test]
fn a_service_manager_hears_how_the_job_is() {
    let shared = TempDir::new_in("/tmp").unwrap(); // a socket's path is at most 107 bytes long
    let path = shared.path().join("notify");
    let name = format!("drumline-test-{}", std::process::id());
    let abstract_address = SocketAddr::from_abstract_name(&name).unwrap();
    let sockets = [
        (path.to_str().unwrap().to_owned(), UnixDatagram::bind(&path).unwrap()),
        (format!("@{name}"), UnixDatagram::bind_addr(&abstract_address).unwrap()),
    ];
    for (named, socket) in sockets {
        socket.set_read_timeout(Some(HANG)).unwrap();
        let next = || {
            let mut bytes = [0; 4096];
            let count = socket.recv(&mut bytes).expect("the message does not come");
            String::from_utf8(bytes[..count].to_vec()).unwrap()
        };
        let wait_for = |part: &str| loop {
            let message = next();
            if message.contains(part) {
                return message;
            }
        };
        let script = "echo ${NOTIFY_SOCKET-none} ${WATCHDOG_USEC-none}; exec sleep 1000";
        let launch = Launch::new(["--nproc-per-node", "2", "--", "sh", "-c", script]);
        let launch = launch.variable("NOTIFY_SOCKET", &named).variable("WATCHDOG_USEC", "100000");
        let mut started = launch.start();
        assert_eq!(wait_for("READY=1"), "READY=1\nSTATUS=2 of 2 ranks of this host run");
        for _ in 0..3 {
            assert_eq!(wait_for("WATCHDOG"), "WATCHDOG=1");
        }
        started.wait_for("none none", 2);
        started.signal(Signal::TERM);
        assert_eq!(wait_for("STOPPING"), "STOPPING=1\nSTATUS=is being stopped");
        assert_eq!(started.end().code, 128 + 15);
    }
}

#[test]
fn a_service_manager_that_is_not_there_is_told_once() {
    let launch = Launch::new(["true"]).variable("NOTIFY_SOCKET", "/nowhere/notify");
    let ended = launch.start().end();
    assert_eq!(ended.code, 0);
    assert_eq!(ended.stderr.matches("NOTIFY_SOCKET").count(), 1, "{}", ended.stderr);
}
