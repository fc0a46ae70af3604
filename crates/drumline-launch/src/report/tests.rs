use super::*;

const fn signal(number: i32) -> Ending {
    Ending::Signal { number, core_dumped: false }
}

fn ranks(exits: &[Option<(Ending, Option<Signal>)>]) -> Vec<Fate> {
    let at = Duration::from_millis(12_340);
    let rank = |(i, exit): (usize, &Option<(Ending, Option<Signal>)>)| Fate {
        pid: Pid::from_raw(100 + i as i32).unwrap(),
        exit: exit.map(|(ending, told)| Exit { ending, at, told, is_lost: false }),
        waits: Vec::new(),
        hung: None,
    };
    exits.iter().enumerate().map(rank).collect()
}

fn report(verdict: Verdict, ranks: &[Fate]) -> Report<'_> {
    const NOTHING: &LastWords = &LastWords { tail: Vec::new(), error: None };
    Report {
        first_rank: 0,
        verdict,
        started_at: SystemTime::UNIX_EPOCH,
        host: "node7",
        ranks,
        words: NOTHING,
        is_victim: false,
        left: &[],
        incomplete: &[],
        logs: None,
    }
}

fn rendered(report: Report<'_>) -> String {
    String::from_utf8(report.render()).unwrap()
}

fn text(verdict: Verdict, ranks: &[Fate], tail: &[&str]) -> String {
    let tail = tail.iter().map(|line| line.as_bytes().to_vec()).collect();
    let words = LastWords { tail, error: None };
    rendered(Report { words: &words, ..report(verdict, ranks) })
}

#[test]
fn the_first_failure_comes_first_with_its_last_words() {
    let term = Some(Signal::TERM);
    let ranks = ranks(&[
        Some((signal(15), term)),
        Some((Ending::Code(3), None)),
        Some((signal(15), term)),
        Some((signal(15), term)),
        Some((Ending::Code(1), term)),
        Some((Ending::Code(0), None)),
        Some((signal(6), None)),
        Some((signal(9), term)),
        Some((signal(9), Some(Signal::KILL))),
    ]);
    assert_eq!(
        text(Verdict::Failed { worker: 1 }, &ranks, &["Traceback", "  boom"]),
        "drumline: rank 1 (pid 101) exited with code 3 after 12.3 s, at 1970-01-01T00:00:12.340Z on node7 \
         (drumline explain the-launcher)\n\
         drumline: last lines of its stderr:\n    Traceback\n      boom\n\
         drumline: failed as well: 6 (SIGABRT)\n\
         drumline: ended the other ranks: 0, 2-3 (SIGTERM); 4 (exit code 1); \
         7 (SIGKILL, not from drumline); 8 (SIGKILL)\n\
         drumline: had finished before: 5 (exit code 0)\n"
    );
}

#[test]
fn a_culprit_that_drumline_has_ended_and_one_of_another_host_are_told() {
    let term = Some(Signal::TERM);
    let ended = ranks(&[Some((Ending::Code(1), None)), Some((Ending::Code(101), term)), None]);
    let first = |worker, is_victim| {
        let report = Report { is_victim, ..report(Verdict::Failed { worker }, &ended) };
        rendered(report)
    };
    assert_eq!(
        first(1, false).lines().next().unwrap(),
        "drumline: rank 1 (pid 101) failed, and did not end by itself: exit code 101 upon SIGTERM from drumline, \
         after 12.3 s, at 1970-01-01T00:00:12.340Z on node7 (drumline explain the-launcher)"
    );
    assert!(first(2, false).starts_with("drumline: rank 2 (pid 102) failed, and has not ended ("));
    let victim = "drumline: rank 0 only lost a rank of another host, which failed first\n";
    assert!(first(0, true).contains(victim) && !first(0, false).contains(victim));
}

#[test]
fn a_rank_that_hung_is_told_by_how_and_where() {
    let killed = Some((signal(9), Some(Signal::KILL)));
    let mut ranks = ranks(&[Some((signal(15), Some(Signal::TERM))), killed]);
    ranks[1].hung = Some(Finding {
        worker: 1,
        signal: Signal::KILL,
        how: "it sleeps".into(),
        details: vec!["rank 1: train (101): waits in nanosleep".into()],
    });
    ranks[1].waits = vec!["train (101): waits in exit".into()];
    assert_eq!(
        text(Verdict::Failed { worker: 1 }, &ranks, &[]),
        "drumline: rank 1 (pid 101) hung: it sleeps (drumline explain the-launcher)\n    \
         rank 1: train (101): waits in nanosleep\n\
         drumline: it wrote nothing to its stderr\n\
         drumline: ended the other ranks: 0 (SIGTERM)\n"
    );
}

