//! Sends and receives of a lane.

use std::{
    collections::BTreeSet,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::{Duration, Instant},
};

use drumline_schedule::step::Rank;

use super::state::{Lane, State};
use crate::{
    Cause, CollectiveError, Error, Settings,
    deadline::bounded,
    error::limit_of,
    executor::Progress,
    membership::Membership,
    panics::panic_text,
    recorder::{Category, What},
    transport::{Ended, Lack, Outcome, Point, PointCall},
};

impl Lane {
    /// Whether sends or receives are under way.
    pub fn has_points(&self) -> bool {
        self.points > 0
    }

    /// Begins a send or receive.
    pub fn post(&mut self, mut point: Point) {
        if let Err(error) = self.check_open(|| point.call.name()) {
            return point.complete(Err(error));
        }
        let PointCall { peer, tag, .. } = point.call;
        point.open = Some(self.recorder.begin_at(point.started, || What {
            category: Category::Message,
            name: point.call.name(),
            peer,
            tag: Some(tag),
            bytes: Some(point.call.bytes()),
            ..What::default()
        }));
        self.points += 1;
        let started = point.started;
        let due = Limits::of(&point, &self.settings).next(&point, started);
        self.points_due = Some(self.points_due.map_or(due, |known| known.min(due)));
        let mut ended = Vec::new();
        self.transport.post(point, &mut ended);
        self.settle(ended, started);
    }

    /// Brings sends and receives as far as possible without waiting.
    pub fn progress_points(&mut self, now: Instant) -> Progress {
        if !self.has_points() {
            return Progress::Done;
        }
        let mut ended = Vec::new();
        let idle = self.running.is_none();
        // The types of the buffers are the callers', and their code may panic.
        let progress = catch_unwind(AssertUnwindSafe(|| {
            self.transport.progress_points(idle, now, &mut ended)
        }));
        let moved = !ended.is_empty();
        self.settle(ended, now);
        let moved = match progress {
            _ if !self.has_points() => moved,
            Ok(Ok(more)) => {
                self.watch_points(now);
                moved || more
            }
            Ok(Err(cause)) => {
                self.fail_points(cause, now);
                true
            }
            Err(panic) => {
                self.on_panic("send or recv", panic_text(&*panic));
                true
            }
        };
        match self.has_points() {
            _ if moved => Progress::Moved,
            true => Progress::Stuck,
            // All sends and receives have failed just now, and the collective beside them fails, too.
            false => Progress::Moved,
        }
    }

    fn settle(&mut self, ended: Vec<Ended>, now: Instant) {
        let any = !ended.is_empty();
        for Ended { point, outcome } in ended {
            self.points = self.points.saturating_sub(1);
            let result = match outcome {
                Outcome::Done => {
                    let time = now.saturating_duration_since(point.started);
                    self.usage.add_message(&point.call, time);
                    Ok(())
                }
                Outcome::Refused(problem) => Err(Error::argument(point.call.name(), problem)),
                Outcome::Failed(cause) => Err(self.fail_point(&point, cause, now)),
            };
            point.complete(result);
        }
        if !self.has_points() {
            self.forget_points();
            if self.told.is_some() {
                self.tell(now);
            }
        } else if any && !self.points_awaited.is_empty() {
            // This rank may not wait for some of these peers any more. So it looks again soon.
            let look_at = self.points_looked_at.map(|at| at + self.news_after());
            self.points_due = self.points_due.into_iter().chain(look_at).min();
        }
    }

    fn forget_points(&mut self) {
        (self.points_due, self.points_followed) = (None, false);
        self.points_awaited.clear();
    }

    /// Poisons the group because one send or receive has failed.
    fn fail_point(&mut self, point: &Point, cause: Cause, now: Instant) -> Error {
        match self.check_open(|| point.call.name()) {
            Ok(()) => {
                let elapsed = now.saturating_duration_since(point.started);
                let (sequence, call) = (self.sequence, point.call.to_string());
                let failure = CollectiveError::new(&self.member, sequence, call, elapsed, cause);
                let is_own_limit = self.settings.is_own_timeout || point.timeout.is_some();
                self.fail_as(CollectiveError { is_own_limit, ..failure })
            }
            Err(error) => error,
        }
    }

    /// Poisons the group for a reason that concerns all sends and receives. The oldest send or receive with
    /// the rank at fault gets the error; the oldest of all, if none is with that rank.
    fn fail_points(&mut self, cause: Cause, now: Instant) {
        let mut points = self.transport.take_points();
        self.points = 0;
        points.sort_by_key(|point| point.started);
        let culprits = cause.ranks();
        let blamed =
            points.iter().position(|it| it.call.peer.is_some_and(|peer| culprits.contains(&peer)));
        if points.is_empty() {
            return;
        }
        let blamed = points.remove(blamed.unwrap_or(0));
        let error = self.fail_point(&blamed, cause, now);
        blamed.complete(Err(error));
        if let State::Failed(by) = &self.state {
            complete_poisoned(points, by);
        }
    }

    /// The group has failed: ends all sends and receives.
    pub(crate) fn poison_points(&mut self, by: &Arc<CollectiveError>) {
        self.points = 0;
        self.forget_points();
        complete_poisoned(self.transport.take_points(), by);
    }

