//! How long a rank waits for the others.

use std::{
    os::fd::AsFd,
    time::{Duration, Instant},
};

use crate::{Error, events::is_readable_within};

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
    pub(super) fn wait_for(self, descriptor: &impl AsFd) -> bool {
        is_readable_within(descriptor, self.left())
    }

    /// The error that says so.
    pub(super) fn over(self, problem: String) -> Error {
        let given = self.given;
        Error::not_agreed(format!(
            "{problem}, {given:?} after this rank; does every rank run `drumline env`? --timeout gives them longer"
        ))
    }
}
