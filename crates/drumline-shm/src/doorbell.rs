//! An eventfd that wakes a rank.
//!
//! Not a futex: a sleeping rank must also hear its sockets, the deaths of its peers and an abort,
//! and an eventfd can be polled together with them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{OFlags, fcntl_getfl, fstat};

use crate::error::{Error, Result};
use crate::flag::Doorbell;

/// A doorbell: an eventfd that never blocks.
#[derive(Debug)]
pub(crate) struct EventFd(OwnedFd);

impl EventFd {
    pub(crate) fn new() -> Result<EventFd> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map(EventFd)
            .map_err(Error::os("create a doorbell (eventfd2)"))
    }

    /// Takes a peer's descriptor if it is a doorbell. Ringing anything else could block this rank.
    pub(crate) fn from_peer(fd: OwnedFd) -> Result<EventFd> {
        const WHAT: &str = "a doorbell";
        const FILE_TYPE: u32 = 0o170_000;
        let status = fstat(&fd).map_err(Error::os("look at a doorbell (fstat)"))?;
        // Pipes, sockets, terminals and files have a file type. An eventfd has none.
        if status.st_mode & FILE_TYPE != 0 {
            return Err(Error::refused(WHAT, "it is a file, pipe or socket, not an eventfd"));
        }
        let flags = fcntl_getfl(&fd).map_err(Error::os("look at a doorbell (fcntl)"))?;
        if !flags.contains(OFlags::NONBLOCK) {
            return Err(Error::refused(WHAT, "ringing it could block"));
        }
        // Adds 0 to the count of an eventfd. The other descriptors without a file type (epoll,
        // timers) cannot be written to.
        match rustix::io::write(&fd, &0_u64.to_ne_bytes()) {
            Ok(8) => Ok(EventFd(fd)),
            _ => Err(Error::refused(WHAT, "it is not an eventfd")),
        }
    }

    /// A second descriptor of the same doorbell.
    pub(crate) fn try_clone(&self) -> Result<OwnedFd> {
        self.0.try_clone().map_err(Error::os("duplicate the descriptor of a doorbell (fcntl)"))
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Doorbell for EventFd {
    fn ring(&self) {
        // Fails only if the count is at its maximum, and then the doorbell was rung already.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    fn drain(&self) {
        // Fails only if the count is 0.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}