#[test]
fn logs_and_what_they_lack_are_told() {
    let incomplete = ["a/stdout.log is not complete: it is full".to_owned()];
    let report = report(Verdict::Success, &[]);
    let report = Report { incomplete: &incomplete, logs: Some(Path::new("a")), ..report };
    let lines = "drumline: a/stdout.log is not complete: it is full\ndrumline: logs are in a\n";
    assert_eq!(rendered(report), lines);
}

#[test]
fn a_rank_that_fails_at_once_has_lived_for_some_time() {
    assert_eq!(lifetime(Duration::from_micros(3)), "1 ms");
    assert_eq!(lifetime(Duration::from_millis(12)), "12 ms");
    assert_eq!(lifetime(Duration::from_millis(12_340)), "12.3 s");
}

#[test]
fn a_library_that_knows_only_some_names_gets_a_hint() {
    let ranks = ranks(&[Some((Ending::Code(1), None))]);
    let failed = Verdict::Failed { worker: 0 };
    for said in [
        "ValueError: Your assigned backend drumline is not available, please use gloo",
        "ValueError: Your assigned backend drumline is not avaliable, please use gloo",
        "ValueError: Unknown backend 'drumline'. Available backends: ('gloo', 'mpi')",
    ] {
        let report = text(failed, &ranks, &["Traceback", said]);
        assert!(report.contains("hint: this library takes only names"), "{report}");
    }
    let report = text(failed, &ranks, &["ValueError: drumline is not available"]);
    assert!(!report.contains("hint"), "{report}");
}

#[test]
fn a_lone_killed_rank_gets_a_hint() {
    let report = text(Verdict::Failed { worker: 0 }, &ranks(&[Some((signal(9), None))]), &[]);
    assert!(report.starts_with("drumline: rank 0 (pid 100) was killed by signal 9 (SIGKILL)"));
    assert!(report.contains("dmesg") && report.contains("nothing to its stderr"), "{report}");
    assert!(!report.contains("other ranks"), "{report}");
}

#[test]
fn where_ranks_waited_is_told_of_those_that_did_not_end_by_themselves() {
    let told = Some(Signal::KILL);
    let ended = [Some((signal(9), told)), Some((Ending::Code(0), told)), None];
    let mut ranks = ranks(&ended);
    for rank in &mut ranks {
        rank.waits = vec![format!("python3 ({}): waits in futex", rank.pid)];
    }
    let report = text(Verdict::Stopped(Signal::TERM), &ranks, &[]);
    let told: Vec<&str> = report.lines().skip(1).take(5).collect();
    assert_eq!(told[0], "drumline: rank 0 (pid 100) did not end; before SIGKILL:");
    assert_eq!(told[1], "    python3 (100): waits in futex");
    assert_eq!(told[2], "drumline: rank 2 (pid 102) did not end; before SIGKILL:");
    assert_eq!(told[3], "    python3 (102): waits in futex");
    assert!(told[4].starts_with("drumline: hint: ") && told[4].contains("py-spy"), "{report}");
}

#[test]
fn processes_that_are_left_behind_are_named_also_after_a_success() {
    let told = |left: &[&str]| {
        let left: Vec<String> = left.iter().map(|it| (*it).to_owned()).collect();
        rendered(Report { left: &left, ..report(Verdict::Success, &[]) })
    };
    assert_eq!(told(&[]), "");
    let one = "drumline: ended a process that the ranks had left behind: sleep (pid 7)\n";
    assert_eq!(told(&["sleep (pid 7)"]), one);
    let many = "drumline: ended 10 processes that the ranks had left behind: a, a, a, a, a, a, a, a \
                and 2 more\n";
    assert_eq!(told(&["a"; 10]), many);
}

#[test]
fn stops_and_stuck_processes_are_told() {
    let ranks = ranks(&[None, Some((Ending::Code(0), Some(Signal::INT)))]);
    let report = text(Verdict::Stopped(Signal::INT), &ranks, &["not shown"]);
    assert!(report.starts_with("drumline: stopped by SIGINT\ndrumline: rank 0 (pid 100)"));
    assert!(report.ends_with("ended the ranks: 1 (exit code 0)\n"), "{report}");
    assert!(!report.contains("not shown"));
}
