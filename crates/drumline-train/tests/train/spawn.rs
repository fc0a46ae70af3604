//! Ranks that a program starts itself, as real processes.
//!
//! Each test is such a program. A rank runs the test alone, up to the call that has started the rank.

use std::{
    convert::Infallible,
    env,
    fs::{self, File},
    io::{BufRead, BufReader, Write},
    os::unix::process::ExitStatusExt,
    path::PathBuf,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use drumline::{Error, ProcessGroup, RankEnd, ReduceOp, Spawn};
use drumline_testing::itself;
use rustix::process::{Pid, Signal, getpid, getppid, kill_process};

/// Far longer than any test needs: it only tells a hang from slowness.
const HANG: Duration = Duration::from_secs(30);

/// So many processes that run the test with this name.
fn ranks(ranks: usize, test: &str) -> Spawn {
    let arguments = ["--exact", &format!("spawn::{test}"), "--nocapture"].map(Into::into).into();
    Spawn { arguments: Some(arguments), ..Spawn::new(ranks) }
}

fn is_there(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| !stat.rsplit(')').next().unwrap().trim_start().starts_with(['Z', 'X']))
}

fn wait_for_the_end_of(pids: &[u32]) {
    let started = Instant::now();
    while pids.iter().any(|&pid| is_there(pid)) {
        assert!(started.elapsed() < HANG, "processes are left");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until it is ended.
fn sleep() -> ! {
    loop {
        thread::park();
    }
}

#[test]
fn ranks_meet_and_have_what_the_program_has_computed() {
    let factor: f32 = "2".parse().unwrap();
    let processes = ranks(3, "ranks_meet_and_have_what_the_program_has_computed").start(|rank| {
        let group = ProcessGroup::from_env()?;
        assert_eq!((group.rank(), group.world_size()), (rank, 3));
        let mut sum = [factor * rank as f32];
        group.all_reduce(&mut sum, ReduceOp::Sum)?;
        assert_eq!(sum, [6.0]);
        group.destroy()
    });
    let processes = processes.unwrap();
    assert_eq!(processes.ids().len(), 3);
    processes.join().unwrap();
}

/// By another program, or by the same one again.
#[test]
fn a_rank_starts_ranks_of_its_own() {
    let processes = ranks(1, "a_rank_starts_ranks_of_its_own").start(|_| {
        let inner = "spawn::ranks_meet_and_have_what_the_program_has_computed";
        let mut command = Command::new(env::current_exe()?);
        let ended = command.args(["--exact", inner, "--nocapture"]).output()?;
        match ended.status.success() {
            true => Ok(()),
            false => Err(std::io::Error::other(format!("{ended:?}"))),
        }
    });
    processes.unwrap().join().unwrap();
}

#[inline(never)] // the test looks for it in a backtrace
fn lose_patience() {
    panic!("out of patience");
}

#[test]
fn the_first_panic_is_told_with_its_backtrace_and_the_others_end() {
    let test = "the_first_panic_is_told_with_its_backtrace_and_the_others_end";
    let processes = ranks(3, test).start(|rank| -> Result<(), Infallible> {
        if rank == 1 {
            lose_patience();
        }
        sleep()
    });
    let mut processes = processes.unwrap();
    let ids = processes.ids();
    for _ in 0..2 {
        let told = processes.join_timeout(HANG);
        assert_eq!(told.unwrap_err().culprit(), Some(1));
    }
    let error = processes.join().unwrap_err();
    wait_for_the_end_of(&ids);
    let text = error.to_string();
    let (rank, RankEnd { pid, status, message, backtrace, .. }) = end(&error);
    assert_eq!((rank, pid, status.unwrap().code()), (1, ids[1], Some(101)));
    assert_eq!(message.as_deref(), Some("out of patience"));
    let backtrace = backtrace.unwrap();
    assert!(backtrace.contains("lose_patience") && backtrace.contains("spawn.rs:"), "{backtrace}");
    assert!(!backtrace.contains("rust_begin_unwind"), "{backtrace}");
    assert!(text.starts_with("rank 1 (pid ") && text.contains("lose_patience"), "{text}");
    assert!(text.ends_with(" (drumline explain the-launcher)"), "{text}");
}

/// The first rank that has failed, and how.
fn end(error: &Error) -> (usize, RankEnd) {
    let end = error.detail::<RankEnd>().unwrap_or_else(|| panic!("{error}"));
    (error.culprit().unwrap(), end.clone())
}

/// Takes its time to end.
struct Slow;

impl Drop for Slow {
    fn drop(&mut self) {
        thread::sleep(Duration::from_millis(300));
    }
}

/// Rank 1 fails, and the others lose it. Some of them end before it does.
#[test]
fn who_has_only_lost_the_culprit_is_not_blamed_whoever_ends_first() {
    type Anything = Box<dyn std::error::Error + Send + Sync>;
    let test = "who_has_only_lost_the_culprit_is_not_blamed_whoever_ends_first";
    // Without a rule for it, two of five runs name another rank.
    for (how, times, says) in [
        ("panic", 8, "boom"),
        ("panic, slow", 1, "boom"),
        ("error", 4, "boom"),
        ("error, slow", 1, ""),
        ("exit", 2, ""),
        ("kill", 2, ""),
    ] {
        for _ in 0..times {
            let run = |rank| -> Result<(), Anything> {
                let _slow = (rank == 1 && how.ends_with("slow")).then_some(Slow);
                let group = ProcessGroup::from_env()?;
                match how.split(',').next().unwrap() {
                    _ if rank != 1 => {}
                    "panic" => panic!("boom"),
                    "error" => return Err("boom".into()),
                    "exit" => std::process::exit(3),
                    _ => kill_process(getpid(), Signal::KILL)?,
                }
                group.barrier()?;
                Ok(())
            };
            match ranks(3, test).start(run).unwrap().join() {
                Err(error) => {
                    let (rank, RankEnd { message, .. }) = end(&error);
                    let message = message.unwrap_or_default();
                    assert_eq!(rank, 1, "{how}: {message}");
                    assert!(message.contains(says), "{how}: {message}");
                }
                // A rank passes by the calls before its own.
                Ok(()) => assert!(env::var_os("DRUMLINE_SPAWN").is_some()),
            }
        }
    }
}

#[test]
fn an_error_is_told() {
    let processes = ranks(1, "an_error_is_told").start(|_| "x".parse::<u32>().map(|_| ()));
    let (rank, RankEnd { status, message, .. }) = end(&processes.unwrap().join().unwrap_err());
    assert_eq!((rank, status.unwrap().code()), (0, Some(1)));
    assert_eq!(message.as_deref(), Some("invalid digit found in string"));
}

/// `unwrap` prints the group's own words, with rank and page.
#[test]
fn an_error_of_a_group_is_told_in_its_words() {
    let processes = ranks(1, "an_error_of_a_group_is_told_in_its_words").start(|_| {
        let group = ProcessGroup::from_env()?;
        group.abort();
        let _ = group.barrier();
        group.barrier().unwrap();
        group.destroy()
    });
    let text = processes.unwrap().join().unwrap_err().to_string();
    let told = "this rank has aborted the group (drumline explain aborted)";
    assert!(text.contains(told) && text.contains("rank 0: "), "{text}");
    assert!(!text.contains("CollectiveError"), "{text}");
}

/// A stopped process does not hear SIGTERM.
#[test]
fn a_killed_rank_is_told_and_the_others_are_killed_after_the_grace_period() {
    let test = "a_killed_rank_is_told_and_the_others_are_killed_after_the_grace_period";
    let options = Spawn { grace_period: Duration::from_millis(50), ..ranks(2, test) };
    let processes = options.start(|rank| {
        let signal = if rank == 1 { Signal::KILL } else { Signal::STOP };
        kill_process(getpid(), signal)
    });
    let processes = processes.unwrap();
    let ids = processes.ids();
    let (rank, RankEnd { status, message, backtrace, .. }) = end(&processes.join().unwrap_err());
    assert_eq!((rank, status.unwrap().signal(), message, backtrace), (1, Some(9), None, None));
    wait_for_the_end_of(&ids);
}

/// The system tells nobody how the ranks have ended, or tells it somebody else.
#[test]
fn ranks_of_a_program_that_loses_exit_statuses_neither_hang_nor_end_well_by_guess() {
    const TEST: &str =
        "ranks_of_a_program_that_loses_exit_statuses_neither_hang_nor_end_well_by_guess";
    let Ok(how) = env::var("STATUSES") else {
        for how in ["ignored", "collected"] {
            let signal = if how == "ignored" { "--ignore-signal=CHLD" } else { "--" };
            let mut command = Command::new("env");
            command.args([signal.into(), env::current_exe().unwrap()]);
            command.args(["--exact", &format!("spawn::{TEST}"), "--nocapture"]);
            let ended = command.env("STATUSES", how).output().unwrap();
            assert!(ended.status.success(), "{how}: {ended:?}");
        }
        return;
    };
    if how == "collected" && env::var_os("DRUMLINE_SPAWN").is_none() {
        thread::spawn(|| {
            loop {
                let _ = rustix::process::wait(rustix::process::WaitOptions::empty());
                thread::yield_now();
            }
        });
    }
    for (ends, wanted) in [("well", None), ("exit", Some("")), ("error", Some("no data"))] {
        let run = |rank| -> Result<(), String> {
            // What it has inherited does not hurt it.
            assert!(Command::new("true").status().is_ok_and(|it| it.success()));
            match (rank, ends) {
                (1, "exit") => std::process::exit(3),
                (1, "error") => Err("no data".into()),
                _ => Ok(()),
            }
        };
        match (ranks(2, TEST).start(run).unwrap().join(), wanted) {
            // A rank passes by the calls before its own.
            (Ok(()), wanted) if wanted.is_none() || env::var_os("DRUMLINE_SPAWN").is_some() => {}
            (Err(error), Some(wanted)) => {
                let (rank, RankEnd { status, message, .. }) = end(&error);
                assert_eq!(rank, 1, "{how}, {ends}: {error}");
                assert_eq!(message.as_deref().unwrap_or(""), wanted);
                assert!(status.is_none() || how == "collected", "{ends}: {status:?}");
            }
            other => panic!("{how}, {ends}: {other:?}"),
        }
    }
}

#[test]
fn who_does_not_wait_long_gets_an_answer_and_dropping_ends_the_processes() {
    let test = "who_does_not_wait_long_gets_an_answer_and_dropping_ends_the_processes";
    let processes = ranks(2, test).start(|_| -> Result<(), Infallible> { sleep() });
    let mut processes = processes.unwrap();
    assert!(!processes.join_timeout(Duration::from_millis(1)).unwrap());
    let ids = processes.ids();
    assert!(ids.iter().all(|&pid| is_there(pid)));
    drop(processes);
    wait_for_the_end_of(&ids);
}

/// A directory that the program and its ranks know.
fn shared() -> PathBuf {
    let program = match env::var_os("DRUMLINE_SPAWN") {
        Some(_) => getppid().unwrap(),
        None => getpid(),
    };
    env::temp_dir().join(format!("drumline-spawn-test-{program}"))
}

#[test]
fn calls_that_come_before_are_passed_by() {
    let test = "calls_that_come_before_are_passed_by";
    let _ = fs::create_dir(shared());
    let append = |name: String| {
        let mut file = File::options().append(true).create(true).open(shared().join(name))?;
        file.write_all(b"x")
    };
    for round in 0..2 {
        let processes = ranks(2, test).start(|rank| append(format!("{round}.{rank}")));
        processes.unwrap().join().unwrap();
    }
    let last = ranks(1, test).start(|_| append("last".into()));
    last.unwrap().join().unwrap();

    let files = fs::read_dir(shared()).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<(String, String)> = files
        .map(|path| {
            (path.file_name().unwrap().to_str().unwrap().into(), fs::read_to_string(path).unwrap())
        })
        .collect();
    files.sort();
    fs::remove_dir_all(shared()).unwrap();
    let expected = ["0.0", "0.1", "1.0", "1.1", "last"].map(|name| (name.into(), "x".into()));
    assert_eq!(files, expected);
}

#[test]
fn a_process_that_does_not_come_to_its_call_is_told() {
    let processes = ranks(1, "there_is_no_such_test").start(|_| Ok::<_, Infallible>(()));
    let error = processes.unwrap().join().unwrap_err();
    assert!(error.to_string().contains("before it came to the call of spawn"), "{error}");
    assert_eq!((error.culprit(), error.detail::<RankEnd>()), (Some(0), None));
}

#[test]
fn a_rank_starts_no_ranks() {
    let processes = ranks(1, "a_rank_starts_no_ranks")
        .start(|_| ranks(1, "a_rank_starts_no_ranks").start(|_| Ok::<_, Infallible>(())).map(drop));
    let text = processes.unwrap().join().unwrap_err().to_string();
    assert!(text.contains("cannot call spawn"), "{text}");
}

/// A program that prints the process ids of its ranks. As a test, it does nothing.
#[test]
fn program_with_ranks() {
    if env::var_os("DRUMLINE_SPAWN").is_none() && env::var_os("SPAWN_TEST").is_none() {
        return;
    }
    let processes = ranks(2, "program_with_ranks").start(|_| -> Result<(), Infallible> {
        println!("\npid {}", std::process::id());
        sleep()
    });
    processes.unwrap().join().unwrap();
}

#[test]
fn ranks_end_with_a_program_that_is_killed() {
    let mut program = itself("spawn::program_with_ranks");
    program.env("SPAWN_TEST", "1");
    let mut program = program.stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(program.stdout.take().unwrap()).lines().map(Result::unwrap);
    let pids = lines.filter_map(|line| line.strip_prefix("pid ")?.parse().ok());
    let pids: Vec<u32> = pids.take(2).collect();
    assert!(pids.iter().all(|&pid| is_there(pid)));
    kill_process(Pid::from_child(&program), Signal::KILL).unwrap();
    program.wait().unwrap();
    wait_for_the_end_of(&pids);
}
