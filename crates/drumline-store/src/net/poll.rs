//! Waiting until descriptors are ready.
//!
//! Every loop that waits for sockets waits through one of two functions: [`wait`] for a few
//! descriptors, [`wait_events`] for an epoll set. Both take a [`Deadline`], convert it for the
//! kernel, and treat a signal as a wait in which nothing became ready.
//!
//! A wait may end early, after a signal or after a day, so the caller looks again and compares
//! the clock with its deadline.
//!
//! ```
//! use std::{io::Write as _, os::unix::net::UnixStream, time::{Duration, Instant}};
//!
//! use drumline_store::net::poll::{Deadline, wait, wait_events};
//! use rustix::event::{PollFd, PollFlags, epoll};
//!
//! let (mut near, far) = UnixStream::pair()?;
//! let mut interests = [PollFd::new(&far, PollFlags::IN)];
//! assert_eq!(wait(&mut interests, Instant::now() + Duration::from_millis(1))?, 0);
//! near.write_all(b"x")?;
//! assert_eq!(wait(&mut interests, Deadline::Never)?, 1);
//! assert_eq!(interests[0].revents(), PollFlags::IN);
//!
//! let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
//! epoll::add(&set, &far, epoll::EventData::new_u64(7), epoll::EventFlags::IN)?;
//! let mut events = Vec::with_capacity(16);
//! wait_events(&set, &mut events, Deadline::Now)?;
//! assert_eq!(events[0].data.u64(), 7);
//! # Ok::<_, std::io::Error>(())
//! ```

use std::{
    io,
    os::fd::AsFd,
    time::{Duration, Instant},
};

use rustix::{
    buffer::spare_capacity,
    event::{self, PollFd, Timespec, epoll},
    io::Errno,
};

/// When a wait ends although no descriptor is ready. An [`Instant`] converts into one, and so does
/// an `Option` of it, whose `None` is [`Deadline::Never`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deadline {
    /// The wait only looks, and reads no clock.
    Now,
    /// At this time. A time in the past means [`Deadline::Now`].
    At(Instant),
    /// The wait has no limit.
    Never,
}

impl From<Instant> for Deadline {
    fn from(deadline: Instant) -> Deadline {
        Deadline::At(deadline)
    }
}

impl From<Option<Instant>> for Deadline {
    fn from(deadline: Option<Instant>) -> Deadline {
        deadline.map_or(Deadline::Never, Deadline::At)
    }
}

impl Deadline {
    /// The longest that one system call may sleep. The kernel counts in 32-bit milliseconds.
    const LONGEST: Duration = Duration::from_secs(86_400);

    /// The time that is left, as the kernel takes it.
    fn left(self) -> Timespec {
        let left = match self {
            Deadline::Now => Duration::ZERO,
            Deadline::At(deadline) => deadline.saturating_duration_since(Instant::now()),
            Deadline::Never => Deadline::LONGEST,
        };
        let left = left.min(Deadline::LONGEST);
        Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
    }
}

/// Waits until one of `interests` is ready or `deadline` has come. Returns how many are ready;
/// their `revents` say for what.
///
/// # Errors
///
/// The kernel is out of memory, or `interests` are more than this process may open.
pub fn wait(interests: &mut [PollFd<'_>], deadline: impl Into<Deadline>) -> io::Result<usize> {
    match event::poll(interests, Some(&deadline.into().left())) {
        Ok(ready) => Ok(ready),
        Err(Errno::INTR) => {
            interests.iter_mut().for_each(PollFd::clear_revents);
            Ok(0)
        }
        Err(error) => Err(error.into()),
    }
}

/// Waits until the set `epoll` has an event or `deadline` has come. Appends the events to `events`,
/// at most as many as its spare capacity holds; that must not be zero.
///
/// # Errors
///
/// `epoll` is no epoll set, or `events` has no spare capacity.
pub fn wait_events(
    epoll: impl AsFd,
    events: &mut Vec<epoll::Event>,
    deadline: impl Into<Deadline>,
) -> io::Result<()> {
    match epoll::wait(epoll, spare_capacity(events), Some(&deadline.into().left())) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// [`wait`] for callers that look again in any case: a failure is only logged.
pub fn sleep_until_ready(interests: &mut [PollFd<'_>], deadline: Instant) {
    if let Err(error) = wait(interests, deadline) {
        tracing::warn!(%error, "poll failed");
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use rustix::event::PollFlags;

    use super::*;

    #[test]
    fn every_deadline_can_be_converted() {
        let far = Instant::now().checked_add(Duration::from_secs(1 << 40)).unwrap();
        for deadline in [Deadline::Never, far.into(), None.into()] {
            assert_eq!(deadline.left().tv_sec, 86_400);
        }
        for deadline in [Deadline::Now, Instant::now().into()] {
            assert_eq!((deadline.left().tv_sec, deadline.left().tv_nsec), (0, 0));
        }
    }

    #[test]
    fn nothing_is_ready_at_the_deadline() {
        let (near, _far) = UnixStream::pair().unwrap();
        let until = Instant::now() + Duration::from_millis(5);
        while Instant::now() < until {
            assert_eq!(wait(&mut [PollFd::new(&near, PollFlags::IN)], until).unwrap(), 0);
        }
        assert_eq!(wait(&mut [PollFd::new(&near, PollFlags::OUT)], Deadline::Now).unwrap(), 1);
    }
}
