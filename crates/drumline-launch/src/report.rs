//! The report on a job that did not end well. It begins with the first failure.

use std::{
    fmt::Write,
    path::Path,
    time::{Duration, SystemTime},
};

use rustix::process::{Pid, Signal};

use crate::{
    Ending,
    clock::utc,
    ending::signal_name,
    groups::Groups,
    last_words::LastWords,
    restarts::{Next, NoRestart},
    supervisor::{Exit, Verdict},
    watch::finding::Finding,
};

/// How one rank ended.
#[derive(Clone, Debug)]
pub(crate) struct Fate {
    pub(crate) pid: Pid,
    /// `None` if the process outlived SIGKILL.
    pub(crate) exit: Option<Exit>,
    /// Where its threads waited before it was killed, as lines.
    pub(crate) waits: Vec<String>,
    /// How it hung, if it was ended because of that.
    pub(crate) hung: Option<Finding>,
}

/// What is to tell of a world that has ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Report<'a> {
    pub(crate) verdict: Verdict,
    /// When the ranks started, by the clock of this host.
    pub(crate) started_at: SystemTime,
    /// The name of this host.
    pub(crate) host: &'a str,
    /// The rank of this host's first worker.
    pub(crate) first_rank: usize,
    pub(crate) ranks: &'a [Fate],
    pub(crate) words: &'a LastWords,
    /// Whether they only tell the end of a rank of another host.
    pub(crate) is_victim: bool,
    /// The processes that the ranks left behind.
    pub(crate) left: &'a [String],
    /// The files in which output is missing, and why.
    pub(crate) incomplete: &'a [String],
    /// The directory of the logs, if that is news.
    pub(crate) logs: Option<&'a Path>,
}

impl Report<'_> {
    /// The text for stderr. Empty if all ranks succeeded and there is nothing else to tell.
    pub(crate) fn render(self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let failed = match self.verdict {
            Verdict::Success | Verdict::Abandoned => None,
            Verdict::Stopped(signal) => {
                let name = signal_name(signal.as_raw());
                bytes.extend(format!("drumline: stopped by {name}\n").into_bytes());
                None
            }
            Verdict::Failed { worker } => {
                bytes.extend(self.failure(worker));
                Some(worker)
            }
        };
        let is_success = matches!(self.verdict, Verdict::Success | Verdict::Abandoned);
        if !is_success {
            bytes.extend(waits(self.first_rank, self.ranks).into_bytes());
        }
        bytes.extend(leftovers(self.left).into_bytes());
        if !is_success {
            let others = self.ranks.iter().enumerate().filter(|(local, _)| Some(*local) != failed);
            let others = others.map(|(local, fate)| (self.first_rank + local, fate));
            let ended = if failed.is_some() { "ended the other ranks" } else { "ended the ranks" };
            bytes.extend(fates(others, ended).into_bytes());
        }
        for file in self.incomplete {
            bytes.extend(format!("drumline: {file}\n").into_bytes());
        }
        if let Some(logs) = self.logs {
            bytes.extend(format!("drumline: logs are in {}\n", logs.display()).into_bytes());
        }
        bytes
    }

    /// What is told of the worker that failed first: how it ended, why perhaps, and what it said.
    pub(crate) fn failure(self, worker: usize) -> Vec<u8> {
        let mut bytes = self.cause(worker).into_bytes();
        bytes.extend(self.words.render());
        if self.is_victim {
            let rank = self.first_rank + worker;
            bytes.extend(
                format!(
                    "drumline: rank {rank} only lost a rank of another host, which failed first\n"
                )
                .into_bytes(),
            );
        }
        bytes
    }

    /// How the worker ended that failed first, and why perhaps.
    fn cause(self, worker: usize) -> String {
        let (rank, more) = (self.first_rank + worker, drumline::Section::TheLauncher);
        let (pid, exit) = match self.ranks.get(worker) {
            Some(Fate { pid, hung: Some(hung), .. }) => {
                let how = &hung.how;
                let mut text = format!("drumline: rank {rank} (pid {pid}) hung: {how} {more}\n");
                text.extend(hung.details.iter().map(|line| format!("    {line}\n")));
                return text;
            }
            Some(Fate { pid, exit: Some(exit), .. }) => (pid, exit),
            // It has told its failure, or the others have lost it.
            Some(Fate { pid, exit: None, .. }) => {
                return format!(
                    "drumline: rank {rank} (pid {pid}) failed, and has not ended {more}\n"
                );
            }
            None => return String::new(),
        };
        let what = match (exit.told, exit.ending) {
            (Some(told), ending) => format!(
                "failed, and did not end by itself: {ending} upon {} from drumline,",
                signal_name(told.as_raw())
            ),
            (None, Ending::Code(code)) => format!("exited with code {code}"),
            (None, Ending::Signal { number, .. }) => {
                format!("was killed by signal {number} ({})", exit.ending)
            }
        };
        let (after, at) = (lifetime(exit.at), utc(self.started_at + exit.at));
        let host = self.host;
        let mut text = format!(
            "drumline: rank {rank} (pid {pid}) {what} after {after}, at {at} on {host} {more}\n"
        );
        let hint = hint(exit.ending).filter(|_| exit.told.is_none());
        if let Some(hint) = hint.or_else(|| refusal(&self.words.tail)) {
            let _ = writeln!(text, "drumline: hint: {hint}");
        }
        text
    }
}

