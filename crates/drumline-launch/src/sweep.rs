//! Ends processes that ranks have started.
//!
//! `/proc` is no snapshot: whoever forks and ends while it is read may not be seen. What the kernel says of children is
//! certain. This process is the subreaper of all that is to end, so each process below it becomes its child when the
//! parent ends, and nothing is below it once it has no child.
//!
//! A chain of processes, each of which starts the next one and ends, may outrun whoever signals them one by one. A
//! process group gets a signal at one moment, and no fork is under way then. So whole groups are killed.

use std::{
    collections::BTreeSet,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{
        Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, getpgid, getpgrp, getpid, kill_process,
        kill_process_group, pidfd_open, pidfd_send_signal, waitid,
    },
};

use crate::{
    processes::{self, Process},
    worker::Worker,
};

/// How long a process may take to end after SIGKILL. A process that hangs in the kernel takes longer, and
/// ends when it no longer hangs.
const PATIENCE: Duration = Duration::from_secs(1);

/// The longest that [`end_all_below`] takes, beside the time of grace. Only processes that start others faster than they
/// are found take so long, and those whose memory takes the kernel long to free or to write to a file.
pub(crate) const PATIENCE_MAX: Duration = Duration::from_secs(60);

/// The longest time between two looks at all processes.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// The most processes that are waited for at once, because each takes a descriptor.
const AT_ONCE: usize = 200;

/// The most processes that are told of.
const TOLD_MAX: usize = 1000;

/// The greatest number of a process that any kernel gives.
const PID_MAX: i32 = 1 << 22;

/// A process that was sent SIGKILL.
#[derive(Debug)]
pub(crate) struct Swept {
    pub(crate) process: Process,
    pub(crate) is_gone: bool,
}

/// Kills all processes below this one that do not end within `grace`, and those that they start meanwhile,
/// until none is left. Returns the killed processes. This process must be a subreaper.
pub(crate) fn end_all_below(grace: Duration) -> Vec<Swept> {
    let mut sweep = Sweep::default();
    let until = Instant::now() + grace;
    while !until.saturating_duration_since(Instant::now()).is_zero() {
        for child in processes::children() {
            sweep.collect(child, false);
        }
        if is_childless() {
            return Vec::new();
        }
        let left = until.saturating_duration_since(Instant::now());
        wait_for_any(&open_all(processes::children()), left.min(LOOK_EVERY));
    }
    // Those whose parents collect them at their end are seen only now.
    sweep.killed = living_below().into_iter().take(TOLD_MAX).collect();
    sweep.kill_all(|_| false);
    sweep.told()
}

/// Kills all processes below this one, and those that they start meanwhile. The exit statuses of its `own` children stay.
pub(crate) fn kill_all_below(own: impl Fn(Pid) -> bool) {
    Sweep::default().kill_all(own);
}

#[derive(Debug, Default)]
struct Sweep {
    /// Process groups that children of this process have made.
    groups: BTreeSet<i32>,
    /// Children that were sent SIGKILL and are not collected.
    signalled: BTreeSet<i32>,
    /// Processes that were killed.
    killed: Vec<Process>,
}

impl Sweep {
    /// Kills until nothing is left but `own` children that have ended, or until those that are left do not end.
    fn kill_all(&mut self, own: impl Fn(Pid) -> bool) {
        let began = Instant::now();
        let mut latest = began;
        loop {
            let before = processes::children();
            let (mut is_news, mut lives) = (false, false);
            for &child in &before {
                is_news |= self.kill(child);
                lives |= match own(child) {
                    true => matches!(waitid(WaitId::Pid(child), PEEK), Ok(None)),
                    false => !self.collect(child, true),
                };
            }
            // Of a child that had ended before the second look, all children are in it.
            if is_childless() || (!lives && !before.is_empty() && before == processes::children()) {
                return;
            }
            if !is_news && before.is_empty() {
                is_news = self.kill_unlisted(&own);
            }
            if is_news {
                latest = Instant::now();
            }
            if began.elapsed() >= PATIENCE_MAX {
                return;
            }
            if is_news {
                continue;
            }
            // A child that does not end may have children.
            let living = living_below();
            if living.iter().any(|it| it.is_going_down()) {
                latest = Instant::now();
            }
            let pidfds = kill(&living);
            if latest.elapsed() >= PATIENCE {
                return;
            }
            wait_for_any(&pidfds, LOOK_EVERY);
        }
    }

