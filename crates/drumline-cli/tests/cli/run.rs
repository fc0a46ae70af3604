//! `drumline run` with real processes. Whatever a test does, no process and no file may be left.

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    fs,
    io::Read,
    net::{Ipv4Addr, TcpListener},
    os::unix::ffi::OsStringExt,
    path::Path,
    process::{Child, Command, Stdio},
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc::{self, Receiver},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use drumline::{Config, ReduceOp, init_process_group, is_launched};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// Far longer than any test needs: it only tells a hang from slowness.
const HANG: Duration = Duration::from_secs(20);

#[test]
fn every_rank_learns_who_it_is() {
    let script = r#"echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR" \
        "$OMP_NUM_THREADS ${DRUMLINE_TERMINAL_COLUMNS-none} $MASTER_PORT $TORCHELASTIC_RUN_ID""#;
    let ended = Launch::script(3, script).end();
    assert_eq!((ended.code, ended.stderr.as_str()), (0, ""));
    let by_rank = ended.lines_by_rank();
    let last = |rank| by_rank[&rank][0].rsplitn(3, ' ').take(2).collect::<Vec<_>>();
    assert_eq!(last(0)[0].len(), 16, "the run's id");
    assert_ne!(last(0)[1].parse::<u16>().unwrap(), 0, "the port");
    for (rank, lines) in &by_rank {
        assert_eq!(last(*rank), last(0), "one run, one port");
        assert!(lines[0].starts_with(&format!("{rank} {rank} 3 3 127.0.0.1 1 none ")), "{lines:?}");
    }
}

#[test]
fn restartable_sequences_are_disabled_only_on_request() {
    let script = ["sh", "-c", "echo ${GLIBC_TUNABLES-none}"];
    for (options, variable, told) in [
        (&["--nproc-per-node", "2"][..], None, "none"),
        (&["--nproc-per-node", "2"], Some("0"), "none"),
        (&["--nproc-per-node", "2"], Some(""), "none"),
        (&["--nproc-per-node", "2"], Some("1"), "glibc.pthread.rseq=0"),
        (&["--nproc-per-node", "2", "--disable-rseq"], None, "glibc.pthread.rseq=0"),
    ] {
        let mut launch = Launch::new(options.iter().chain(&script));
        if let Some(value) = variable {
            launch = launch.variable("DRUMLINE_DISABLE_RSEQ", value);
        }
        let ended = launch.start().end();
        let expected = [0, 1].map(|rank| format!("[{rank}] {told}"));
        assert_eq!(ended.sorted_stdout(), expected, "{options:?} {variable:?}: {}", ended.stderr);
    }
    let launch = Launch::new(["true"]).variable("DRUMLINE_DISABLE_RSEQ", "perhaps");
    let ended = launch.start().end();
    assert_eq!(ended.code, 2);
    assert!(ended.stderr.contains("DRUMLINE_DISABLE_RSEQ is 0 or 1"), "{}", ended.stderr);
}

#[test]
fn the_security_level_is_that_of_the_flag_else_that_of_the_environment() {
    let script = "echo ${DRUMLINE_SECURITY-none}";
    for (options, variable, told) in [
        (&[][..], None, "none"),
        (&[], Some("integrity"), "integrity"),
        (&["--security", "tls"], None, "tls"),
        (&["--security=auth"], Some("integrity"), "auth"),
    ] {
        let mut launch = Launch::new(options.iter().chain(&["sh", "-c", script]));
        if let Some(value) = variable {
            launch = launch.variable("DRUMLINE_SECURITY", value);
        }
        let ended = launch.start().end();
        let expected = format!("[0] {told}");
        assert_eq!(ended.sorted_stdout(), [expected], "{options:?}: {}", ended.stderr);
    }
    let mut launch = job(&["--security", "integrity"]).start();
    launch.wait_for("sum 3", 3);
    launch.signal(Signal::TERM);
    assert_eq!(launch.end().code, 128 + 15);
}

#[test]
fn a_low_soft_limit_of_descriptors_is_raised_to_the_hard_one() {
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -Sn 64; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_drumline"), "run"]);
    // 40 ranks have 80 pipes.
    let args = ["--nproc-per-node", "40", "sh", "-c", "echo $(ulimit -Sn) $(ulimit -Hn)"];
    let ended = Launch::new(args).start_as(command).end();
    assert_eq!((ended.code, ended.stderr.as_str()), (0, ""));
    for lines in ended.lines_by_rank().values() {
        let (soft, hard) = lines[0].trim().split_once(' ').unwrap();
        let hard: u64 = hard.parse().unwrap_or(u64::MAX);
        assert_eq!(soft.parse::<u64>().unwrap(), hard.min(512 * 1024), "{lines:?}");
    }
}

