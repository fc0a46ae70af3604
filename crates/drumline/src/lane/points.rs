//! Sends and receives of a lane.

use std::{
    collections::BTreeSet, panic::AssertUnwindSafe, panic::catch_unwind, sync::Arc, time::Instant,
};

use super::{Lane, State};
use crate::{
    Cause, CollectiveError, Error,
    executor::Progress,
    trace::{Category, What},
    transport::{Ended, Outcome, Point, PointCall, mesh::Membership},
    work::panic_text,
};

impl Lane {
    /// Whether sends or receives are under way.
    pub(crate) fn has_points(&self) -> bool {
        self.points > 0
    }

    /// A send or receive was called.
    pub(crate) fn post(&mut self, mut point: Point) {
        if let Err(error) = self.check_open(point.call.name()) {
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
        let timeout = point.timeout.unwrap_or(self.config.timeout);
        let started = point.started;
        let due = started + self.config.warn_after.min(timeout);
        self.points_due = Some(self.points_due.map_or(due, |known| known.min(due)));
        let mut ended = Vec::new();
        self.transport.post(point, &mut ended);
        self.settle(ended, started);
    }

    /// Brings sends and receives as far as possible without waiting.
    pub(crate) fn progress_points(&mut self, now: Instant) -> Progress {
        if !self.has_points() {
            return Progress::Done;
        }
        let mut ended = Vec::new();
        let idle = self.running.is_none();
        // The buffers are of types of the callers'.
        let progress = catch_unwind(AssertUnwindSafe(|| {
            self.transport.progress_points(idle, now, &mut ended)
        }));
        let moved = !ended.is_empty();
        self.settle(ended, now);
        let moved = match progress {
            _ if !self.has_points() => moved,
            Ok(Ok(more)) => {
                self.watch_points(now);
                if !moved && !more {
                    self.ask_for_whom();
                }
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
            // They have failed just now: so has what runs beside them.
            false => Progress::Moved,
        }
    }

    fn settle(&mut self, ended: Vec<Ended>, now: Instant) {
        for Ended { point, outcome } in ended {
            self.points = self.points.saturating_sub(1);
            let result = match outcome {
                Outcome::Done => Ok(()),
                Outcome::Refused(problem) => {
                    Err(Error::InvalidArgument { operation: point.call.name(), problem })
                }
                Outcome::Failed(cause) => Err(self.fail_point(&point, cause, now)),
            };
            point.complete(result);
        }
        if !self.has_points() {
            self.points_due = None;
            self.points_late.clear();
        }
    }

    /// Poisons the group because of one send or receive.
    fn fail_point(&mut self, point: &Point, cause: Cause, now: Instant) -> Error {
        match self.check_open(point.call.name()) {
            Ok(()) => {
                let elapsed = now.saturating_duration_since(point.started);
                self.fail(point.call.to_string(), self.sequence, elapsed, cause)
            }
            Err(error) => error,
        }
    }

    /// Poisons the group because of something that concerns all sends and receives. The error
    /// goes to the oldest one with the rank at fault, if there is one.
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
    pub(super) fn poison_points(&mut self, by: &Arc<CollectiveError>) {
        self.points = 0;
        self.points_due = None;
        self.points_late.clear();
        complete_poisoned(self.transport.take_points(), by);
    }

    /// Number of the first collective that is not over.
    fn first_unfinished(&self) -> u64 {
        self.sequence - u64::from(self.running.is_some())
    }

    /// Whoever is named by late ranks, and by those that they name, is asked whom it awaits itself.
    fn ask_for_whom(&mut self) {
        if !self.points_late.is_empty() {
            let roots = self.roots(self.points_late.clone(), self.first_unfinished());
            self.transport.want(&roots);
        }
    }

    /// Warns of late peers, and gives up after the deadline.
    fn watch_points(&mut self, now: Instant) {
        if self.points_due.is_none_or(|due| now < due) {
            return;
        }
        let (timeout_of_group, warn_after) = (self.config.timeout, self.config.warn_after);
        let mut due: Option<Instant> = None;
        let (mut late, mut expired) = (Late::default(), Late::default());
        // All that were late before, too.
        let mut waiting = Late::default();
        let member = &self.member;
        self.transport.for_each_point(&mut |point| {
            let waited = now.saturating_duration_since(point.started);
            let timeout = point.timeout.unwrap_or(timeout_of_group);
            let give_up_at = point.give_up_at.unwrap_or(point.started + timeout);
            if now < give_up_at {
                if waited >= warn_after && !point.warned {
                    point.warned = true;
                    late.add(point, member);
                }
            } else if point.warned || warn_after >= timeout {
                expired.add(point, member);
            } else {
                // Nobody has looked since the time to warn: this rank was stopped itself, and
                // hears first what the others say.
                point.warned = true;
                point.give_up_at = Some(now + warn_after / 2);
            }
            let next = match point.warned {
                true => point.give_up_at.unwrap_or(point.started + timeout),
                false => point.started + warn_after.min(timeout),
            };
            due = Some(due.map_or(next, |due| due.min(next)));
            if point.warned {
                waiting.add(point, member);
            }
        });
        self.points_due = due;
        self.points_late = waiting.ranks.into_iter().collect();
        if !expired.ranks.is_empty() {
            let waiting_for = expired.ranks.into_iter().collect();
            let cause = self.trace(Cause::Timeout { waiting_for }, self.first_unfinished());
            self.fail_points(cause, now);
        } else if let Some((call, started)) = late.oldest {
            let awaited: Vec<_> = late.ranks.into_iter().collect();
            tracing::warn!(
                group = self.member.name,
                rank = self.member.rank,
                late = ?self.roots(awaited.clone(), self.first_unfinished()),
                ?awaited,
                "{call} and {} other sends and receives have been waiting for {:.1?}: the late \
                 ranks are stopped, slow or in another call; they are given up after \
                 {timeout_of_group:.1?} (DRUMLINE_TIMEOUT_S)",
                late.count - 1,
                now.saturating_duration_since(started),
            );
        }
    }
}

/// Sends and receives that wait for too long.
#[derive(Default)]
struct Late {
    ranks: BTreeSet<usize>,
    count: usize,
    oldest: Option<(PointCall, Instant)>,
}

impl Late {
    fn add(&mut self, point: &Point, member: &Membership) {
        match point.call.peer {
            Some(peer) => drop(self.ranks.insert(peer)),
            None => self.ranks.extend((0..member.world_size).filter(|&rank| rank != member.rank)),
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
        point.complete(Err(Error::Poisoned { attempted, by: by.clone() }));
    }
}