    /// Kills a child of this process, whose number is nobody else's until it is collected, and all processes of its group
    /// if none of them can be a stranger. Returns `false` if it was killed before.
    fn kill(&mut self, child: Pid) -> bool {
        if waitid(WaitId::Pid(child), PEEK).is_err() || !self.signalled.insert(child.as_raw_pid()) {
            return false;
        }
        let _ = kill_process(child, Signal::KILL);
        if let Some(process) = Process::read(child)
            && let Some(group) = Pid::from_raw(process.group).filter(|it| !it.is_init())
            && self.is_of_children(&process)
        {
            let _ = kill_process_group(group, Signal::KILL);
        }
        true
    }

    /// Whether only processes below this one can be in the group of this child: below this one the group was made, or
    /// its session.
    fn is_of_children(&mut self, child: &Process) -> bool {
        if child.leads_its_group() {
            self.groups.insert(child.group);
        }
        let is_foreign = |own: Process| own.session != child.session;
        self.groups.contains(&child.group) || Process::read(getpid()).is_some_and(is_foreign)
    }

    /// Kills the children that no list has: `/proc` is not there, or belongs to another namespace. Returns whether there
    /// are any.
    fn kill_unlisted(&mut self, own: impl Fn(Pid) -> bool) -> bool {
        let all = (1..=PID_MAX).filter_map(Pid::from_raw);
        let children: Vec<Pid> = all.filter(|it| waitid(WaitId::Pid(*it), PEEK).is_ok()).collect();
        let mut is_news = false;
        for child in children {
            is_news |= self.kill(child);
            if !own(child) {
                self.collect(child, true);
            }
        }
        is_news
    }

    /// Collects a child of this process if it has ended, and returns whether it has. One that was killed is told of if
    /// `tells`.
    fn collect(&mut self, child: Pid, tells: bool) -> bool {
        let Ok(status) = waitid(WaitId::Pid(child), PEEK) else { return true };
        let Some(status) = status else { return false };
        if let Some(process) = Process::read(child) {
            if process.leads_its_group() {
                self.groups.insert(process.group);
            }
            let is_new = || !self.killed.iter().any(|it| it.is(&process));
            let is_killed = status.terminating_signal() == Some(Signal::KILL.as_raw());
            if tells && is_killed && self.killed.len() < TOLD_MAX && is_new() {
                self.killed.push(process);
            }
        }
        self.signalled.remove(&child.as_raw_pid());
        let _ = waitid(WaitId::Pid(child), COLLECT);
        true
    }

    /// The processes that were killed, and those that do not end.
    fn told(self) -> Vec<Swept> {
        let left = if is_childless() { Vec::new() } else { living_below() };
        let has_gone = |it: &Process| !left.iter().any(|living| living.is(it));
        let gone = self.killed.into_iter().filter(has_gone);
        let gone: Vec<Swept> = gone.map(|process| Swept { process, is_gone: true }).collect();
        let left = left.into_iter().take(TOLD_MAX);
        let left = left.map(|process| Swept { process, is_gone: false });
        gone.into_iter().chain(left).collect()
    }
}

/// The processes below this one that have not ended, as far as one look finds them.
fn living_below() -> Vec<Process> {
    let table = processes::all();
    let below = processes::below(getpid(), &table).into_iter();
    below.filter(|it| !it.has_ended()).cloned().collect()
}

const COLLECT: WaitIdOptions = WaitIdOptions::EXITED.union(WaitIdOptions::NOHANG);
const PEEK: WaitIdOptions = COLLECT.union(WaitIdOptions::NOWAIT);