#[test]
fn the_users_number_of_threads_is_kept() {
    let launch = Launch::new(["--nproc-per-node", "2", "sh", "-c", "echo $OMP_NUM_THREADS"]);
    let ended = launch.variable("OMP_NUM_THREADS", "5").start().end();
    assert_eq!(ended.sorted_stdout(), ["[0] 5", "[1] 5"]);
}

#[test]
fn streams_are_kept_apart_and_every_line_names_its_rank() {
    let ended = Launch::script(2, "echo out; echo; echo err >&2; printf 'no end'").end();
    assert_eq!(ended.code, 0);
    let expected = ["[0] ", "[0] no end", "[0] out", "[1] ", "[1] no end", "[1] out"];
    assert_eq!(ended.sorted_stdout(), expected);
    let mut stderr: Vec<_> = ended.stderr.lines().collect();
    stderr.sort_unstable();
    assert_eq!(stderr, ["[0] err", "[1] err"]);
}

#[test]
fn arguments_arrive_as_they_are() {
    let odd = OsString::from_vec(vec![b'b', 0xff]);
    let mut args: Vec<OsString> =
        ["sh", "-c", "printf '<%s>' \"$0\" \"$@\"", "zero", "", "a  b"].map(Into::into).into();
    args.extend(["--".into(), "--nproc-per-node".into(), odd]);
    let ended = Launch::new(args).start().end();
    assert_eq!(ended.stdout, b"[0] <zero><><a  b><--><--nproc-per-node><b\xff>\n");
}

#[test]
fn stdin_is_empty() {
    let ended = Launch::script(2, "cat; echo done").end();
    assert_eq!(ended.sorted_stdout(), ["[0] done", "[1] done"]);
}

#[test]
fn large_and_binary_output_arrives_whole() {
    let data = TempDir::new().unwrap();
    let file = data.path().join("data");
    // Three lines of a megabyte, of all bytes that do not end lines. The last line has no end.
    let line: Vec<u8> = (0..=255u8).filter(|byte| !b"\r\n".contains(byte)).collect();
    let line = line.repeat(4_000);
    let text = [&line[..], &line[..], &line[..]].join(&b'\n');
    fs::write(&file, &text).unwrap();

    let script = format!("cat {0}; echo; cat {0} >&2", file.display());
    let ended = Launch::script(2, &script).end();
    assert_eq!(ended.code, 0);
    for printed in [&ended.stdout, &ended.stderr_bytes] {
        let mut ranks = [Vec::new(), Vec::new()];
        for line in printed.strip_suffix(b"\n").unwrap().split(|&byte| byte == b'\n') {
            let rank = usize::from(line[1] - b'0');
            assert!(line.starts_with(b"[") && line[2] == b']' && b" +".contains(&line[3]));
            if line[3] == b' ' && !ranks[rank].is_empty() {
                ranks[rank].push(b'\n');
            }
            ranks[rank].extend_from_slice(&line[4..]);
        }
        assert!(ranks.iter().all(|rank| *rank == text), "output is lost or mixed");
    }
}

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
fn what_workers_leave_behind_is_killed() {
    for code in [0, 3] {
        let ended = Launch::script(2, &format!("sleep 1000 & echo done; exit {code}")).end();
        assert_eq!(ended.code, code);
    }
}

/// What a rank runs that leaves processes behind: below a wrapper, in a session of its own, and with no
/// parent that lives.
const ESCAPES: &str = "setsid sh -c 'sleep 1001 & exec sleep 1002' &
    (setsid sh -c 'sleep 1003 & echo away' &)
    sh -c 'python3 -c \"import time; print(\\\"wrapped\\\", flush=True); time.sleep(1004)\"; true' &";

