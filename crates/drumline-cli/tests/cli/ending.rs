//! How a job of `drumline run` ends: failures, signals and ranks that hang.

use std::{
    fs,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use tempfile::TempDir;

use crate::launch::{HANG, Launch, eventually};

#[test]
fn the_first_failure_is_reported_and_its_code_returned() {
    let script = r#"
        if [ $RANK = 2 ]; then
            for i in $(seq 30); do echo "line $i" >&2; done
            exit 7
        fi
        exec sleep 100"#;
    let ended = Launch::script(4, script).end();
    assert_eq!(ended.code, 7);
    let report = ended.report();
    assert!(report[0].starts_with("drumline: rank 2 (pid "), "{report:?}");
    assert!(report[0].contains(") exited with code 7 after "), "{report:?}");
    assert_eq!(report[1], "drumline: last lines of its stderr:");
    let tail: Vec<_> = (11..=30).map(|i| format!("    line {i}")).collect();
    assert_eq!(report[2..22], tail);
    assert_eq!(report[22..], ["drumline: ended the other ranks: 0-1, 3 (SIGTERM)"]);
}

/// Its memory takes the kernel long to write, and the others have lost it long before it has ended.
#[test]
fn a_rank_that_crashes_slowly_is_blamed_and_its_core_file_is_complete() {
    if fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap().trim_end() != "core" {
        return eprintln!("skipped: core files go elsewhere");
    }
    let program = "import os, re, resource, signal, sys, time
if os.environ['RANK'] == '1':
    resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY,) * 2)
    memory = bytearray(os.urandom(1 << 20) * 500)
    open('pid.part', 'w').write(str(os.getpid()))
    os.rename('pid.part', 'pid')
    os.kill(os.getpid(), signal.SIGSEGV)
while not os.path.exists('pid'):
    time.sleep(0.001)
status = f\"/proc/{open('pid').read()}/status\"
while not re.search('CoreDumping:\\t1|State:\\t[ZX]', open(status).read()):
    pass
sys.exit('rank 0: the process of rank 1 has ended (drumline explain peer_exited)')";
    let mut launch = Launch::new(["--nproc-per-node", "2", "--", "python3", "-c", program]).start();
    let code = launch.wait();
    for entry in fs::read_dir(launch.directory.path()).unwrap().flatten() {
        fs::remove_file(entry.path()).unwrap();
    }
    let ended = launch.end();
    assert_eq!(code, 128 + 11, "{}", ended.stderr);
    let report = ended.report();
    assert!(report[0].starts_with("drumline: rank 1 (pid "), "{report:?}");
    assert!(report[0].contains("SIGSEGV") && report[0].contains("core"), "{report:?}");
}

#[test]
fn a_killed_rank_ends_the_job() {
    let ended = Launch::script(3, "[ $RANK = 1 ] && kill -9 $$; exec sleep 100").end();
    println!("kill -9 to the end of the launcher: {:?}", ended.took);
    assert_eq!(ended.code, 128 + 9);
    let report = ended.report();
    assert!(report[0].starts_with("drumline: rank 1 (pid "), "{report:?}");
    assert!(report[0].contains("was killed by signal 9 (SIGKILL) after "), "{report:?}");
    assert!(report[1].contains("dmesg"), "{report:?}");
    assert_eq!(*report.last().unwrap(), "drumline: ended the other ranks: 0, 2 (SIGTERM)");
}

#[test]
fn a_rank_that_gives_up_because_of_a_killed_peer_does_not_hide_it() {
    // Rank 0 exits as soon as rank 1 is gone, like a rank that loses a connection.
    let shared = TempDir::new().unwrap();
    let fifo = shared.path().join("peer");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let script = format!(
        "if [ $RANK = 0 ]; then cat {0} >/dev/null; exit 1; else exec >{0}; kill -9 $$; fi",
        fifo.display()
    );
    for _ in 0..5 {
        let ended = Launch::script(2, &script).end();
        assert_eq!(ended.code, 128 + 9, "{}", ended.stderr);
    }
}

#[test]
fn who_ignores_sigterm_is_killed() {
    let ready = TempDir::new().unwrap();
    let file = ready.path().join("ready");
    let script = format!(
        "if [ $RANK = 0 ]; then trap '' TERM; touch {0}; while :; do sleep 1; done; fi
         while [ ! -e {0} ]; do sleep 0.01; done; exit 3",
        file.display()
    );
    let args = ["--nproc-per-node", "2", "--kill-after", "100ms", "sh", "-c", &script];
    let ended = Launch::new(args).start().end();
    assert_eq!(ended.code, 3);
    assert_eq!(*ended.report().last().unwrap(), "drumline: ended the other ranks: 0 (SIGKILL)");
}

