//! Ends processes that ranks have started.

use std::{
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{
        Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, getpid, pidfd_open, pidfd_send_signal,
        waitid,
    },
};

use crate::{
    processes::{self, Process},
    worker::Worker,
};

/// How long a process may take to end after SIGKILL. A process that hangs in the kernel takes longer, and
/// ends when it no longer hangs.
const PATIENCE: Duration = Duration::from_secs(1);

/// The longest time between two looks at all processes.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// The most processes that are signalled after one look, because each takes a descriptor.
const AT_ONCE: usize = 200;

/// A process that was sent SIGKILL.
#[derive(Debug)]
pub(crate) struct Swept {
    pub(crate) process: Process,
    pub(crate) is_gone: bool,
}

/// Kills all processes below this one that do not end within `grace`, and those that they start meanwhile,
/// until none is left. Returns the killed processes. This process must be a subreaper.
pub(crate) fn end_all_below(grace: Duration) -> Vec<Swept> {
    let began = Instant::now();
    let mut killed: Vec<Process> = Vec::new();
    let mut latest = began;
    loop {
        let table = if is_childless() { Vec::new() } else { processes::all() };
        let below = processes::below(getpid(), &table).into_iter();
        let mut living: Vec<&Process> = below.filter(|process| !process.has_ended()).collect();
        let may_kill = began.elapsed() >= grace;
        if living.is_empty() || (may_kill && latest.elapsed() >= grace + PATIENCE) {
            let swept = killed.into_iter().map(|process| Swept {
                is_gone: !living.iter().any(|it| it.is(&process)),
                process,
            });
            return swept.collect();
        }
        living.sort_by_key(|process| killed.iter().any(|it| it.is(process)));
        let mut pidfds = Vec::new();
        for process in living.into_iter().take(AT_ONCE) {
            let Some(pidfd) = open(process) else { continue };
            if may_kill && !killed.iter().any(|it| it.is(process)) {
                let _ = pidfd_send_signal(&pidfd, Signal::KILL);
                killed.push(process.clone());
                latest = Instant::now();
            }
            pidfds.push(pidfd);
        }
        let left = grace.saturating_sub(began.elapsed());
        wait_for_any(&pidfds, if may_kill { LOOK_EVERY } else { left.min(LOOK_EVERY) });
    }
}

/// Kills all processes below this one, and those that they start meanwhile. The exit statuses of its children stay.
pub(crate) fn kill_all_below() {
    let began = Instant::now();
    loop {
        let table = processes::all();
        let living = processes::below(getpid(), &table).into_iter().filter(|it| !it.has_ended());
        let pidfds: Vec<OwnedFd> = living.take(AT_ONCE).filter_map(open).collect();
        if pidfds.is_empty() || began.elapsed() >= PATIENCE {
            return;
        }
        for pidfd in &pidfds {
            let _ = pidfd_send_signal(pidfd, Signal::KILL);
        }
        wait_for_any(&pidfds, LOOK_EVERY);
    }
}

/// Kills these workers and the processes below them, without a keeper. It does not find processes that have
/// lost their parent.
pub(crate) fn end_trees(workers: &[Worker]) {
    let mut living: Vec<&Worker> = workers.iter().filter(|worker| !worker.has_ended()).collect();
    if living.is_empty() {
        return;
    }
    let table = processes::all();
    for worker in &living {
        for pidfd in processes::below(worker.pid(), &table).into_iter().filter_map(open) {
            let _ = pidfd_send_signal(&pidfd, Signal::KILL);
        }
        worker.kill();
    }
    let began = Instant::now();
    while !living.is_empty() && began.elapsed() < PATIENCE {
        wait_for_any(&[living[0].pidfd()], LOOK_EVERY);
        living.retain(|worker| !worker.has_ended());
    }
}

/// Collects all children that have ended, and returns whether no other child is left. Then no process is
/// below this one.
fn is_childless() -> bool {
    loop {
        match waitid(WaitId::All, WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
            Ok(Some(_)) | Err(Errno::INTR) => {}
            other => return other.is_err_and(|error| error == Errno::CHILD),
        }
    }
}

/// Collects the children of this process that have ended, except for `own` ones, which somebody waits for: those whose
/// parents have ended before them.
pub(crate) fn collect_adopted(own: impl Fn(Pid) -> bool) {
    for process in processes::all() {
        if process.has_ended() && process.is_child_of(getpid()) && !own(process.pid) {
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
            let _ = waitid(WaitId::Pid(process.pid), options);
        }
    }
}

/// A descriptor of the process. `None` if it has ended, even if another process has got its number.
fn open(process: &Process) -> Option<OwnedFd> {
    let pidfd = pidfd_open(process.pid, PidfdFlags::empty()).ok()?;
    Process::read(process.pid).filter(|now| now.is(process))?;
    Some(pidfd)
}

/// Waits until any of these processes has ended, at most `patience`.
fn wait_for_any(pidfds: &[impl std::os::fd::AsFd], patience: Duration) {
    let mut any: Vec<_> = pidfds.iter().map(|it| PollFd::new(it, PollFlags::IN)).collect();
    let _ = poll(&mut any, Timespec::try_from(patience).ok().as_ref());
}