#[test]
fn what_is_left_behind_is_ended_and_named_wherever_it_has_gone() {
    let script = format!("{ESCAPES}\necho $$; while [ ! -e go ]; do sleep 0.01; done");
    let mut launch = Launch::script(1, &script);
    launch.wait_for("away", 1);
    launch.wait_for("wrapped", 1);
    let mut stranger = Command::new("sleep").arg("1000").spawn().unwrap();
    fs::write(launch.directory.path().join("go"), "").unwrap();
    let code = launch.wait();
    fs::remove_file(launch.directory.path().join("go")).unwrap();
    assert_eq!(stranger.try_wait().unwrap(), None, "a process of somebody else is killed");
    stranger.kill().unwrap();
    stranger.wait().unwrap();
    // `end` checks that nothing is left.
    let ended = launch.end();
    assert_eq!(code, 0, "{}", ended.stderr);
    let told = ended.report();
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].starts_with("drumline: ended 5 processes that the ranks had left behind: "));
    assert!(told[0].matches("sleep (pid ").count() == 3 && told[0].contains("python3 (pid "));
}

/// Such as the helpers of Python's `multiprocessing`.
#[test]
fn what_ends_by_itself_after_its_rank_is_left_alone() {
    let program = "import os, subprocess
reader, writer = os.pipe()
helper = f'cat <&{reader}; echo cleaned'
subprocess.Popen(['setsid', 'sh', '-c', helper], pass_fds=[reader])";
    let ended = Launch::new(["python3", "-c", program]).start().end();
    assert_eq!((ended.code, ended.stderr.as_str()), (0, ""));
    assert_eq!(ended.sorted_stdout(), ["[0] cleaned"]);
}

#[test]
fn nothing_outlives_a_launcher_that_is_killed() {
    let mut launch = Launch::script(2, &format!("{ESCAPES}\nwait"));
    launch.wait_for("away", 2);
    launch.wait_for("wrapped", 2);
    let mut stranger = Command::new("sleep").arg("1000").spawn().unwrap();
    launch.signal(Signal::KILL);
    // `end` checks that nothing is left.
    assert_eq!(launch.end().code, 128 + 9);
    assert_eq!(stranger.try_wait().unwrap(), None, "a process of somebody else is killed");
    stranger.kill().unwrap();
    stranger.wait().unwrap();
}

#[test]
fn a_keeper_that_is_killed_is_told_of_and_nothing_goes_on() {
    let script = "sh -c 'setsid sleep 1000; true' & echo ready $PPID; wait";
    let mut launch = Launch::script(1, script);
    launch.wait_for("ready", 1);
    launch.wait_for("\n", 1);
    let printed = String::from_utf8(launch.printed.clone()).unwrap();
    let keeper: i32 = printed.trim_start_matches("[0] ready ").trim().parse().unwrap();
    assert_ne!(keeper, launch.child.id() as i32);
    kill_process(Pid::from_raw(keeper).unwrap(), Signal::KILL).unwrap();
    let ended = launch.end();
    assert_eq!(ended.code, 1);
    assert!(ended.stderr.contains(&format!("keeper (pid {keeper})")), "{}", ended.stderr);
    assert!(ended.stderr.contains("SIGKILL"), "{}", ended.stderr);
}

#[test]
fn a_signal_to_all_processes_of_a_job_ends_it_as_one_to_the_launcher() {
    let mut launch = Launch::script(2, "echo ready $PPID; exec sleep 1000");
    launch.wait_for("\n", 2);
    let printed = String::from_utf8(launch.printed.clone()).unwrap();
    let keeper = printed.split_whitespace().last().unwrap().parse().unwrap();
    for signal in [Signal::TERM, Signal::HUP, Signal::INT, Signal::USR1, Signal::TSTP] {
        kill_process(Pid::from_raw(keeper).unwrap(), signal).unwrap();
    }
    launch.signal(Signal::TERM);
    let ended = launch.end();
    assert_eq!(ended.code, 128 + 15, "{}", ended.stderr);
    assert!(ended.stderr.contains("ended the ranks: 0-1 (SIGTERM)"), "{}", ended.stderr);
}

#[test]
fn a_script_without_an_interpreter_runs_as_in_a_shell() {
    let directory = TempDir::new().unwrap();
    let script = directory.path().join("train");
    fs::write(&script, "echo $RANK $1\n").unwrap();
    assert!(Command::new("chmod").arg("+x").arg(&script).status().unwrap().success());
    let ended = Launch::new([script.as_os_str(), "x".as_ref()]).start().end();
    assert_eq!((ended.code, ended.stderr.as_str()), (0, ""));
    assert_eq!(ended.sorted_stdout(), ["[0] 0 x"]);
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

#[test]
fn a_reader_that_goes_away_does_not_stop_the_job() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_drumline"));
    let (read, write) = std::io::pipe().unwrap();
    drop(read);
    command.arg("run").args(["sh", "-c", "echo lost; echo lost; echo kept >&2"]).stdout(write);
    let output = command.output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    assert!(stderr.contains("Broken pipe") && stderr.contains("[0] kept"), "{stderr}");
}

