//! How long a rank waits for the others.

use std::{
    os::fd::AsFd,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};

use crate::{Error, Result};

/// A time after which a rank gives up.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    given: Duration,
    until: Instant,
}

impl Patience {
    pub(super) fn new(given: Duration) -> Patience {
        Patience { given, until: Instant::now() + given }
    }

    pub(super) fn left(self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    pub(super) fn is_over(self) -> bool {
        self.left().is_zero()
    }

    /// Waits until something can be read, or somebody accepted. `false`: nothing has come in time. The descriptor itself
    /// gets no timeout, because the program that inherits it would have that, too.
    pub(super) fn wait_for(self, descriptor: &impl AsFd) -> Result<bool> {
        loop {
            let left = Timespec::try_from(self.left()).ok();
            match poll(&mut [PollFd::new(descriptor, PollFlags::IN)], left.as_ref()) {
                Ok(ready) => return Ok(ready > 0),
                Err(Errno::INTR) => {}
                Err(error) => return Err(Error::system("wait for the other ranks")(error)),
            }
        }
    }

    /// The error that says so.
    pub(super) fn over(self, problem: String) -> Error {
        let given = self.given;
        let problem = format!(
            "{problem}, {given:?} after this rank; does every rank run `drumline env`? --timeout gives them longer"
        );
        Error::NotAgreed { problem }
    }
}
