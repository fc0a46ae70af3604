//! What a host knows of the others, and when it saw it.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use super::{
    timing::{self, Timing},
    values::{Host, Named, Report, State},
};

/// So many beats of a host are remembered.
const LAST_BEATS: usize = 20;

/// What a host knows of the others.
#[derive(Clone, Debug, Default)]
pub(super) struct Sightings {
    hosts: BTreeMap<u64, Sighting>,
    /// The largest number that a host has.
    count: u64,
    /// The count at the first look: later numbers are those of hosts that have just come.
    first_count: Option<u64>,
}

/// What the leader decides by.
#[derive(Clone, Copy, Debug)]
pub(super) struct Knowledge<'a> {
    pub(super) now: Duration,
    /// The number of the leader.
    pub(super) me: u64,
    /// The leader itself, which sets the terms of the job.
    pub(super) host: &'a Host,
    pub(super) seen: &'a Sightings,
    pub(super) timing: &'a Timing,
}

/// What a host knows of another.
#[derive(Clone, Debug, Default)]
struct Sighting {
    host: Option<Result<Host, String>>,
    report: Option<Report>,
    /// When the first answer about it came.
    first_at: Duration,
    /// The beat of the last answer, and when it was first this one.
    shown: Option<u64>,
    beat_at: Duration,
    /// When the last question about it was asked that has an answer.
    asked_at: Duration,
    /// Whether it was seen to live: a beat has changed.
    has_moved: bool,
    /// When the last beats came, the oldest first.
    last_beats: VecDeque<Duration>,
    /// When its first failure in a world was seen.
    failed: Option<(u64, Duration)>,
}

impl Sightings {
    pub(super) fn count(&mut self, count: u64) {
        self.first_count.get_or_insert(count);
        self.count = self.count.max(count);
    }

    pub(super) fn host(&mut self, number: u64, now: Duration, host: Result<Host, String>) {
        let sighting = self.hosts.entry(number).or_insert_with(|| Sighting::first(now));
        sighting.host = Some(host);
    }

    /// Takes in a report, or that there is none, which was asked for at `asked`.
    pub(super) fn report(
        &mut self,
        number: u64,
        now: Duration,
        asked: Duration,
        report: Option<Report>,
    ) {
        let is_new = self.first_count.is_some_and(|count| number > count);
        let sighting = self.hosts.entry(number).or_insert_with(|| Sighting::first(now));
        sighting.asked_at = sighting.asked_at.max(asked);
        let Some(report) = report else { return };
        // An older beat, whose write was under way for long, hides newer ones. It is a change all the same: no write is
        // carried out twice, so what stands still is the last write.
        if sighting.shown.replace(report.beat) != Some(report.beat) {
            sighting.beat_at = now;
        }
        if sighting.report.as_ref().is_some_and(|it| it.beat >= report.beat) {
            return;
        }
        sighting.has_moved |= is_new || sighting.report.is_some();
        if sighting.last_beats.len() == LAST_BEATS {
            sighting.last_beats.pop_front();
        }
        sighting.last_beats.push_back(now);
        let world = report.world;
        if report.failure.is_some() && sighting.failed.is_none_or(|(of, _)| of != world) {
            sighting.failed = Some((world, now));
        }
        sighting.report = Some(report);
    }

    pub(super) fn has_counted(&self) -> bool {
        self.first_count.is_some()
    }

    /// What the host itself has said.
    pub(super) fn own(&mut self, number: u64, now: Duration, host: &Host, report: Option<Report>) {
        self.host(number, now, Ok(host.clone()));
        self.report(number, now, now, report);
        if let Some(own) = self.hosts.get_mut(&number) {
            own.has_moved = true;
        }
    }

    /// Whether the [`Host`] of this number is not known yet.
    pub(super) fn is_stranger(&self, number: u64) -> bool {
        self.hosts.get(&number).is_none_or(|it| it.host.is_none())
    }