#[test]
fn a_program_that_cannot_be_run_is_named_once_before_anything_starts() {
    let directory = TempDir::new().unwrap();
    let script = directory.path().join("train.py");
    fs::write(&script, "").unwrap();
    for (program, code, part) in [
        (OsStr::new("no-such-program"), 127, "no directory of PATH"),
        (OsStr::new("./no/such/program"), 127, "No such file"),
        (script.as_os_str(), 126, "python3"),
        (directory.path().as_os_str(), 126, "directory"),
    ] {
        let ended = Launch::new(["--nproc-per-node".as_ref(), "4".as_ref(), program]).start().end();
        assert_eq!(ended.code, code);
        assert_eq!(ended.stderr.lines().count(), 1, "{}", ended.stderr);
        assert!(ended.stderr.contains(part) && ended.stdout.is_empty(), "{}", ended.stderr);
    }
}

#[test]
fn a_missing_interpreter_is_told() {
    let directory = TempDir::new().unwrap();
    let script = directory.path().join("train");
    fs::write(&script, "#!/no/such/interpreter\n").unwrap();
    let chmod = Command::new("chmod").arg("+x").arg(&script).status().unwrap();
    assert!(chmod.success());
    let ended = Launch::new([script.as_os_str()]).start().end();
    assert_eq!(ended.code, 126);
    assert!(ended.stderr.contains("interpreter"), "{}", ended.stderr);
}

#[test]
fn bad_usage_exits_with_2() {
    for args in [vec![], vec!["--nproc-per-node", "0", "true"], vec!["--nnodes", "2", "true"]] {
        let ended = Launch::new(args).start().end();
        assert_eq!(ended.code, 2, "{}", ended.stderr);
    }
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let ended = Launch::new(["--master-port", &port, "true"]).start().end();
    assert_eq!(ended.code, 2);
    assert!(ended.stderr.contains(&format!("port {port} of 127.0.0.1 is in use")));
}

/// The program of the ranks of the tests below: it sums, then waits while the test looks at it. Outside
/// of a job, as a test, it does nothing.
#[test]
fn rank() {
    if !is_launched() {
        return;
    }
    let group = init_process_group("env://", &Config::from_env().unwrap()).unwrap();
    let mut sum = [group.rank() as i64];
    group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    println!("sum {} listeners {:?}", sum[0], tcp_listeners("self"));
    while !Path::new("go").exists() {
        thread::sleep(Duration::from_millis(5));
    }
    group.destroy().unwrap();
}

/// `drumline run`, with `options`, of three ranks of [`rank`].
fn job(options: &[&str]) -> Launch {
    let program = std::env::current_exe().unwrap();
    let program = [program.to_str().unwrap(), "--exact", "run::rank", "--nocapture"];
    let common = ["--nproc-per-node", "3"];
    Launch::new(options.iter().copied().chain(common).chain(["--"]).chain(program))
}

#[test]
fn a_job_on_one_host_listens_on_no_tcp_port_but_torchs() {
    for (options, expected) in [(&[][..], 1), (&["--no-torch-store"], 0)] {
        let mut launch = job(options).start();
        launch.wait_for("sum 3 listeners []", 3);
        let listeners = tcp_listeners(&launch.child.id().to_string());
        assert_eq!(listeners.len(), expected, "{listeners:?}");
        // 127.0.0.1, as the kernel shows it.
        assert!(listeners.iter().all(|address| address.starts_with("0100007F:")), "{listeners:?}");
        fs::write(launch.directory.path().join("go"), "").unwrap();
        let code = launch.wait();
        fs::remove_file(launch.directory.path().join("go")).unwrap();
        assert_eq!((code, launch.end().code), (0, 0));
    }
}

#[test]
fn a_secret_of_the_users_is_handed_on() {
    let mut launch = job(&[]).variable("DRUMLINE_SECRET", "chosen-by-the-user-0001").start();
    launch.wait_for("sum 3", 3);
    launch.signal(Signal::TERM);
    assert_eq!(launch.end().code, 128 + 15);

    let ended = job(&[]).variable("DRUMLINE_SECRET", "short").start().end();
    assert_eq!(ended.code, 2);
    assert!(ended.stderr.contains("DRUMLINE_SECRET: a secret of 5 bytes"), "{}", ended.stderr);
}

