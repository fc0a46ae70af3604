//! Ends a sleep from another thread.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use drumline_shm::named;
use rustix::{
    event::{EventfdFlags, eventfd},
    io::retry_on_intr,
};

/// A descriptor that is readable from [`Waker::wake`] to [`Waker::drain`].
#[derive(Clone, Debug)]
pub(crate) struct Waker(Arc<OwnedFd>);

impl Waker {
    pub(crate) fn new() -> io::Result<Waker> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(named("eventfd2"))?;
        Ok(Waker(Arc::new(bell)))
    }

    pub(crate) fn wake(&self) {
        // It fails only when the counter is full. The descriptor is readable then.
        let _ = retry_on_intr(|| rustix::io::write(&self.0, &1_u64.to_ne_bytes()));
    }

    pub(crate) fn drain(&self) {
        // It fails only when the counter is zero already.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
