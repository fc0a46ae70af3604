//! Virtual time, and the time limits of every job.

/// Virtual time, in nanoseconds since the start of a simulation.
pub(crate) type Nanos = u64;

pub(crate) const MS: Nanos = 1_000_000;
pub(crate) const SECOND: Nanos = 1_000 * MS;

/// The time limit of every call.
pub(crate) const TIMEOUT: Nanos = 5 * SECOND;

/// How long a rank waits until it warns of late ranks.
pub(crate) const WARN_AFTER: Nanos = SECOND;
