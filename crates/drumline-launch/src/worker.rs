//! One worker process, as the launcher sees it. The [keeper](mod@crate::keep) is its parent.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::Duration,
};

use rustix::process::{
    Pid, PidfdFlags, Signal, getpgid, kill_process_group, pidfd_open, pidfd_send_signal,
};

use crate::{events::is_readable_within, processes, recipients::Table};

/// A worker in a process group of its own, unless it reads from the terminal. A Ctrl-C at the terminal therefore reaches
/// only the launcher, which passes it on.
///
/// The kernel keeps the exit status of the process until the keeper ends. Until then it gives
/// the process number to no other process, so a signal to the group never hits a stranger.
#[derive(Debug)]
pub(crate) struct Worker {
    pid: Pid,
    pidfd: OwnedFd,
    /// The last signal, if only some of its processes have got it.
    rest: Option<Signal>,
    /// Whether it is in the group of this process.
    is_at_terminal: bool,
}

impl Worker {
    /// A worker that the keeper has started. One that reads from the terminal is in the group of this process.
    pub(crate) fn of(pid: Pid, pidfd: OwnedFd, is_at_terminal: bool) -> Worker {
        Worker { pid, pidfd, rest: None, is_at_terminal }
    }

    /// Whether it reads from the terminal.
    pub(crate) fn is_at_terminal(&self) -> bool {
        self.is_at_terminal
    }

    /// The process.
    pub(crate) fn pid(&self) -> Pid {
        self.pid
    }

    /// A descriptor that is readable once the process has exited.
    pub(crate) fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Whether the process has exited.
    pub(crate) fn has_ended(&self) -> bool {
        is_readable_within(&self.pidfd, Duration::ZERO)
    }

    /// Sends `signal` to those processes of the rank that handle it. If none does, it goes to the whole process group, as
    /// a terminal sends it; SIGUSR1 and SIGUSR2 then go to the process only, because they would kill a child, too.
    pub(crate) fn signal(&mut self, signal: Signal, table: &Table) {
        self.rest = None;
        let recipients = match signal {
            Signal::KILL | Signal::STOP | Signal::CONT | Signal::TSTP => Vec::new(),
            _ => table.recipients(self.pid, signal),
        };
        for pid in &recipients {
            self.send_to(*pid, signal);
        }
        match signal {
            _ if recipients.is_empty() => self.send(signal),
            Signal::USR1 | Signal::USR2 => {}
            _ => self.rest = Some(signal),
        }
    }

    /// Once the process has exited, the processes that it has left get the signal that it alone has got.
    pub(crate) fn signal_rest(&mut self) {
        if let Some(signal) = self.rest.take()
            && !self.is_at_terminal
        {
            let _ = kill_process_group(self.pid, signal);
        }
    }

    /// Continues the process and its group, if they are stopped.
    pub(crate) fn go_on(&self) {
        self.send(Signal::CONT);
    }

    /// Kills the process and its group.
    pub(crate) fn kill(&self) {
        self.send(Signal::KILL);
    }

    fn send_to(&self, pid: Pid, signal: Signal) {
        if pid == self.pid {
            let _ = pidfd_send_signal(&self.pidfd, signal);
        } else if let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) {
            let _ = pidfd_send_signal(&pidfd, signal);
        }
    }

    fn send(&self, signal: Signal) {
        let to_group = !matches!(signal, Signal::USR1 | Signal::USR2);
        if self.is_at_terminal {
            let table = processes::all();
            let below = processes::below(self.pid, &table).into_iter().filter(|_| to_group);
            let pids = below.map(|it| it.pid).chain([self.pid]);
            return pids.for_each(|pid| self.send_to(pid, signal));
        }
        // These fail only if no process is left.
        if to_group {
            let _ = kill_process_group(self.pid, signal);
        }
        // A process may have moved to another group.
        if !to_group || getpgid(Some(self.pid)).is_ok_and(|group| group != self.pid) {
            let _ = pidfd_send_signal(&self.pidfd, signal);
        }
    }
}