#[test]
fn the_secret_is_on_no_command_line_and_in_no_environment() {
    let script = "cat $DRUMLINE_SECRET_FILE; echo; exec sleep 1000";
    let mut launch = Launch::script(2, script);
    launch.wait_for("\n", 2);
    let printed = String::from_utf8(launch.printed.clone()).unwrap();
    let secrets: Vec<&str> = printed.lines().map(|line| &line["[0] ".len()..]).collect();
    assert!(secrets[0].len() == 64 && secrets[0] == secrets[1], "{secrets:?}");
    let secret = secrets[0].as_bytes();

    let marker = launch.marker.as_bytes();
    let contains = |text: &[u8], part: &[u8]| text.windows(part.len()).any(|w| w == part);
    let mut looked_at = 0;
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let read = |name| fs::read(process.path().join(name)).unwrap_or_default();
        let (environment, command_line) = (read("environ"), read("cmdline"));
        if contains(&environment, marker) {
            looked_at += 1;
            assert!(!contains(&environment, secret) && !contains(&command_line, secret));
        }
    }
    assert!(looked_at >= 3, "the launcher and its two workers");
    let other = Launch::script(1, "cat $DRUMLINE_SECRET_FILE").end();
    assert!(!contains(&other.stdout, secret), "every job has a secret of its own");
    launch.signal(Signal::TERM);
    let ended = launch.end();
    assert!(!contains(&ended.stderr_bytes, secret));
}

#[test]
fn a_wrapper_that_closes_descriptors_is_told_of() {
    let program = std::env::current_exe().unwrap();
    let script = format!(
        "n=${{DRUMLINE_SECRET_FILE##*/}}; exec bash -c \"exec $n>&-; exec {} --exact run::rank\"",
        program.display()
    );
    let ended = Launch::script(1, &script).end();
    assert_ne!(ended.code, 0);
    let told = String::from_utf8_lossy(&ended.stdout).into_owned() + &ended.stderr;
    assert!(told.contains("close_fds=False"), "{told}");
}

