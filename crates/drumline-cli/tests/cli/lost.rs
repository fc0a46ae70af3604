//! Ranks that die, and others that go on without them.

use std::{
    env, fs,
    path::PathBuf,
    process::{self, Command},
    thread,
    time::Duration,
};

use drumline::{Config, steps::regroups};
use rustix::process::{Signal, getpid, kill_process};
use serde_json::Value;

use crate::{
    hosts::Town,
    launch::{Ended, Launch, Started, eventually},
};

/// The program of a rank. It starts a process, and goes on until a file of its name says how it ends.
#[test]
fn rank_waits_for_its_end() {
    let Ok(rank) = env::var("RANK") else { return };
    match env::var("SILENT").ok().as_ref() {
        Some(silent) if *silent == rank => {}
        _ => regroups(Config::from_env().unwrap().min_ranks.unwrap()),
    }
    let mut started = Command::new("sleep").arg("1000").spawn().unwrap();
    fs::write(format!("started.{rank}"), started.id().to_string()).unwrap();
    println!("ready");
    loop {
        match fs::read_to_string(&rank).unwrap_or_default().trim_end_matches('.') {
            "" => thread::sleep(Duration::from_millis(1)),
            "KILL" => kill_process(getpid(), Signal::KILL).unwrap(),
            code => {
                started.kill().unwrap();
                started.wait().unwrap();
                process::exit(code.parse().unwrap());
            }
        }
    }
}

/// A launcher whose ranks run this program, and go on with two.
struct Job {
    started: Started,
    directory: PathBuf,
}

/// The options for so many ranks, these further ones, and the program.
fn words<'a>(ranks: &'a str, options: &[&'a str], this: &'a str) -> Vec<&'a str> {
    let common =
        ["--min-ranks=2", "--report=r.json", "--events=./events", "--nproc-per-node", ranks];
    let program = ["--", this, "--exact", "lost::rank_waits_for_its_end", "--nocapture"];
    [&common, options, &program].concat()
}

impl Job {
    /// A job of four ranks on this host.
    fn start(options: &[&str], silent: &str) -> Job {
        let this = env::current_exe().unwrap();
        let launch = Launch::new(words("4", options, this.to_str().unwrap()));
        let mut job = Job::of(launch.variable("SILENT", silent));
        job.started.wait_for("ready", 4);
        job
    }

    fn of(launch: Launch) -> Job {
        let directory = launch.directory.path().to_owned();
        Job { started: launch.start(), directory }
    }

    /// Lets a rank end: by SIGKILL, or with this code.
    fn end_rank(&self, rank: usize, how: &str) {
        // A point at the end tells that all is written.
        fs::write(self.directory.join("new"), format!("{how}.")).unwrap();
        fs::rename(self.directory.join("new"), self.directory.join(rank.to_string())).unwrap();
    }

    /// Lets a rank die. The launcher tells that the others go on, and ends what the rank has started.
    fn lose(&self, rank: usize, how: &str) {
        let started = fs::read_to_string(self.directory.join(format!("started.{rank}"))).unwrap();
        self.end_rank(rank, how);
        eventually("the others go on", || self.lost().contains(&rank));
        // A zombie has no environment.
        let environment = || fs::read(format!("/proc/{started}/environ")).unwrap_or_default();
        eventually("what it has started ends", || environment().is_empty());
    }

    /// The ranks that are lost, as the events tell.
    fn lost(&self) -> Vec<usize> {
        let events = fs::read_to_string(self.directory.join("events")).unwrap_or_default();
        let metadata = events.lines().filter_map(|line| {
            let event: Value = serde_json::from_str(line).ok()?;
            (event["metadata"]["lost"] == true)
                .then(|| event["metadata"]["global_rank"].as_u64())?
        });
        metadata.map(|rank| rank as usize).collect()
    }

    /// The end of the job, and what its report says.
    fn end(mut self) -> (Ended, Value) {
        self.started.wait();
        let report = fs::read_to_string(self.directory.join("r.json")).unwrap();
        for file in fs::read_dir(&self.directory).unwrap().flatten() {
            fs::remove_file(file.path()).unwrap();
        }
        (self.started.end(), serde_json::from_str(&report).unwrap())
    }
}

/// Of each rank, what the report says: how it ended, and whether it is lost.
fn fates(report: &Value) -> Vec<(i64, bool)> {
    let ranks = report["ranks"].as_array().unwrap().iter();
    ranks.map(|it| (it["exit_code"].as_i64().unwrap(), it["lost"].as_bool().unwrap())).collect()
}

#[test]
fn a_job_goes_on_without_rank_0_and_another_one() {
    let job = Job::start(&["--max-restarts=1"], "");
    job.lose(0, "KILL");
    job.lose(2, "3");
    job.end_rank(1, "0");
    job.end_rank(3, "0");
    let (ended, report) = job.end();
    assert_eq!((ended.code, &report["exit_code"]), (0, &0.into()), "{}", ended.stderr);
    assert_eq!(fates(&report), [(-9, true), (0, false), (3, true), (0, false)]);
    assert!(report["first_failure"].is_null() && report["restarts"] == 0, "{report}");
    assert!(report["ranks"][0]["ended_at"].as_f64().unwrap() > 1.7e9);
    let lines = ended.report();
    assert!(lines[0].starts_with("drumline: rank 0 (pid "), "{lines:?}");
    assert!(lines[0].contains(") was killed by signal 9 (SIGKILL) after "), "{lines:?}");
    let goes_on = |left| {
        format!(
            "; the job goes on without it (ranks that run on this host: {left}) (drumline explain the-launcher)"
        )
    };
    assert!(lines[0].ends_with(&goes_on(3)) && lines[1].contains("dmesg"), "{lines:?}");
    assert!(lines[2].starts_with("drumline: rank 2 (pid "), "{lines:?}");
    assert!(lines[2].contains(") exited with code 3 after "), "{lines:?}");
    assert!(lines[2].ends_with(&goes_on(2)), "{lines:?}");
    let last = "drumline: the job had gone on without: 0 (SIGKILL); 2 (exit code 3)";
    assert_eq!(lines[3..], [last]);
}

