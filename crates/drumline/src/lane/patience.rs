//! How long a rank waits in a collective before it says so, to its peers and to people, and whom
//! it names.

use std::time::{Duration, Instant};

use drumline_schedule::step::Rank;

use super::{Lane, Running};
use crate::{
    Config,
    error::Cause,
    executor::{Machine, Now},
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

/// How long peers are told before anything is made of it, in a call that takes `limit` at most.
fn lead(limit: Duration, config: &Config) -> Duration {
    config.warn_after.min(limit) / 2
}

impl Patience {
    /// Of a call that takes `limit` at most.
    pub(super) fn new(now: Instant, limit: Duration, config: &Config) -> Patience {
        let lead = lead(limit, config);
        Patience { lead, tell_at: now + lead, told: Vec::new(), warn_at: None, warned: false }
    }

    fn has_told(&self) -> bool {
        self.warn_at.is_some()
    }

    /// Whom this rank awaits, if that is news to its peers.
    fn untold(&self, machine: &Machine) -> Option<Vec<Rank>> {
        let awaited = machine.awaited();
        (awaited != self.told && !awaited.is_empty()).then_some(awaited)
    }
}

impl Running {
    /// When there is something to say even if no peer moves.
    pub(super) fn due(&self, machine: &Machine) -> Option<Instant> {
        let patience = self.patience.as_ref()?;
        let Patience { tell_at, warn_at, warned, .. } = patience;
        let untold = !patience.has_told() || patience.untold(machine).is_some();
        let tell = untold.then_some(*tell_at);
        let warn = warn_at.filter(|_| !warned);
        tell.into_iter().chain(warn).chain(machine.known_deadline()).min()
    }
}

impl Lane {
    /// The operation that runs waits: tells peers for whom, and people who is late.
    pub(super) fn be_patient(&mut self, now: Instant) {
        let Some(mut running) = self.running.take() else { return };
        let started = *running.started.get_or_insert(now);
        let call = *self.machine.description();
        let new = || Patience::new(started, self.machine.timeout(), &self.config);
        let mut patience = running.patience.take().unwrap_or_else(new);
        if now >= patience.tell_at || patience.has_told() {
            self.follow(self.machine.awaited(), call.sequence());
        }
        if now >= patience.tell_at {
            if let Some(ranks) = patience.untold(&self.machine) {
                let waits = Waits { call, ranks };
                self.transport.tell(&waits);
                patience.told = waits.ranks;
                patience.tell_at = now + patience.lead;
            }
            let rest = self.config.warn_after.saturating_sub(patience.lead);
            patience.warn_at.get_or_insert(now + rest);
        }
        if !patience.warned && patience.warn_at.is_some_and(|warn_at| now >= warn_at) {
            patience.warned = true;
            let awaited = self.machine.awaited();
            let late = self.follow(awaited.clone(), call.sequence());
            self.recorder.mark("late", format_args!("{late:?}"));
            tracing::warn!(
                group = self.member.name,
                rank = self.member.rank,
                ?late,
                ?awaited,
                "{call} has been waiting for {:.1?}: the late ranks are stopped, slow or in another \
                 call; it is given up after {:.1?} (DRUMLINE_TIMEOUT_S)",
                now.saturating_duration_since(started),
                self.machine.timeout()
            );
        }
        running.patience = Some(patience);
        self.running = Some(running);
    }

    /// The time limit has passed. Whether that is this rank's own fault, who was stopped: then it
    /// waits a little for what its peers say.
    pub(super) fn was_stopped(&mut self, now: Instant) -> bool {
        let patience = self.running.as_ref().and_then(|running| running.patience.as_ref());
        if patience.is_some_and(Patience::has_told) {
            return false;
        }
        let lead = lead(self.machine.timeout(), &self.config);
        self.machine.extend(now + lead);
        true
    }

    /// The operation is complete: peers that believe it waits hear that it does not, and so do
    /// people who were told.
    pub(super) fn tell_end(&mut self, now: &Now) {
        let Some(Running { started, patience: Some(patience), .. }) = &self.running else { return };
        let call = *self.machine.description();
        if patience.warned {
            let started = started.unwrap_or(now.get());
            tracing::warn!(
                group = self.member.name,
                "{call} has gone on after {:.1?}",
                now.get().saturating_duration_since(started)
            );
        }
        if !patience.told.is_empty() {
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
        let mut told = self.transport.told();
        told.extend(self.own_waits().map(|waits| (self.member.rank, waits)));
        seeker.roots(awaited, &told)
    }

    /// For whom the operation that runs waits, if this rank has told so.
    fn own_waits(&self) -> Option<Waits> {
        let patience = self.running.as_ref()?.patience.as_ref()?;
        let machine = &self.machine;
        patience
            .has_told()
            .then(|| Waits { call: *machine.description(), ranks: machine.awaited() })
    }
}
