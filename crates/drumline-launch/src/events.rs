//! Waits for workers, signals and output at once.

use std::{
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::{
    buffer::spare_capacity,
    event::{PollFd, PollFlags, Timespec, epoll, poll},
    io::{Errno, retry_on_intr},
};

use crate::{Error, Result, monitor::Monitor};

/// Where an event comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// Signals have arrived.
    Signals,
    /// All output is printed.
    Output,
    /// The other end of the channel between launcher and keeper has sent something, or is gone.
    Channel,
    /// The parent of a keeper has ended: the launcher, or another keeper.
    Parent,
    /// The workers may live no longer.
    Lease,
    /// The thread that speaks with the other hosts has told something.
    Hosts,
    /// A worker hangs.
    Watch,
    /// The worker with this rank has exited; of a guard: the next keeper.
    Worker(usize),
}

/// A set of descriptors to wait for.
///
/// An epoll set lists ready descriptors in the order in which they became ready. So the keeper knows which of
/// two workers exited first, even if it runs only after both exits.
#[derive(Debug)]
pub(crate) struct Events {
    epoll: OwnedFd,
    /// Hears that the launcher lives.
    monitor: Monitor,
}

/// Those beside workers. The number of each, for the kernel, is its place, counted down from the greatest number.
const BESIDE: [Source; 7] = [
    Source::Signals,
    Source::Output,
    Source::Channel,
    Source::Parent,
    Source::Hosts,
    Source::Watch,
    Source::Lease,
];

impl Events {
    pub(crate) fn new() -> Result<Events> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(Error::call("epoll_create1", "create an epoll set"))?;
        Ok(Events { epoll, monitor: Monitor::default() })
    }

    /// From now on every [`Events::wait`] shows `monitor` that the launcher lives. So a wait may end early, and without
    /// an event.
    pub(crate) fn show_life_to(&mut self, monitor: &Monitor) {
        self.monitor = monitor.clone();
    }

    /// From now on, [`Events::wait`] reports `source` when `descriptor` is readable.
    pub(crate) fn add(&self, descriptor: impl AsFd, source: Source) -> Result<()> {
        self.add_for(descriptor, source, epoll::EventFlags::IN)
    }

    /// The same, when the other end of `descriptor` is closed. What comes before is for another process.
    pub(crate) fn add_end(&self, descriptor: impl AsFd, source: Source) -> Result<()> {
        self.add_for(descriptor, source, epoll::EventFlags::HUP)
    }

    fn add_for(
        &self,
        descriptor: impl AsFd,
        source: Source,
        flags: epoll::EventFlags,
    ) -> Result<()> {
        let place = BESIDE.iter().position(|it| *it == source).unwrap_or_default();
        let data = epoll::EventData::new_u64(match source {
            Source::Worker(rank) => rank as u64,
            _ => u64::MAX - place as u64,
        });
        epoll::add(&self.epoll, descriptor, data, flags)
            .map_err(Error::call("epoll_ctl", "add to an epoll set"))
    }

    /// Undoes [`Events::add`].
    pub(crate) fn remove(&self, descriptor: impl AsFd) -> Result<()> {
        epoll::delete(&self.epoll, descriptor).map_err(Error::system("remove from an epoll set"))
    }

    /// Waits for at most `timeout`, and returns the ready sources, the first one first.
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> Result<Vec<Source>> {
        self.monitor.beat();
        let timeout = timeout.into_iter().chain(self.monitor.beat_every()).min();
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let mut ready = Vec::with_capacity(64);
        match epoll::wait(&self.epoll, spare_capacity(&mut ready), timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(Error::call("epoll_pwait", "wait for events")(error)),
        }
        Ok(ready.iter().map(|event| Source::of(event.data.u64())).collect())
    }
}

impl Source {
    fn of(data: u64) -> Source {
        let beside = BESIDE.get((u64::MAX - data) as usize);
        beside.copied().unwrap_or(Source::Worker(data as usize))
    }
}

/// Waits until the descriptor is readable, at most so long, and returns whether it is. Signals do not end the wait.
pub(crate) fn is_readable_within(descriptor: &impl AsFd, patience: Duration) -> bool {
    let until = Instant::now() + patience;
    let ready = retry_on_intr(|| {
        let left = Timespec::try_from(until.saturating_duration_since(Instant::now())).ok();
        poll(&mut [PollFd::new(descriptor, PollFlags::IN)], left.as_ref())
    });
    ready.is_ok_and(|ready| ready > 0)
}