#[test]
fn with_too_few_ranks_the_job_fails() {
    let job = Job::start(&[], "");
    job.lose(1, "KILL");
    job.lose(3, "KILL");
    job.end_rank(0, "KILL");
    let (ended, report) = job.end();
    assert_eq!((ended.code, &report["exit_code"]), (128 + 9, &137.into()), "{}", ended.stderr);
    let last = "drumline: ended the other ranks: 2 (SIGTERM)";
    assert!(ended.stderr.lines().any(|line| line == last), "{}", ended.stderr);
    assert_eq!(report["ranks"][2]["told"], "SIGTERM");
    assert!(report["first_failure"].is_u64(), "{report}");
}

#[test]
fn a_rank_that_has_not_told_that_the_others_go_on_ends_the_job() {
    let job = Job::start(&[], "2");
    job.lose(1, "KILL");
    job.end_rank(2, "7");
    let (ended, report) = job.end();
    let last = "drumline: ended the other ranks: 0, 3 (SIGTERM)";
    assert!(ended.stderr.lines().any(|line| line == last), "{}", ended.stderr);
    assert!([7, 137].contains(&ended.code), "{}", ended.stderr);
    assert_eq!(report["ranks"][2]["exit_code"], 7);
}

#[test]
fn a_signal_ends_a_job_that_has_lost_a_rank() {
    let job = Job::start(&[], "");
    job.lose(3, "KILL");
    job.started.signal(Signal::TERM);
    let (ended, report) = job.end();
    assert_eq!((ended.code, &report["stopped_by"]), (128 + 15, &"SIGTERM".into()));
    assert_eq!(fates(&report), [(-15, false), (-15, false), (-15, false), (-9, true)]);
    let lines = ended.report();
    assert!(lines.contains(&"drumline: the job had gone on without: 3 (SIGKILL)"), "{lines:?}");
}

#[test]
fn the_number_of_ranks_to_go_on_with_reaches_the_ranks_and_is_checked_first() {
    let script = "echo $DRUMLINE_MIN_RANKS";
    let job =
        |min| Launch::new(["--nproc-per-node=2", min, "--", "sh", "-c", script]).start().end();
    let ended = job("--min-ranks=2");
    assert_eq!((ended.code, ended.sorted_stdout()), (0, vec!["[0] 2", "[1] 2"]));
    for (given, number) in [("--min-ranks=0", "0"), ("--min-ranks=3", "3")] {
        let ended = job(given);
        assert_eq!((ended.code, &ended.stdout[..]), (2, &b""[..]), "{}", ended.stderr);
        let text =
            format!("--min-ranks: {number} should be a number from 1 to 2, the ranks of this job");
        assert!(ended.stderr.contains(&text), "{}", ended.stderr);
    }
}

/// Two hosts with two ranks each.
fn on_two_hosts(town: &Town) -> [Job; 2] {
    let meeting = town.at_first_host("2");
    let this = env::current_exe().unwrap();
    let mut jobs = ["0", "1"].map(|host| {
        let words = words("2", &["--node-rank", host], this.to_str().unwrap());
        Job::of(meeting.host(host.parse().unwrap(), &words).variable("SILENT", ""))
    });
    jobs.iter_mut().for_each(|job| job.started.wait_for("ready", 2));
    jobs
}

#[test]
fn a_host_goes_on_with_one_of_its_ranks_and_the_others_with_theirs() {
    let Some(town) = Town::of(2) else { return };
    let [first, second] = on_two_hosts(&town);
    first.lose(0, "KILL");
    second.lose(3, "1");
    first.end_rank(1, "0");
    second.end_rank(2, "0");
    for (job, fate) in [(first, [(-9, true), (0, false)]), (second, [(0, false), (1, true)])] {
        let (ended, report) = job.end();
        assert_eq!((ended.code, fates(&report)), (0, fate.to_vec()), "{}", ended.stderr);
    }
}

#[test]
fn ranks_of_other_hosts_go_on_without_the_last_rank_of_a_host_while_they_are_enough() {
    for last in ["0", "KILL"] {
        let Some(town) = Town::of(2) else { return };
        let [first, second] = on_two_hosts(&town);
        second.lose(3, "KILL");
        second.end_rank(2, "KILL");
        first.end_rank(0, last);
        first.end_rank(1, last);
        let code = if last == "0" { 0 } else { 137 };
        for (job, whose) in [(first, "host"), (second, "this host")] {
            let (ended, report) = job.end();
            assert_eq!(
                (ended.code, &report["exit_code"]),
                (code, &code.into()),
                "{}",
                ended.stderr
            );
            let told = ended.stderr.contains(&format!("goes on without the ranks of {whose}"));
            assert!(told || last == "KILL", "{}", ended.stderr);
        }
    }
}
