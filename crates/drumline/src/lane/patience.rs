//! How long a rank waits in a collective before it says so, to its peers and to people, and whom
//! it names.

use std::time::{Duration, Instant};

use drumline_schedule::step::Rank;

use super::{Lane, Running};
use crate::{
    Config,
    error::Cause,
    transport::{Seeker, Waits},
};

/// What has been said of one call's waiting.
#[derive(Debug)]
pub(super) struct Patience {
    /// How long peers are told before anything is made of it.
    lead: Duration,
    /// When peers are told next, if there is something to tell.
    tell_at: Instant,
    /// Whom peers believe that this rank awaits.
    told: Vec<Rank>,
    /// When people are told. Not before peers have had time to answer: a rank that was stopped
    /// itself hears first what they say.
    warn_at: Option<Instant>,
    warned: bool,
}

impl Patience {
    /// Of a call that takes `limit` at most.
    pub(super) fn new(now: Instant, limit: Duration, config: &Config) -> Patience {
        let lead = config.warn_after.min(limit) / 2;
        Patience { lead, tell_at: now + lead, told: Vec::new(), warn_at: None, warned: false }
    }

    /// Whether people were told that this call waits.
    pub(super) fn warned(&self) -> bool {
        self.warned
    }

    fn has_told(&self) -> bool {
        self.warn_at.is_some()
    }
}

impl Running {
    /// When there is something to say even if no peer moves.
    pub(super) fn due(&self) -> Instant {
        let Patience { tell_at, warn_at, warned, .. } = &self.patience;
        let untold = !self.patience.has_told() || self.untold().is_some();
        let tell = untold.then_some(*tell_at);
        let warn = warn_at.filter(|_| !warned);
        tell.into_iter().chain(warn).fold(self.machine.deadline(), Instant::min)
    }

    /// Whom this rank awaits, if that is news to its peers.
    fn untold(&self) -> Option<Vec<Rank>> {
        let awaited = self.machine.awaited();
        (awaited != self.patience.told && !awaited.is_empty()).then_some(awaited)
    }
}

impl Lane {
    /// An operation waits: tells peers for whom, and people who is late.
    pub(super) fn be_patient(&mut self, running: &mut Running, now: Instant) {
        if now >= running.patience.tell_at || running.patience.has_told() {
            let sequence = running.machine.description().sequence();
            self.follow(running.machine.awaited(), sequence);
        }
        if now >= running.patience.tell_at {
            let untold = running.untold();
            let patience = &mut running.patience;
            if let Some(ranks) = untold {
                let waits = Waits { call: *running.machine.description(), ranks };
                self.transport.tell(&waits);
                patience.told = waits.ranks;
                patience.tell_at = now + patience.lead;
            }
            let rest = self.config.warn_after.saturating_sub(patience.lead);
            patience.warn_at.get_or_insert(now + rest);
        }
        let Running { machine, started, patience, .. } = running;
        if !patience.warned && patience.warn_at.is_some_and(|warn_at| now >= warn_at) {
            patience.warned = true;
            let awaited = machine.awaited();
            let late = self.follow(awaited.clone(), machine.description().sequence());
            self.recorder.mark("late", format_args!("{late:?}"));
            tracing::warn!(
                group = self.member.name,
                rank = self.member.rank,
                ?late,
                ?awaited,
                "{} has been waiting for {:.1?}: the late ranks are stopped, slow or in another \
                 call; it is given up after {:.1?} (DRUMLINE_TIMEOUT_S)",
                machine.description(),
                now.saturating_duration_since(*started),
                machine.deadline().saturating_duration_since(*started)
            );
        }
    }

    /// The time limit has passed. Whether that is this rank's own fault, who was stopped: then it
    /// waits a little for what its peers say.
    pub(super) fn was_stopped(&mut self, running: &mut Running, now: Instant) -> bool {
        if running.patience.has_told() {
            return false;
        }
        running.machine.extend(now + running.patience.lead);
        true
    }

    /// An operation is complete: peers that believe it waits hear that it does not.
    pub(super) fn tell_end(&mut self, running: &Running) {
        if !running.patience.told.is_empty() {
            let call = *running.machine.description();
            self.transport.tell(&Waits { call, ranks: Vec::new() });
        }
    }

    /// Names the roots of a time-out in the place of those that this rank awaits, in the call of
    /// that number or before it.
    pub(super) fn trace(&self, cause: Cause, sequence: u64) -> Cause {
        match cause {
            Cause::Timeout { waiting_for } => {
                Cause::Timeout { waiting_for: self.roots(waiting_for, sequence) }
            }
            cause => cause,
        }
    }

    /// For whom this rank waits in the end, as far as it knows. Whoever is named by others is
    /// called, to say whom it awaits itself.
    pub(super) fn follow(&mut self, awaited: Vec<Rank>, sequence: u64) -> Vec<Rank> {
        let roots = self.roots(awaited, sequence);
        self.transport.want(&roots);
        roots
    }

    fn roots(&self, awaited: Vec<Rank>, sequence: u64) -> Vec<Rank> {
        let seeker = Seeker { rank: self.member.rank, sequence };
        seeker.roots(awaited, &self.transport.told())
    }
}