/// The line before a restart.
pub(crate) fn restart(used: u32, max: u32, pause: Duration) -> String {
    let when = if pause.is_zero() { "now".into() } else { format!("in {pause:?}") };
    format!("drumline: restart {used} of {max} {when}\n")
}

/// The line that says why a job with restarts does not start again.
pub(crate) fn no_restart(next: Next) -> Option<String> {
    let why = match next {
        Next::Restart(_) | Next::End(NoRestart::UsedUp(0) | NoRestart::HostsLost(_)) => {
            return None;
        }
        Next::End(NoRestart::UsedUp(1)) => "its restart is used up".into(),
        Next::End(NoRestart::UsedUp(max)) => format!("its {max} restarts are used up"),
        Next::End(NoRestart::Code(code)) => {
            format!("exit code {code} says that another start would end in the same way")
        }
        Next::End(NoRestart::NoStep(worlds)) => {
            format!("it has failed {worlds} times in a row before its first step")
        }
    };
    Some(format!("drumline: the job does not start again: {why}\n"))
}

/// `4.1 s`, or `12 ms`: a rank that fails at once has not lived for `0.0 s`.
fn lifetime(time: Duration) -> String {
    match time.as_secs_f64() {
        seconds if seconds < 0.1 => format!("{} ms", time.as_millis().max(1)),
        seconds => format!("{seconds:.1} s"),
    }
}

/// Names the processes that were killed at the end.
fn leftovers(left: &[String]) -> String {
    const NAMED_MAX: usize = 8;
    let named = left.iter().take(NAMED_MAX).map(String::as_str).collect::<Vec<_>>().join(", ");
    let more = left.len().saturating_sub(NAMED_MAX);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    match left.len() {
        0 => String::new(),
        1 => format!("drumline: ended a process that the ranks had left behind: {named}\n"),
        count => {
            format!(
                "drumline: ended {count} processes that the ranks had left behind: {named}{more}\n"
            )
        }
    }
}

/// Where the killed ranks waited. Leaves out ranks that ended just before they were killed.
fn waits(first_rank: usize, ranks: &[Fate]) -> String {
    let mut text = String::new();
    for (local, Fate { pid, exit, waits, hung }) in ranks.iter().enumerate() {
        let killed = Ending::Signal { number: Signal::KILL.as_raw(), core_dumped: false };
        if hung.is_some() || waits.is_empty() || exit.is_some_and(|exit| exit.ending != killed) {
            continue;
        }
        let rank = first_rank + local;
        let _ = writeln!(text, "drumline: rank {rank} (pid {pid}) did not end; before SIGKILL:");
        for line in waits {
            let _ = writeln!(text, "    {line}");
        }
    }
    if !text.is_empty() {
        text.push_str(
            "drumline: hint: a larger --kill-after leaves time to look at such a rank, with gdb -p PID or \
             py-spy dump --pid PID\n",
        );
    }
    text
}

