//! Who looks after the workers: a guard for each kind of hang.

use std::{
    fmt::Debug,
    os::fd::{BorrowedFd, OwnedFd},
    time::Duration,
};

use rustix::process::Pid;

use super::finding::Finding;
use crate::events::is_readable_within;

/// How long a guard looks where the threads of a worker wait that hangs.
pub(crate) const LOOK_FOR: Duration = Duration::from_secs(2);

/// Looks for one kind of hang.
pub(crate) trait Guard: Debug + Send {
    /// A descriptor that is readable when it is time to look.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// When to look next, if the descriptor does not say so.
    fn due(&self) -> Option<Duration>;

    /// Looks after the workers. The first one that hangs ends the job.
    ///
    /// `now` is the time for which this process has run: while it is stopped, so are the workers.
    fn look(&mut self, now: Duration, wards: &[Ward]) -> Option<Finding>;
}

/// A worker, as a guard sees it.
#[derive(Debug)]
pub(crate) struct Ward {
    /// Its rank in the job.
    pub(crate) rank: usize,
    pub(crate) pid: Pid,
    pub(crate) pidfd: OwnedFd,
}

impl Ward {
    pub(crate) fn lives(&self) -> bool {
        !is_readable_within(&self.pidfd, Duration::ZERO)
    }
}
