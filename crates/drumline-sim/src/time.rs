//! Virtual time, and the time limits of every job.

use std::time::{Duration, Instant};

/// Virtual time, in nanoseconds since the start of a simulation.
pub(crate) type Nanos = u64;

pub(crate) const MS: Nanos = 1_000_000;
pub(crate) const SECOND: Nanos = 1_000 * MS;

/// The time limit of every call.
pub(crate) const TIMEOUT: Nanos = 5 * SECOND;

/// How long a rank waits until it warns of late ranks.
pub(crate) const WARN_AFTER: Nanos = SECOND;

/// The instant at which virtual time is 0. Only differences from it matter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Epoch(pub(crate) Instant);

impl Epoch {
    pub(crate) fn instant(self, at: Nanos) -> Instant {
        self.0 + Duration::from_nanos(at)
    }

    pub(crate) fn nanos(self, at: Instant) -> Nanos {
        at.saturating_duration_since(self.0).as_nanos() as Nanos
    }
}
