//! How long workers may run without a word from the store in which the hosts of a job meet.
//!
//! A host that the others do not hear must have ended its workers before the others start new ones. So its keepers
//! kill them when the lease has run out, and [ranks](drumline::LEASE_VARIABLE) end by themselves, whoever is stopped.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::Duration,
};

use drumline::named;
use rustix::time::{
    ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, clock_gettime,
    timerfd_create, timerfd_gettime, timerfd_settime,
};

use crate::{Error, Result, events::is_readable_within, secret::inheritable};

/// A time of the clock that goes on while the machine is suspended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct BootTime(Duration);

impl BootTime {
    pub(crate) fn now() -> BootTime {
        let now = clock_gettime(ClockId::Boottime);
        let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
        BootTime(Duration::new(seconds, u32::try_from(now.tv_nsec).unwrap_or(0)))
    }

    pub(crate) fn after(self, time: Duration) -> BootTime {
        BootTime(self.0.saturating_add(time))
    }

    /// The time from `earlier` until then.
    pub(crate) fn since(self, earlier: BootTime) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// The time from now until then; zero if that is past.
    pub(crate) fn left(self) -> Duration {
        self.0.saturating_sub(BootTime::now().0)
    }
}

/// Until when the workers of a host may live. It is a timer that the launcher and its keepers have in common: to set it
/// takes no answer of anybody, and whoever waits for it needs no message.
#[derive(Debug)]
pub(crate) struct Lease(OwnedFd);

impl Lease {
    /// A lease that runs out then; `None`: never.
    pub(crate) fn new(until: Option<BootTime>) -> Result<Lease> {
        let timer = timerfd_create(
            TimerfdClockId::Boottime,
            TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK,
        );
        let lease = Lease(timer.map_err(Error::call("timerfd_create", "make a timer"))?);
        until.map_or(Ok(()), |until| lease.run_out_at(until))?;
        Ok(lease)
    }

    /// The lease that this descriptor is.
    pub(crate) fn over(timer: OwnedFd) -> Lease {
        Lease(timer)
    }

    /// From now on it runs out then, and no longer at the time before.
    pub(crate) fn run_out_at(&self, time: BootTime) -> Result<()> {
        let set = || {
            let it_value = Timespec::try_from(time.0).map_err(|_| rustix::io::Errno::INVAL)?;
            let timer = Itimerspec { it_interval: Timespec::default(), it_value };
            timerfd_settime(&self.0, TimerfdTimerFlags::ABSTIME, &timer)
        };
        set().map(drop).map_err(Error::call("timerfd_settime", "set a timer"))
    }

    /// From now on it never runs out.
    pub(crate) fn lift(&self) -> Result<()> {
        self.run_out_at(BootTime(Duration::ZERO))
    }

    /// Whether it has run out.
    pub(crate) fn has_run_out(&self) -> bool {
        is_readable_within(&self.0, Duration::ZERO)
    }

    /// The same lease, as programs inherit it. `None` if it never runs out.
    pub(crate) fn to_inherit(&self) -> std::io::Result<Option<OwnedFd>> {
        let set = timerfd_gettime(&self.0).map_err(named("timerfd_gettime"))?;
        let runs_out = set.it_value != Timespec::default();
        runs_out.then(|| inheritable(self.0.as_fd())).transpose()
    }

    /// The same lease, for another process.
    pub(crate) fn share(&self) -> std::io::Result<OwnedFd> {
        self.0.try_clone()
    }
}

/// Readable once it has run out.
impl AsFd for Lease {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_runs_out_for_all_who_share_it_unless_it_is_longer_now() {
        let now = BootTime::now();
        let later = now.after(Duration::from_secs(3600));
        assert!(later > now && !later.left().is_zero() && now.left().is_zero());
        let lease = Lease::new(Some(later)).unwrap();
        let other = Lease::over(lease.share().unwrap());
        assert!(!lease.has_run_out() && !other.has_run_out());
        lease.run_out_at(now).unwrap();
        assert!(lease.has_run_out() && other.has_run_out());
        lease.run_out_at(later).unwrap();
        assert!(!other.has_run_out());
        lease.run_out_at(now).unwrap();
        lease.lift().unwrap();
        assert!(!other.has_run_out());
        let never = Lease::new(None).unwrap();
        assert!(!never.has_run_out() && never.to_inherit().unwrap().is_none());
        lease.run_out_at(later).unwrap();
        let inherited = Lease::over(other.to_inherit().unwrap().unwrap());
        lease.run_out_at(now).unwrap();
        assert!(inherited.has_run_out());
    }
}
