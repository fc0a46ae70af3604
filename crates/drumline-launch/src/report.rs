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
        let others = self.ranks.iter().enumerate().filter(|(local, fate)| match is_success {
            true => fate.exit.is_some_and(|exit| exit.is_lost),
            false => Some(*local) != failed,
        });
        let others = others.map(|(local, fate)| (self.first_rank + local, fate));
        let ended = if failed.is_some() { "ended the other ranks" } else { "ended the ranks" };
        bytes.extend(fates(others, ended).into_bytes());
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
        let mut bytes = self.cause(worker, "").into_bytes();
        bytes.extend(self.words.render());
        if self.is_victim {
            let rank = self.first_rank + worker;
            let text = "only lost a rank of another host, which failed first";
            bytes.extend(format!("drumline: rank {rank} {text}\n").into_bytes());
        }
        bytes
    }

    /// What is told of a worker that was lost, while `left` others run.
    pub(crate) fn lost(self, worker: usize, left: usize) -> String {
        let then = format!("; the job goes on without it (ranks that run on this host: {left})");
        self.cause(worker, &then)
    }

    /// How the worker ended, and why perhaps. `then` tells what follows.
    fn cause(self, worker: usize, then: &str) -> String {
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
            "drumline: rank {rank} (pid {pid}) {what} after {after}, at {at} on {host}{then} {more}\n"
        );
        let hint = hint(exit.ending).filter(|_| exit.told.is_none());
        if let Some(hint) = hint.or_else(|| refusal(&self.words.tail)) {
            let _ = writeln!(text, "drumline: hint: {hint}");
        }
        text
    }
}

/// What is said before a restart.
pub(crate) fn restart(used: u32, max: u32, pause: Duration) -> String {
    let when = if pause.is_zero() { "now".into() } else { format!("in {pause:?}") };
    format!("restart {used} of {max} {when}")
}

/// What is said of a job with restarts that does not start again.
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
    Some(format!("the job does not start again: {why}"))
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
        let has_ended = exit.is_some_and(|exit| exit.ending != Ending::KILLED);
        if hung.is_some() || waits.is_empty() || has_ended {
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
    let [mut failed, mut ended, mut done, mut lost] = <[Groups; 4]>::default();
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
            Some(Exit { ending, is_lost: true, .. }) => lost.add(index, ending.to_string()),
            Some(Exit { ending, told: None, .. }) if ending.is_success() => {
                done.add(index, ending.to_string());
            }
            Some(Exit { ending, told: None, .. }) => failed.add(index, ending.to_string()),
            Some(Exit { ending, told: Some(told), .. }) => {
                let by_another = ending == Ending::KILLED && told != Signal::KILL;
                let by = if by_another { ", not from drumline" } else { "" };
                ended.add(index, format!("{ending}{by}"));
            }
        }
    }
    let (done, lost) = (("had finished before", done), ("the job had gone on without", lost));
    let groups = [("failed as well", failed), (title_of_ended, ended), done, lost];
    groups.iter().fold(stuck, |mut text, (title, groups)| {
        if !groups.is_empty() {
            let _ = writeln!(text, "drumline: {title}: {groups}");
        }
        text
    })
}

/// What to set if a Python library has refused drumline because of its name.
fn refusal(tail: &[Vec<u8>]) -> Option<&'static str> {
    // accelerate (old ones spell it "avaliable") and, through it, transformers; Ignite.
    const SAID: [&str; 2] =
        ["Your assigned backend drumline is not ava", "Unknown backend 'drumline'"];
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
mod tests;
