//! Processes that a program starts: one that ends with its parent, however the parent ends, and which one failed first.

use std::{io, thread, time::Duration};

use drumline::blame::{self, Account, End, Words, is_never_a_reaction};
use pyo3::prelude::*;
use rustix::{
    event::{PollFd, PollFlags, poll},
    fd::OwnedFd,
    io::Errno,
    process::{Pid, PidfdFlags, Signal, getpid, kill_process, pidfd_open},
};

/// How long the process may take to end after SIGINT.
const GRACE: Duration = Duration::from_secs(1);

/// From now on this process ends with the one whose number is `pid`: it gets SIGINT, which raises
/// `KeyboardInterrupt`, and SIGKILL after a second.
///
/// The kernel has a signal for the death of a parent. But it sends it when the *thread* ends that has started
/// this process, and to a child of the fork server when that server ends. So a thread waits for the process.
#[pyfunction]
pub(crate) fn end_with_parent(pid: i32) -> PyResult<()> {
    let parent = match Pid::from_raw(pid).ok_or(Errno::SRCH).and_then(open) {
        Ok(parent) => Some(parent),
        Err(Errno::SRCH) => None,
        Err(error) => return Err(io::Error::from(error).into()),
    };
    thread::Builder::new().name("drumline-parent".to_owned()).spawn(move || {
        if let Some(parent) = parent {
            wait_for_end(&parent);
        }
        let _ = kill_process(getpid(), Signal::INT);
        thread::sleep(GRACE);
        let _ = kill_process(getpid(), Signal::KILL);
    })?;
    Ok(())
}

fn open(pid: Pid) -> rustix::io::Result<OwnedFd> {
    pidfd_open(pid, PidfdFlags::empty())
}

fn wait_for_end(process: &OwnedFd) {
    while let Err(Errno::INTR) = poll(&mut [PollFd::new(process, PollFlags::IN)], None) {}
}

/// The rank of a spawned job that failed first: see `drumline::blame`. For each rank the exit code (-n after signal n;
/// `None`: it was told to end), the error that it has told, and the time, in seconds, of the error or else of the end.
#[pyfunction]
pub(crate) fn culprit(ranks: Vec<(Option<i32>, Option<String>, f64)>) -> Option<usize> {
    let account = |(code, error, at): (Option<i32>, Option<String>, f64)| {
        let at = Duration::try_from_secs_f64(at).unwrap_or_default();
        let end = match code {
            None => End::Open,
            Some(0) => End::Success,
            Some(code) => End::Failure { at, is_never_a_reaction: is_never_a_reaction(-code) },
        };
        let words = error.map_or(Words::None, |text| Words::of_error([&text[..]], at));
        Account { end, words }
    };
    blame::culprit(&ranks.into_iter().map(account).collect::<Vec<_>>())
}
