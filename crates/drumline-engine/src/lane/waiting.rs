//! A rank that waits: what it tells its peers, what it logs, and which ranks it blames.

use std::time::{Duration, Instant};

use drumline_schedule::step::Rank;

use super::{
    patience::{Patience, Told, lead},
    state::{Lane, Running},
};
use crate::{
    error::{Cause, limit_of},
    executor::{Machine, Now},
    operation::Operation,
    transport::{InCall, Lack, Seeker, Waits},
};

impl Running {
    /// When this rank has something to tell or to log even if no peer does anything.
    pub(crate) fn due(&self, machine: &Machine) -> Option<Instant> {
        let patience = self.patience.as_ref()?;
        let tell = (!patience.has_told()).then_some(patience.tell_at);
        let warn = patience.warn_at.filter(|_| !patience.warned);
        tell.into_iter().chain(warn).chain(machine.known_deadline()).min()
    }
}

impl Lane {
    /// The running collective waits. Tells peers for which ranks, and logs which ranks are late.
    pub(crate) fn be_patient(&mut self, operation: &Operation<'_>, now: Instant) {
        let Some(running) = &mut self.running else { return };
        let started = *running.started.get_or_insert(now);
        let new = || Patience::new(started, self.machine.timeout(), &self.settings);
        let patience = running.patience.get_or_insert_with(new);
        if now < patience.tell_at && !patience.has_told() {
            return;
        }
        let rest = self.settings.warn_after.saturating_sub(patience.lead);
        let warn_at = *patience.warn_at.get_or_insert(now + rest);
        let warns = !patience.warned && now >= warn_at;
        patience.warned |= warns;
        self.tell(now);
        let awaited = self.machine.awaited();
        let late = self.follow(Lack::Call, &awaited, now);
        if warns {
            let call = self.name_of(operation);
            self.recorder.mark("late", format_args!("{late:?}"));
            tracing::warn!(
                group = self.member.name,
                rank = self.member.rank,
                ?late,
                ?awaited,
                "{call} has been waiting for {:.1?}: the late ranks are stopped, slow or in another \
                 call; it is given up after {:.1?} ({})",
                now.saturating_duration_since(started),
                self.machine.timeout(),
                limit_of(self.is_own_limit())
            );
        }
    }

    /// Whether `cause` is the time limit of the call, but it is too early to blame a rank. If so, the call
    /// gets a little more time.
    ///
    /// It is too early if this process was stopped, because it has not heard its peers yet. It is also too
    /// early if all ranks seem to wait for each other: unless their wait has no end, one of them has gone on,
    /// and the ranks that it has met just now have not said so yet.
    pub(crate) fn looks_again(&mut self, cause: &Cause, now: Instant) -> bool {
        let Cause::Timeout { waiting_for: awaited } = cause else { return false };
        let patience = self.running.as_ref().and_then(|running| running.patience.as_ref());
        let until = match patience {
            Some(Patience { looked_again: true, .. }) => return false,
            Some(patience) if patience.has_told() => {
                if !self.ends(Lack::Call, awaited, now).is_empty() {
                    return false;
                }
                now + 2 * self.news_after()
            }
            _ => now + lead(self.machine.timeout(), &self.settings),
        };
        if let Some(patience) = self.running.as_mut().and_then(|it| it.patience.as_mut()) {
            patience.looked_again = patience.has_told();
        }
        self.machine.extend(until);
        true
    }

    /// The running collective is about to succeed. If a warning said that it waits, logs that it goes on.
    pub(crate) fn note_end(&self, operation: &Operation<'_>, now: &Now) {
        let Some(Running { started, patience: Some(patience), .. }) = &self.running else { return };
        if patience.warned {
            let started = started.unwrap_or(now.get());
            tracing::warn!(
                group = self.member.name,
                "{} has gone on after {:.1?}",
                self.name_of(operation),
                now.get().saturating_duration_since(started)
            );
        }
    }

    /// Whether the program has set the time limit of the running collective.
    pub(super) fn is_own_limit(&self) -> bool {
        self.settings.is_own_timeout || self.machine.timeout() != self.settings.timeout
    }

    /// The running collective, for logs and errors.
    pub fn name_of(&self, operation: &Operation<'_>) -> String {
        operation.told_as().unwrap_or_else(|| self.machine.description().to_string())
    }

    /// The ranks for which the running collective waits. Empty if none runs.
    pub fn late(&mut self, now: Instant) -> Vec<Rank> {
        if self.running.is_none() {
            return Vec::new();
        }
        let awaited = self.machine.awaited();
        self.follow(Lack::Call, &awaited, now)
    }

