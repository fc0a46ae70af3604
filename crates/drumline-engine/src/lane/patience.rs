//! How long a rank waits in a call before it tells its peers, and before it logs a warning.

use std::time::{Duration, Instant};

use crate::{Settings, transport::Waits};

/// What this rank last told its peers about its waiting.
#[derive(Debug)]
pub(crate) struct Told {
    pub(super) waits: Waits,
    /// When it told them.
    pub(super) at: Instant,
}

/// How long a call has waited, and what this rank has done about it.
#[derive(Debug)]
pub(crate) struct Patience {
    /// The time that peers have to answer between being told and a warning or a time-out.
    pub(super) lead: Duration,
    /// When this rank tells its peers that it waits.
    pub(super) tell_at: Instant,
    /// When this rank logs a warning. The time counts from when it told the peers, so that they can answer
    /// first. A rank that was stopped itself thus reads their answers before it blames any of them.
    pub(super) warn_at: Option<Instant>,
    pub(super) warned: bool,
    /// Whether the call got more time because all ranks seemed to wait for each other.
    pub(super) looked_again: bool,
}

/// The time that peers have to answer, in a call with the time limit `limit`.
pub(crate) fn lead(limit: Duration, settings: &Settings) -> Duration {
    settings.warn_after.min(limit) / 2
}

impl Patience {
    /// The patience of a call that began at `now` and has the time limit `limit`.
    pub(crate) fn new(now: Instant, limit: Duration, settings: &Settings) -> Patience {
        let lead = lead(limit, settings);
        Patience { lead, tell_at: now + lead, warn_at: None, warned: false, looked_again: false }
    }

    pub(super) fn has_told(&self) -> bool {
        self.warn_at.is_some()
    }
}
