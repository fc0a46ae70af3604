//! A launcher: the shell around a [`Membership`].

use std::time::Duration;

use drumline_launch::membership::{End, Membership, Poll, View};

use super::{draw::KEEPERS, store::Request, workers::Workers};
use crate::time::Nanos;

/// A launcher.
#[derive(Clone, Debug)]
pub(super) struct Launcher {
    pub(super) machine: usize,
    pub(super) number: Option<u64>,
    pub(super) membership: Option<Membership>,
    /// When it got its membership.
    pub(super) joined_at: Nanos,
    pub(super) asked: Asked,
    pub(super) next_id: u64,
    /// When its next wake-up is due.
    pub(super) wakes_at: Option<Nanos>,
    pub(super) workers: Option<Workers>,
    /// Until when the workers may live, and which keepers are about to look at that.
    pub(super) lease: Option<Duration>,
    pub(super) lease_is_watched: [bool; KEEPERS],
    pub(super) leaves: Option<i32>,
    pub(super) end: Option<LauncherEnd>,
}

/// Requests without an answer, by their ids.
#[derive(Clone, Debug, Default)]
pub(super) struct Asked {
    pub(super) join: Option<u64>,
    pub(super) poll: Option<Polling>,
    pub(super) plan: Option<u64>,
}

/// A poll that is under way.
#[derive(Clone, Debug)]
pub(super) struct Polling {
    pub(super) id: u64,
    /// What is still to be asked.
    pub(super) rest: Vec<Request>,
    pub(super) view: View,
}

#[derive(Clone, Debug)]
pub(super) enum LauncherEnd {
    Part(End),
    Crashed,
    /// It got a signal before it had joined.
    Left,
    /// The store has ended before it heard the end of the job.
    StoreGone,
}

impl Launcher {
    pub(super) fn new(machine: usize) -> Launcher {
        Launcher {
            machine,
            number: None,
            membership: None,
            joined_at: 0,
            asked: Asked::default(),
            next_id: 0,
            wakes_at: None,
            workers: None,
            lease: None,
            lease_is_watched: [false; KEEPERS],
            leaves: None,
            end: None,
        }
    }

    pub(super) fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }
}

impl Polling {
    /// The requests of a poll: first its report, then the rest, in any order.
    pub(super) fn new(
        id: u64,
        number: u64,
        poll: Poll,
        began: Duration,
        order: Option<u8>,
    ) -> Polling {
        let report = Request::Report(number, poll.report.clone());
        let mut rest = match order {
            None => vec![Request::All(poll)],
            Some(order) => {
                let mut parts =
                    vec![Request::Plan, Request::Hosts(poll.clone()), Request::Reports(poll)];
                parts.rotate_left(usize::from(order % 3));
                if order >= 3 {
                    parts.swap(0, 1);
                }
                parts
            }
        };
        rest.push(report);
        Polling { id, rest, view: View { began, ..View::default() } }
    }

    /// Adds what was answered.
    pub(super) fn add(&mut self, part: View) {
        self.view.plan = self.view.plan.take().or(part.plan);
        self.view.count = self.view.count.or(part.count);
        self.view.hosts.extend(part.hosts);
        self.view.reports.extend(part.reports);
    }
}