    pub(super) fn strangers(&self) -> Vec<u64> {
        (1..=self.count).filter(|it| self.is_stranger(*it)).collect()
    }

    /// The numbers of the known hosts that are not [silent](Self::is_silent).
    pub(super) fn watched(&self, timing: &Timing) -> Vec<u64> {
        self.numbers().filter(|it| !self.is_stranger(*it) && !self.is_silent(*it, timing)).collect()
    }

    pub(super) fn numbers(&self) -> impl Iterator<Item = u64> {
        self.hosts.keys().copied()
    }

    pub(super) fn host_of(&self, number: u64) -> Option<&Host> {
        self.hosts.get(&number)?.host.as_ref()?.as_ref().ok()
    }

    /// Why what the host says of itself cannot be read.
    pub(super) fn problem_of(&self, number: u64) -> Option<&str> {
        self.hosts.get(&number)?.host.as_ref()?.as_ref().err().map(String::as_str)
    }

    pub(super) fn report_of(&self, number: u64) -> Option<&Report> {
        self.hosts.get(&number)?.report.as_ref()
    }

    /// How far the host is in a world: `Waiting` if it has not heard of it.
    pub(super) fn state_in(&self, number: u64, world: u64) -> State {
        let report = self.report_of(number).filter(|it| it.world == world);
        report.map_or(State::Waiting, |it| it.state)
    }

    /// When the first failure of the host in this world was seen.
    pub(super) fn failed_at(&self, number: u64, world: u64) -> Option<Duration> {
        self.hosts.get(&number)?.failed.filter(|(of, _)| *of == world).map(|(_, at)| at)
    }

    pub(super) fn first_at(&self, number: u64) -> Option<Duration> {
        Some(self.hosts.get(&number)?.first_at)
    }

    /// Whether the host goes on since then: late reports of one that has ended are fewer than this.
    pub(super) fn goes_on_since(&self, number: u64, since: Duration) -> bool {
        let has = |it: &VecDeque<_>| it.len() == LAST_BEATS && it.front() > Some(&since);
        self.hosts.get(&number).is_some_and(|it| has(&it.last_beats))
    }

    /// Whether the lease of the host has run out for certain, and with it its workers: a question that was asked
    /// [`silent`](Timing::silent) after the beat had last changed was answered with the same one.
    pub(super) fn is_silent(&self, number: u64, timing: &Timing) -> bool {
        self.is_silent_for(number, timing, Duration::ZERO)
    }

    /// Like [`is_silent`](Self::is_silent), `later` than that.
    pub(super) fn is_silent_for(&self, number: u64, timing: &Timing, later: Duration) -> bool {
        let ranks = self.host_of(number).map_or(0, |it| it.ranks);
        let silent = timing::with_ranks(timing.silent, ranks) + later;
        self.hosts.get(&number).is_some_and(|it| it.asked_at >= it.beat_at + silent)
    }

    /// Whether the host was seen to live, and is not silent.
    pub(super) fn is_alive(&self, number: u64, timing: &Timing) -> bool {
        self.hosts.get(&number).is_some_and(|it| it.has_moved) && !self.is_silent(number, timing)
    }

    /// Whether it will only show whether the host lives.
    pub(super) fn is_unsure(&self, number: u64, timing: &Timing) -> bool {
        self.hosts.get(&number).is_some_and(|it| {
            it.report.is_some() && !it.has_moved && it.asked_at < it.first_at + timing.look
        })
    }

    pub(super) fn named(&self, number: u64) -> Named {
        let known = self.host_of(number).map(|it| (it.name.clone(), it.address.clone()));
        let unknown = || (format!("number {number}"), "an unknown address".into());
        let (name, address) = known.unwrap_or_else(unknown);
        Named { host: number, name, address }
    }
}

impl Sighting {
    fn first(now: Duration) -> Sighting {
        Sighting { first_at: now, beat_at: now, ..Sighting::default() }
    }
}