    /// Finds out who is late, warns, and gives up after the deadline.
    fn watch_points(&mut self, now: Instant) {
        if !self.points_followed && self.points_due.is_none_or(|due| now < due) {
            if self.told.is_some() {
                self.tell(now);
            }
            return;
        }
        self.points_looked_at = Some(now);
        let mut due: Option<Instant> = None;
        let [mut long, mut followed, mut late, mut expired] = [const { Late::NOBODY }; 4];
        let settings = &self.settings;
        self.transport.for_each_point(&mut |point| {
            let limits = Limits::of(point, settings);
            let waited = now.saturating_duration_since(point.started);
            if waited >= limits.lead {
                long.add(point);
            }
            if now < limits.give_up_at(point) {
                if waited >= settings.warn_after && !point.warned {
                    point.warned = true;
                    late.add(point);
                } else if limits.follows(point, now) {
                    followed.add(point);
                }
            } else if point.warned || settings.warn_after >= limits.timeout {
                expired.add(point);
            } else {
                // No thread of this rank has looked since the time of the warning, so this process was
                // stopped. It gives the other ranks time to say whom they wait for.
                point.warned = true;
                point.give_up_at = Some(now + limits.lead);
            }
            let next = limits.next(point, now);
            due = Some(due.map_or(next, |due| due.min(next)));
        });
        (self.points_due, self.points_followed) = (due, followed.count > 0);
        // A rank that waits for a message to itself waits for no other rank.
        let others = long.ranks(self).into_iter().filter(|rank| *rank != self.member.rank);
        self.points_awaited = others.collect();
        self.tell(now);
        if followed.count + expired.count > 0
            && let Err(mismatch) = self.compare_waits(now)
        {
            return self.fail_points(mismatch, now);
        }
        if expired.count > 0 {
            let waiting_for = expired.ranks(self);
            let cause = self.trace(Cause::Timeout { waiting_for }, Lack::Message, now);
            return self.fail_points(cause, now);
        }
        if followed.count > 0 {
            let awaited = followed.ranks(self);
            self.follow(Lack::Message, &awaited, now);
        }
        if let Some((call, started)) = late.oldest {
            let awaited = late.ranks(self);
            let roots = self.follow(Lack::Message, &awaited, now);
            tracing::warn!(
                group = self.member.name,
                rank = self.member.rank,
                late = ?roots,
                ?awaited,
                "{call} and {} other sends and receives have been waiting for {:.1?}: the late \
                 ranks are stopped, slow or in another call; they are given up after \
                 {:.1?} ({})",
                late.count - 1,
                now.saturating_duration_since(started),
                self.settings.timeout,
                limit_of(self.settings.is_own_timeout),
            );
        }
    }
}

/// How long a send or receive may wait.
#[derive(Clone, Copy)]
struct Limits {
    /// The time before a warning, and before the time limit, in which this rank finds out which ranks are
    /// late.
    lead: Duration,
    warn_after: Duration,
    timeout: Duration,
}

impl Limits {
    fn of(point: &Point, settings: &Settings) -> Limits {
        let timeout = point.timeout.map_or(settings.timeout, bounded);
        let warn_after = settings.warn_after.min(timeout);
        Limits { lead: warn_after / 2, warn_after, timeout }
    }

    fn give_up_at(self, point: &Point) -> Instant {
        point.give_up_at.unwrap_or(point.started + self.timeout)
    }

    /// Whether this rank should find out now which ranks are late.
    fn follows(self, point: &Point, now: Instant) -> bool {
        let warns_soon = !point.warned && now >= point.started + self.lead;
        warns_soon || now + self.lead >= self.give_up_at(point)
    }

    /// When to look at this send or receive again.
    fn next(self, point: &Point, now: Instant) -> Instant {
        let give_up_at = self.give_up_at(point);
        let moments =
            [point.started + self.lead, point.started + self.warn_after, give_up_at - self.lead];
        moments.into_iter().find(|at| *at > now).unwrap_or(give_up_at)
    }
}

/// Some sends and receives that have waited for too long.
struct Late {
    named: BTreeSet<Rank>,
    /// Whether one of them receives from any rank.
    from_any: bool,
    count: usize,
    oldest: Option<(PointCall, Instant)>,
}

impl Late {
    const NOBODY: Late = Late { named: BTreeSet::new(), from_any: false, count: 0, oldest: None };

    /// The ranks for which these sends and receives wait. A receive from any rank waits for all other ranks
    /// that have not left, or, when all have left, for all of them.
    fn ranks(&self, lane: &Lane) -> Vec<Rank> {
        let mut ranks = self.named.clone();
        if self.from_any {
            let Membership { rank, world_size, .. } = lane.member;
            let others = (0..world_size).filter(|other| *other != rank);
            let (left, present): (Vec<_>, Vec<_>) =
                others.partition(|other| lane.transport.left(*other).is_some());
            ranks.extend(if present.is_empty() { left } else { present });
        }
        ranks.into_iter().collect()
    }

    fn add(&mut self, point: &Point) {
        match point.call.peer {
            Some(peer) => drop(self.named.insert(peer)),
            None => self.from_any = true,
        }
        self.count += 1;
        if self.oldest.is_none_or(|(_, started)| point.started < started) {
            self.oldest = Some((point.call, point.started));
        }
    }
}

fn complete_poisoned(points: Vec<Point>, by: &Arc<CollectiveError>) {
    for point in points {
        let attempted = point.call.name();
        point.complete(Err(by.poisoned(attempted)));
    }
}
