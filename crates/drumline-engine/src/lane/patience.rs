//! How long a rank waits in a call before it tells its peers, and then people.

use std::time::{Duration, Instant};

use crate::{Settings, transport::Waits};

/// What peers believe of this rank's waiting.
#[derive(Debug)]
pub(crate) struct Told {
    pub(super) waits: Waits,
    /// Since when, or when they were last told so again.
    pub(super) at: Instant,
}

/// How long a call has waited, and what was said of it.
#[derive(Debug)]
pub(crate) struct Patience {
    /// How long peers are told before anything is made of it.
    pub(super) lead: Duration,
    /// When its waiting is worth a word.
    pub(super) tell_at: Instant,
    /// When people are told. Not before peers have had time to answer: a rank that was stopped
    /// itself hears first what they say.
    pub(super) warn_at: Option<Instant>,
    pub(super) warned: bool,
    /// Whether more time was given because all seemed to wait for each other.
    pub(super) looked_again: bool,
}

/// How long peers are told before anything is made of it, in a call that takes `limit` at most.
pub(crate) fn lead(limit: Duration, settings: &Settings) -> Duration {
    settings.warn_after.min(limit) / 2
}

impl Patience {
    /// Of a call that takes `limit` at most.
    pub(crate) fn new(now: Instant, limit: Duration, settings: &Settings) -> Patience {
        let lead = lead(limit, settings);
        Patience { lead, tell_at: now + lead, warn_at: None, warned: false, looked_again: false }
    }

    pub(super) fn has_told(&self) -> bool {
        self.warn_at.is_some()
    }
}