/// Rank 0 hangs behind a wrapper: one thread reads a pipe that nobody writes to, two sleep.
#[test]
fn a_rank_that_hangs_tells_where_before_it_is_killed() {
    let hangs = "import os, signal, threading, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(2): threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
reader, writer = os.pipe()
print('pipe', reader, flush=True)
os.read(reader, 1)";
    let ready = TempDir::new().unwrap();
    let file = ready.path().join("ready");
    let script = format!(
        "if [ $RANK = 0 ]; then trap '' TERM; python3 -c \"$1\" | tee {0}; exit; fi
         while ! grep -q pipe {0}; do sleep 0.01; done 2>/dev/null; exit 3",
        file.display()
    );
    let args = ["--nproc-per-node", "2", "--", "sh", "-c", &script, "sh", hangs];
    let ended = Launch::new(args).start().end();
    assert_eq!(ended.code, 3);
    let pipe = fs::read_to_string(&file).unwrap();
    let pipe = pipe.trim().trim_start_matches("pipe ");

    let report = ended.report();
    let first = report.iter().position(|line| line.starts_with("drumline: rank 0 (pid ")).unwrap();
    assert!(report[first].ends_with(") did not end; before SIGKILL:"), "{report:?}");
    let waits = &report[first + 1..report.len() - 2];
    assert!(waits.iter().all(|line| line.starts_with("    ")), "{report:?}");
    let has =
        |parts: &[&str]| waits.iter().any(|line| parts.iter().all(|part| line.contains(part)));
    assert!(has(&["python3 (", &format!("waits in read({pipe} = pipe:[")]), "{report:?}");
    assert!(has(&["): waits in ", "sleep"]), "the other threads: {report:?}");
    assert!(has(&["sh (", "): waits in wait4"]), "the wrapper: {report:?}");
    assert!(report[report.len() - 2].contains("py-spy dump --pid"), "{report:?}");
    assert_eq!(*report.last().unwrap(), "drumline: ended the other ranks: 0 (SIGKILL)");
}

#[test]
fn signals_to_the_launcher_reach_the_ranks_and_end_the_job() {
    for (name, signal, code) in [("INT", Signal::INT, 130), ("TERM", Signal::TERM, 143)] {
        let script =
            format!("trap 'echo told; exit 5' {name}; echo ready; while :; do sleep 0.1; done");
        let mut launch = Launch::script(2, &script);
        launch.wait_for("ready", 2);
        launch.signal(signal);
        let ended = launch.end();
        assert_eq!(ended.code, code);
        assert_eq!(ended.sorted_stdout(), ["[0] ready", "[0] told", "[1] ready", "[1] told"]);
        let report = ended.report();
        assert!(report[0].starts_with(&format!("drumline: SIG{name} passed on")), "{report:?}");
        assert_eq!(report[1], format!("drumline: stopped by SIG{name}"));
        assert_eq!(report[2], "drumline: ended the ranks: 0-1 (exit code 5)");
    }
}

#[test]
fn a_second_ctrl_c_kills() {
    let mut launch = Launch::script(2, "trap '' INT TERM; echo ready; while :; do sleep 1; done");
    launch.wait_for("ready", 2);
    // The first two signals may count as one.
    let started = Instant::now();
    launch.signal(Signal::INT);
    while launch.is_running() {
        assert!(started.elapsed() < HANG, "Ctrl-C is not heard");
        thread::sleep(Duration::from_millis(150));
        launch.signal(Signal::INT);
    }
    let ended = launch.end();
    assert_eq!(ended.code, 130);
    assert!(ended.stderr.contains("0-1 (SIGKILL)"), "{}", ended.stderr);
}

#[test]
fn ranks_that_do_not_end_in_time_are_killed() {
    let script = "trap '' TERM; echo ready; while :; do sleep 1; done";
    let mut launch = Launch::new(["--shutdown-timeout", "0.1", "sh", "-c", script]).start();
    launch.wait_for("ready", 1);
    launch.signal(Signal::TERM);
    assert_eq!(launch.end().code, 143);
}

#[test]
fn other_signals_are_passed_on_and_the_job_goes_on() {
    let script = "trap 'echo saved; exit 0' USR1; echo ready; while :; do sleep 0.1; done";
    let mut launch = Launch::script(2, script);
    launch.wait_for("ready", 2);
    launch.signal(Signal::USR1);
    let ended = launch.end();
    assert_eq!((ended.code, ended.stderr.as_str()), (0, ""));
    assert!(ended.sorted_stdout().contains(&"[1] saved"));
}