/// The likely cause of a death by signal, and what to check.
fn hint(ending: Ending) -> Option<&'static str> {
    use signal_hook::consts::{SIGBUS, SIGFPE, SIGILL, SIGKILL, SIGSEGV};
    let Ending::Signal { number, .. } = ending else { return None };
    match number {
        SIGKILL => Some(
            "drumline did not send it; the kernel does when memory runs out: look for \"Out of \
             memory\" or \"oom\" in the output of dmesg",
        ),
        SIGSEGV | SIGILL | SIGFPE => {
            Some("a crash in native code; `ulimit -c unlimited` before the run keeps a core file")
        }
        SIGBUS => Some("often shared memory or a disk that is full: see df -h /dev/shm /tmp"),
        _ => None,
    }
}

/// How the ranks ended, except for the culprit.
fn fates<'a>(ranks: impl Iterator<Item = (usize, &'a Fate)>, title_of_ended: &str) -> String {
    let mut stuck = String::new();
    let (mut failed, mut ended, mut done) =
        (Groups::default(), Groups::default(), Groups::default());
    for (index, rank) in ranks {
        match rank.exit {
            None => {
                let pid = rank.pid;
                let _ = writeln!(
                    stuck,
                    "drumline: rank {index} (pid {pid}) outlived SIGKILL: it is stuck in the \
                     kernel, see /proc/{pid}/stack"
                );
            }
            Some(Exit { ending, told: None, .. }) if ending.is_success() => {
                done.add(index, ending.to_string());
            }
            Some(Exit { ending, told: None, .. }) => failed.add(index, ending.to_string()),
            Some(Exit { ending, told: Some(told), .. }) => {
                let killed = Ending::Signal { number: Signal::KILL.as_raw(), core_dumped: false };
                let by_another = ending == killed && told != Signal::KILL;
                let by = if by_another { ", not from drumline" } else { "" };
                ended.add(index, format!("{ending}{by}"));
            }
        }
    }
    let groups =
        [("failed as well", failed), (title_of_ended, ended), ("had finished before", done)];
    groups.iter().fold(stuck, |mut text, (title, groups)| {
        if !groups.is_empty() {
            let _ = writeln!(text, "drumline: {title}: {groups}");
        }
        text
    })
}

/// What to set if a Python library has refused drumline because of its name.
fn refusal(tail: &[Vec<u8>]) -> Option<&'static str> {
    // accelerate and, through it, transformers; Ignite.
    const SAID: [&str; 2] =
        ["Your assigned backend drumline is not available", "Unknown backend 'drumline'"];
    let refuses = |line: &Vec<u8>| {
        let line = String::from_utf8_lossy(line);
        SAID.iter().any(|said| line.contains(said))
    };
    tail.iter().any(refuses).then_some(
        "this library takes only names that it knows: set DRUMLINE_REPLACE_GLOO=1 and say gloo; \
         docs/guides/libraries.md has other ways",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn signal(number: i32) -> Ending {
        Ending::Signal { number, core_dumped: false }
    }

    fn ranks(exits: &[Option<(Ending, Option<Signal>)>]) -> Vec<Fate> {
        let at = Duration::from_millis(12_340);
        let rank = |(i, exit): (usize, &Option<(Ending, Option<Signal>)>)| Fate {
            pid: Pid::from_raw(100 + i as i32).unwrap(),
            exit: exit.map(|(ending, told)| Exit { ending, at, told }),
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
        assert!(
            first(2, false).starts_with("drumline: rank 2 (pid 102) failed, and has not ended (")
        );
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
}