    /// A collective is over. If peers believe that this rank waits in it, tells them that it does not.
    pub(crate) fn retract(&mut self, now: &Now) {
        if self.told.as_ref().is_some_and(|told| told.waits.call.is_some()) {
            self.tell_at_once(self.waits(), now.get());
        }
    }

    /// The ranks for which this rank has waited for long: for their part in the running collective, and for
    /// messages.
    fn waits(&self) -> Waits {
        let patience = self.running.as_ref().and_then(|running| running.patience.as_ref());
        let ranks = match patience.is_some_and(Patience::has_told) {
            true => self.machine.awaited(),
            false => Vec::new(),
        };
        let call = self.machine.description();
        Waits {
            call: (!ranks.is_empty()).then_some(InCall { call, ranks }),
            messages: self.points_awaited.iter().copied().collect(),
        }
    }

    /// Tells peers for which ranks this rank waits, if that has changed or if it is time to check again
    /// whether they answer.
    pub(crate) fn tell(&mut self, now: Instant) {
        let waits = self.waits();
        let is_due = match &self.told {
            None => waits.is_any(),
            Some(_) if !waits.is_any() => true,
            Some(told) => now >= self.tell_again_at(told, &waits),
        };
        if is_due {
            self.tell_at_once(waits, now);
        }
    }

    fn tell_at_once(&mut self, waits: Waits, now: Instant) {
        self.transport.tell(&waits, now);
        self.told = waits.is_any().then_some(Told { waits, at: now });
    }

    fn tell_again_at(&self, told: &Told, waits: &Waits) -> Instant {
        told.at + if told.waits != *waits { self.news_after() } else { self.answer_within() }
    }

    /// How long peers have to answer before they are told again.
    fn answer_within(&self) -> Duration {
        // Short enough that this rank asks a peer that stops, and finds that it does not answer, before a
        // warning is due.
        lead(self.settings.timeout, &self.settings) * 3 / 4
    }

    /// How long a change waits for more changes, so that peers are told of them together.
    pub(crate) fn news_after(&self) -> Duration {
        lead(self.settings.timeout, &self.settings) / 8
    }

    /// When to tell peers again even if no peer does anything.
    pub(crate) fn tell_due(&self) -> Option<Instant> {
        let told = self.told.as_ref()?;
        Some(self.tell_again_at(told, &self.waits()))
    }

    /// Compares the calls in which peers say that they wait with the calls that this rank has made. It is
    /// needed only while this rank waits for messages: in a collective, the machine compares what each peer
    /// says when it arrives.
    pub(crate) fn compare_waits(&mut self, now: Instant) -> Result<(), Cause> {
        let told = self.transport.told(now, self.answer_within());
        let mut in_calls =
            told.iter().filter_map(|(peer, waits)| Some((*peer, waits.call.as_ref()?)));
        let history = self.machine.history();
        in_calls.try_for_each(|(peer, in_call)| history.compare(peer, in_call.call))
    }

    /// In a time-out, replaces the ranks that this rank awaits by the roots of their waiting.
    pub(crate) fn trace(&mut self, cause: Cause, lack: Lack, now: Instant) -> Cause {
        match cause {
            Cause::Timeout { waiting_for } => {
                Cause::Timeout { waiting_for: self.roots(lack, &waiting_for, now) }
            }
            cause => cause,
        }
    }

    /// The ranks for which this rank waits in the end, as far as it knows. It also connects to them, so that
    /// they can say for which ranks they wait themselves.
    pub(crate) fn follow(&mut self, lack: Lack, awaited: &[Rank], now: Instant) -> Vec<Rank> {
        let roots = self.roots(lack, awaited, now);
        self.transport.want(&roots);
        roots
    }

    /// The roots of `awaited`, or `awaited` itself where all ranks wait for each other.
    fn roots(&mut self, lack: Lack, awaited: &[Rank], now: Instant) -> Vec<Rank> {
        let ends = self.ends(lack, awaited, now);
        if ends.is_empty() { awaited.to_vec() } else { ends }
    }

    fn ends(&mut self, lack: Lack, awaited: &[Rank], now: Instant) -> Vec<Rank> {
        let mut told = self.transport.told(now, self.answer_within());
        told.insert(self.member.rank, self.waits());
        Seeker { rank: self.member.rank, told: &told }.roots(lack, awaited)
    }
}
