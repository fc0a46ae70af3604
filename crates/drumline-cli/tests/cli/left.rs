//! Nothing that ranks have started outlives a job of `drumline run`, and nothing else is ended.

use std::{fs, process::Command};

use rustix::process::{Pid, Signal, kill_process};

use crate::launch::{Launch, eventually, is_anyone_marked};

/// Processes that have lost their parents become children of the first process of a container.
#[test]
fn as_the_first_process_the_launcher_collects_what_it_adopts() {
    let inside = || {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--mount-proc", "--kill-child", "--"]);
        command
    };
    if !inside().arg("true").output().is_ok_and(|output| output.status.success()) {
        return eprintln!("skipped: this takes root and unshare");
    }
    let mut command = inside();
    command.args([env!("CARGO_BIN_EXE_drumline"), "run"]);
    let mut launch = Launch::new(["sh", "-c", "echo ready; exec sleep 1000"]).start_as(command);
    launch.wait_for("ready", 1);
    let children = |pid: &str| -> Vec<String> {
        let path = format!("/proc/{pid}/task/{pid}/children");
        fs::read_to_string(path).unwrap().split_whitespace().map(str::to_owned).collect()
    };
    let first = children(&launch.child.id().to_string())[0].clone();
    let orphans = "for i in 1 2 3 4 5; do (sleep 0.1 &); done; (exec sleep 0)";
    for _ in 0..2 {
        let probe =
            Command::new("nsenter").args(["-t", &first, "-p", "-m", "sh", "-c", orphans]).status();
        assert!(probe.unwrap().success());
    }
    // The keeper is left.
    eventually("they are collected", || children(&first).len() == 1);
    kill_process(Pid::from_raw(first.parse().unwrap()).unwrap(), Signal::TERM).unwrap();
    assert_eq!(launch.end().code, 143);
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
    assert!(
        told[0].starts_with("drumline: ended 5 processes that the ranks had left behind: "),
        "{told:?}"
    );
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

/// Each process of the chain starts the next one and ends: at any time another one is there.
#[test]
fn no_chain_of_processes_outruns_the_end_of_a_job() {
    let chain = "import os, sys, time
reader, writer = os.pipe()
if os.fork():
    os.read(reader, 1)
    os._exit(0)
os.setsid()
end, links = time.monotonic() + 60, 0
while time.monotonic() < end:
    if os.fork():
        os._exit(0)
    if sys.argv[1] == 'sessions':
        os.setsid()
    links += 1
    if links == 20:
        os.write(writer, b'.')";
    for groups in ["one session", "sessions"] {
        let mut launch = Launch::new(["--", "python3", "-c", chain, groups]).start();
        assert_eq!(launch.wait(), 0);
        // One look at all processes may miss it.
        for _ in 0..20 {
            assert!(!is_anyone_marked(&launch.marker), "{groups}");
        }
        let ended = launch.end();
        let told = ended.report();
        assert!(told[0].contains("that the ranks had left behind: python3 (pid "), "{told:?}");
    }
}

/// The ranks have ended, and the keeper gives a moment to what they have left.
#[test]
fn a_launcher_that_is_killed_while_ranks_leave_something_leaves_no_file() {
    let mut launch = Launch::script(1, "echo $$; (setsid sleep 1000 &); echo done");
    launch.wait_for("done\n", 1);
    let printed = String::from_utf8(launch.printed.clone()).unwrap();
    let rank = printed.split_whitespace().nth(1).unwrap().to_owned();
    eventually("the rank ends", || {
        let stat = fs::read_to_string(format!("/proc/{rank}/stat"));
        stat.map_or(true, |it| it.rsplit(')').next().unwrap().starts_with(" Z"))
    });
    launch.signal(Signal::KILL);
    // `end` checks that nothing is left.
    assert_eq!(launch.end().code, 128 + 9);
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
    // It is the last process that says `ready`: without a keeper, the launcher does not find one that is being started.
    let script = "export KEEPER=$PPID; sh -c 'setsid sh -c \"echo ready \\$KEEPER; exec sleep 1000\"; true' & wait";
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