/// A `drumline run` in a directory of its own. A variable marks all its processes.
struct Launch {
    args: Vec<OsString>,
    variables: Vec<(&'static str, OsString)>,
    directory: TempDir,
    marker: String,
}

/// A `drumline run` that has been started.
struct Started {
    child: Child,
    started: Instant,
    chunks: Receiver<Vec<u8>>,
    /// What has come out of its stdout.
    printed: Vec<u8>,
    stderr: JoinHandle<Vec<u8>>,
    directory: TempDir,
    marker: String,
}

struct Ended {
    code: i32,
    stdout: Vec<u8>,
    stderr: String,
    stderr_bytes: Vec<u8>,
    took: Duration,
}

impl Launch {
    fn new(args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Launch {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        Launch {
            args: args.into_iter().map(|arg| arg.as_ref().to_owned()).collect(),
            variables: Vec::new(),
            directory: TempDir::new().unwrap(),
            marker: format!("DRUMLINE_TEST_MARKER={}.{count}.", std::process::id()),
        }
    }

    /// Starts `ranks` shells that run `script`.
    fn script(ranks: usize, script: &str) -> Started {
        Launch::new(["--nproc-per-node", &ranks.to_string(), "--", "sh", "-c", script]).start()
    }

    fn variable(mut self, name: &'static str, value: &str) -> Launch {
        self.variables.push((name, value.into()));
        self
    }

    fn start(self) -> Started {
        // Tests may themselves run with signals ignored, as background jobs of a shell do, and
        // the launcher leaves an ignored signal ignored.
        let mut command = Command::new("env");
        command.args(["--default-signal", env!("CARGO_BIN_EXE_drumline"), "run"]);
        self.start_as(command)
    }

    fn start_as(self, mut command: Command) -> Started {
        let (name, value) = self.marker.split_once('=').unwrap();
        let mut child = command
            .args(&self.args)
            .env_remove("OMP_NUM_THREADS")
            .env_remove("GLIBC_TUNABLES")
            .env_remove("DRUMLINE_DISABLE_RSEQ")
            .env_remove("RUST_LOG")
            .env_remove("DRUMLINE_SECURITY")
            .env_remove("DRUMLINE_SECRET")
            .env_remove("DRUMLINE_SECRET_FILE")
            .env("TMPDIR", self.directory.path())
            .env(name, value)
            .envs(self.variables)
            .current_dir(self.directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (mut stdout, mut stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let (sender, chunks) = mpsc::channel();
        thread::spawn(move || {
            let mut chunk = vec![0; 64 * 1024];
            while let Ok(count @ 1..) = stdout.read(&mut chunk) {
                let _ = sender.send(chunk[..count].to_vec());
            }
        });
        Started {
            child,
            started: Instant::now(),
            chunks,
            printed: Vec::new(),
            stderr: thread::spawn(move || {
                let mut text = Vec::new();
                stderr.read_to_end(&mut text).unwrap();
                text
            }),
            directory: self.directory,
            marker: self.marker,
        }
    }
}

impl Started {
    /// Waits until stdout has contained `text` `count` times.
    fn wait_for(&mut self, text: &str, count: usize) {
        while self.printed.windows(text.len()).filter(|w| *w == text.as_bytes()).count() < count {
            let chunk = self.chunks.recv_timeout(HANG).expect("the text does not come");
            self.printed.extend(chunk);
        }
    }

    fn signal(&self, signal: Signal) {
        let _ = kill_process(Pid::from_child(&self.child), signal);
    }

    fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Waits for the launcher, and returns its exit code as a shell would tell it.
    fn wait(&mut self) -> i32 {
        use std::os::unix::process::ExitStatusExt;
        while self.is_running() {
            if self.started.elapsed() > HANG {
                // Its keeper ends the workers.
                self.child.kill().unwrap();
                panic!("the launcher hangs");
            }
            thread::sleep(Duration::from_millis(1));
        }
        let status = self.child.wait().unwrap();
        status.code().unwrap_or_else(|| 128 + status.signal().unwrap())
    }

    /// Waits for the launcher, checks that nothing is left, and returns what it printed.
    fn end(mut self) -> Ended {
        let code = self.wait();
        let took = self.started.elapsed();
        eventually("no process is left", || !is_anyone_marked(&self.marker));
        while let Ok(chunk) = self.chunks.recv_timeout(HANG) {
            self.printed.extend(chunk);
        }
        let stderr_bytes = self.stderr.join().unwrap();
        assert_eq!(fs::read_dir(self.directory.path()).unwrap().count(), 0, "files are left");
        let stderr = String::from_utf8_lossy(&stderr_bytes).into_owned();
        assert!(!stderr.contains("panicked"), "{stderr}");
        Ended { code, stdout: self.printed, stderr, stderr_bytes, took }
    }
}

impl Ended {
    fn sorted_stdout(&self) -> Vec<&str> {
        let mut lines: Vec<_> = std::str::from_utf8(&self.stdout).unwrap().lines().collect();
        lines.sort_unstable();
        lines
    }

    fn lines_by_rank(&self) -> BTreeMap<usize, Vec<&str>> {
        let mut ranks = BTreeMap::<_, Vec<_>>::new();
        for line in self.sorted_stdout() {
            let (rank, text) = line.strip_prefix('[').unwrap().split_once("] ").unwrap();
            ranks.entry(rank.parse().unwrap()).or_default().push(text);
        }
        ranks
    }

    /// The launcher's own lines, which come after the ranks'.
    fn report(&self) -> Vec<&str> {
        self.stderr.lines().filter(|line| !line.starts_with('[')).collect()
    }
}

/// Whether a living process has `marker` in its environment. Zombies have none.
fn is_anyone_marked(marker: &str) -> bool {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let mut environments =
        processes.filter_map(|entry| fs::read(entry.path().join("environ")).ok());
    environments.any(|text| text.split(|&byte| byte == 0).any(|v| v == marker.as_bytes()))
}

/// The addresses on which a process listens for TCP connections, as the kernel writes them.
fn tcp_listeners(pid: &str) -> Vec<String> {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let sockets: Vec<String> = descriptors
        .filter_map(|fd| fs::read_link(fd.path()).ok()?.to_str().map(str::to_owned))
        .collect();
    let tables =
        ["tcp", "tcp6"].map(|table| fs::read_to_string(format!("/proc/{pid}/net/{table}")));
    let lines = tables.iter().flatten().flat_map(|table| table.lines().skip(1));
    lines
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let is_ours = sockets.contains(&format!("socket:[{}]", fields[9]));
            (fields[3] == "0A" && is_ours).then(|| fields[1].to_owned())
        })
        .collect()
}

/// The state of a process, such as `T` for stopped.
fn state(pid: i32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

fn eventually(what: &str, condition: impl Fn() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < HANG, "waited in vain: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}