/// Whether this process has no child, not even one that has ended. Then no process is below it.
fn is_childless() -> bool {
    loop {
        match waitid(WaitId::All, PEEK) {
            Err(Errno::INTR) => {}
            other => return other.is_err_and(|error| error == Errno::CHILD),
        }
    }
}

/// Collects the children of this process that have ended, except for `own` ones, which somebody waits for: those whose
/// parents have ended before them.
pub(crate) fn collect_adopted(own: impl Fn(Pid) -> bool) {
    for child in processes::children().into_iter().filter(|child| !own(*child)) {
        let _ = waitid(WaitId::Pid(child), COLLECT);
    }
}

/// Kills these workers and the processes below them, without a keeper. It does not find processes that have
/// lost their parent.
pub(crate) fn end_trees(workers: &[Worker]) {
    let living: Vec<&Worker> = workers.iter().filter(|worker| !worker.has_ended()).collect();
    let table = if living.is_empty() { Vec::new() } else { processes::all() };
    let below = living.iter().flat_map(|worker| processes::below(worker.pid(), &table));
    let own = living.iter().filter_map(|worker| Process::read(worker.pid()));
    let all: Vec<Process> = below.cloned().chain(own).collect();
    living.iter().for_each(|worker| worker.kill());
    let is_there =
        |it: &Process| Process::read(it.pid).is_some_and(|now| now.is(it) && !now.has_ended());
    kill_found(|| all.iter().filter(|it| is_there(it)).cloned().collect());
}

/// Kills all processes below this one, and those that they start meanwhile, but for keepers, which have the process
/// group of this one. The exit statuses of its children stay.
pub(crate) fn kill_ranks_below() {
    let is_keeper = |it: &Process| getpgid(Some(it.pid)).is_ok_and(|group| group == getpgrp());
    kill_found(|| living_below().into_iter().filter(|it| !is_keeper(it)).collect());
}

/// Kills all processes that were started with this variable, `NAME=value`, without a keeper: those, too, that have lost
/// their parents. It does not find one that has replaced its variables.
pub(crate) fn end_started_with(variable: &str) {
    let is_started_with =
        |it: &Process| it.pid != getpid() && !it.has_ended() && it.was_started_with(variable);
    kill_found(|| processes::all().into_iter().filter(is_started_with).collect());
}

/// Kills the processes that a look finds, and looks again, until it finds none.
fn kill_found(look: impl Fn() -> Vec<Process>) {
    let began = Instant::now();
    loop {
        let pidfds = kill(&look());
        if pidfds.is_empty() || began.elapsed() >= PATIENCE {
            return;
        }
        wait_for_any(&pidfds, LOOK_EVERY);
    }
}

/// Kills some of these processes, and returns their descriptors. One that has ended has none, even if another process has
/// got its number.
fn kill(processes: &[Process]) -> Vec<OwnedFd> {
    let open = |process: &Process| {
        let pidfd = pidfd_open(process.pid, PidfdFlags::empty()).ok()?;
        Process::read(process.pid).filter(|now| now.is(process))?;
        let _ = pidfd_send_signal(&pidfd, Signal::KILL);
        Some(pidfd)
    };
    processes.iter().take(AT_ONCE).filter_map(open).collect()
}

/// Descriptors of children of this process.
fn open_all(children: Vec<Pid>) -> Vec<OwnedFd> {
    let open = |pid| pidfd_open(pid, PidfdFlags::empty()).ok();
    children.into_iter().take(AT_ONCE).filter_map(open).collect()
}

/// Waits until any of these processes has ended, at most `patience`.
fn wait_for_any(pidfds: &[impl std::os::fd::AsFd], patience: Duration) {
    let mut any: Vec<_> = pidfds.iter().map(|it| PollFd::new(it, PollFlags::IN)).collect();
    let _ = poll(&mut any, Timespec::try_from(patience).ok().as_ref());
}
