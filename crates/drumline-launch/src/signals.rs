//! Signals to the launcher, as a descriptor that can be polled.

use std::{
    fs,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    sync::{Arc, atomic::AtomicBool},
};

use drumline::take_signals;
use rustix::process::Signal;
use signal_hook::{
    SigId, flag,
    iterator::{backend::SignalDelivery, exfiltrator::WithOrigin},
    low_level::{
        siginfo::{Cause, Origin},
        unregister,
    },
};

use crate::{Error, Result, ending::signal_exit_code};

/// The signals of job control. The launcher stops and continues with its workers.
const JOB_CONTROL: [Signal; 2] = [Signal::TSTP, Signal::CONT];

/// Collects signals that would otherwise kill this process.
#[derive(Debug)]
pub(crate) struct Signals(SignalDelivery<UnixStream, WithOrigin>);

/// A signal that has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Arrived {
    pub(crate) signal: Signal,
    /// Whether no process has sent it: somebody has typed Ctrl-C, for example. Then all processes of the group have it.
    pub(crate) is_typed: bool,
}

impl Signals {
    /// Handles these signals from now on, SIGCHLD, and those of job control, except ignored ones: `nohup`, and a shell that
    /// starts a job in the background, ignore signals on purpose. If SIGCHLD is ignored, or any signal is blocked, the
    /// parent of this process has left it so by mistake: the ranks shall not inherit that.
    pub(crate) fn listen_to(signals: impl IntoIterator<Item = Signal>) -> Result<Signals> {
        take_signals().map_err(Error::call("sigaction", "listen to signals"))?;
        let heard = signals.into_iter().chain(JOB_CONTROL).chain([Signal::CHILD]);
        let heard = unless_ignored(heard);
        UnixStream::pair()
            .and_then(|(read, write)| {
                SignalDelivery::with_pipe(read, write, WithOrigin::default(), heard)
            })
            .map(Signals)
            .map_err(Error::call("socketpair", "listen to signals"))
    }

    /// A descriptor that is readable when signals have arrived.
    pub(crate) fn ready(&self) -> BorrowedFd<'_> {
        self.0.get_read().as_fd()
    }

    /// The signals that have arrived since the last call.
    pub(crate) fn arrived(&mut self) -> impl Iterator<Item = Arrived> {
        self.0.pending().filter_map(|Origin { signal, cause, .. }| {
            let signal = Signal::from_named_raw(signal)?;
            Some(Arrived { signal, is_typed: matches!(cause, Cause::Kernel) })
        })
    }
}

/// While this exists, a signal ends this process if another one has come before. It is for times in which no rank runs, and
/// in which the main thread may wait for a disk.
#[derive(Debug)]
pub(crate) struct LastResort(Vec<SigId>);

impl LastResort {
    pub(crate) fn of(signals: impl IntoIterator<Item = Signal>) -> LastResort {
        let has_come = Arc::new(AtomicBool::new(false));
        let register = |number: i32| {
            let code = signal_exit_code(number).into();
            // They are called in this order.
            let ends = flag::register_conditional_shutdown(number, code, Arc::clone(&has_come));
            [ends, flag::register(number, Arc::clone(&has_come))]
        };
        LastResort(unless_ignored(signals).flat_map(register).flatten().collect())
    }
}

impl Drop for LastResort {
    fn drop(&mut self) {
        for id in self.0.drain(..) {
            unregister(id);
        }
    }
}

/// The numbers of those signals that this process does not ignore.
fn unless_ignored(signals: impl IntoIterator<Item = Signal>) -> impl Iterator<Item = i32> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = mask(&status, "SigIgn:");
    let numbers = signals.into_iter().map(Signal::as_raw);
    numbers.filter(move |number| ignored >> (number - 1) & 1 == 0)
}

/// A set of signals, number n in bit n - 1, by its name in the text of `/proc/PID/status`.
pub(crate) fn mask(status: &str, name: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix(name));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_of_ignored_signals_is_found() {
        let text = "Name:\tx\nSigIgn:\t0000000000001001\nSigCgt:\t1\n";
        assert_eq!((mask(text, "SigIgn:"), mask(text, "SigCgt:")), (0x1001, 1));
        assert_eq!(mask("", "SigIgn:"), 0);
        let own = fs::read_to_string("/proc/self/status").unwrap();
        let pipe = Signal::PIPE.as_raw();
        assert_eq!(mask(&own, "SigIgn:") >> (pipe - 1) & 1, 1, "Rust programs ignore SIGPIPE");
    }
}