/// Signals that a rank handles, while a process that it has started does not.
#[test]
fn a_rank_that_handles_a_signal_saves_with_its_children_alive_also_below_a_shell() {
    let rank = "
import os, signal, subprocess, sys, time
child = subprocess.Popen(['sleep', '1000'], stdout=subprocess.DEVNULL)
heard = [getattr(signal, 'SIG' + it) for it in ('TERM', 'INT', 'HUP', 'USR1')]
for it in heard:
    signal.signal(it, lambda *_: None)
# A handler could run within the first print, or just before a sleep, which would not end then.
signal.pthread_sigmask(signal.SIG_BLOCK, heard)
print('ready', flush=True)
signal.sigwait(heard)
time.sleep(0.2)
print('saved', child.poll(), flush=True)
os._exit(0)
";
    let directory = TempDir::new().unwrap();
    let program = directory.path().join("rank");
    fs::write(&program, rank).unwrap();
    let program = program.to_str().unwrap();
    let shell = format!("python3 {program} | cat; echo after");
    for (signal, code) in
        [(Signal::TERM, 143), (Signal::INT, 130), (Signal::HUP, 129), (Signal::USR1, 0)]
    {
        for command in [&["python3", program][..], &["sh", "-c", &shell]] {
            let mut launch = Launch::new(["--no-python", "--"].iter().chain(command)).start();
            launch.wait_for("ready", 1);
            launch.signal(signal);
            let ended = launch.end();
            let told = ended.sorted_stdout();
            assert!(told.ends_with(&["[0] ready", "[0] saved None"]), "{signal:?}: {told:?}");
            // After SIGINT a shell ends with its child.
            let goes_on = command[0] == "sh" && signal != Signal::INT;
            assert!(!goes_on || told[0] == "[0] after", "{signal:?}: {told:?}");
            assert_eq!(ended.code, code, "{}", ended.stderr);
            // What it left got the signal, too. Those of SIGUSR1 are ended by the keeper.
            assert_eq!(ended.stderr.contains("left behind"), code == 0, "{}", ended.stderr);
        }
    }
}

/// A rank without a handler ends with all that it has started.
#[test]
fn a_rank_that_does_not_handle_a_signal_ends_with_its_group() {
    let child = "import signal; TERM = [signal.SIGTERM]; signal.signal(*TERM, lambda *_: None); \
                 signal.pthread_sigmask(signal.SIG_BLOCK, TERM); print('ready', flush=True); \
                 signal.sigwait(TERM); print('told', flush=True)";
    let rank = format!("import subprocess, sys; subprocess.run([sys.executable, '-c', {child:?}])");
    let mut launch = Launch::new(["python3", "-c", &rank]).start();
    launch.wait_for("ready", 1);
    launch.signal(Signal::TERM);
    let ended = launch.end();
    assert_eq!(ended.sorted_stdout(), ["[0] ready", "[0] told"], "{}", ended.stderr);
}

#[test]
fn ctrl_z_stops_the_ranks_and_fg_continues_them() {
    let mut launch = Launch::script(1, "echo ready $$; exec sleep 1000");
    launch.wait_for("ready", 1);
    let worker = String::from_utf8(launch.printed.clone()).unwrap();
    let worker: i32 = worker.trim_start_matches("[0] ready ").trim().parse().unwrap();
    launch.signal(Signal::TSTP);
    let launcher = launch.child.id() as i32;
    eventually("all are stopped", || [launcher, worker].iter().all(|&pid| state(pid) == Some('T')));
    launch.signal(Signal::CONT);
    eventually("all go on", || [launcher, worker].iter().all(|&pid| state(pid) != Some('T')));
    launch.signal(Signal::TERM);
    assert_eq!(launch.end().code, 143);
}

#[test]
fn an_ignored_hangup_stays_ignored() {
    let shared = TempDir::new().unwrap();
    let go = shared.path().join("go");
    let script = format!("echo ready; while [ ! -e {} ]; do sleep 0.01; done", go.display());
    let launch = Launch::new(["sh", "-c", &script]);
    let mut nohup = Command::new("sh");
    nohup.args(["-c", "trap '' HUP; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_drumline"), "run"]);
    let mut launch = launch.start_as(nohup);
    launch.wait_for("ready", 1);
    launch.signal(Signal::HUP);
    fs::write(go, "").unwrap();
    assert_eq!(launch.end().code, 0);
}

#[test]
fn a_rank_that_joins_another_process_group_is_signalled() {
    let joins = "import os, time; os.setpgid(0, os.getpgid(os.getppid())); \
                 print('ready', flush=True); time.sleep(1000)";
    let mut launch = Launch::new(["python3", "-c", joins]).start();
    launch.wait_for("ready", 1);
    launch.signal(Signal::TERM);
    assert_eq!(launch.end().code, 128 + 15);
}

/// The state of a process, such as `T` for stopped.
fn state(pid: i32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}
