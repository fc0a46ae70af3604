//! The store: it carries out one request after another.

use std::collections::BTreeMap;

use drumline_launch::membership::{Host, Plan, Poll, Report, View};

/// What the launchers have written.
#[derive(Clone, Debug, Default)]
pub(super) struct Store {
    count: u64,
    hosts: BTreeMap<u64, Host>,
    reports: BTreeMap<u64, Report>,
    pub(super) plan: Option<Plan>,
}

#[derive(Clone, Debug)]
pub(super) enum Request {
    Number,
    Host(u64, Host),
    Report(u64, Report),
    /// What to read for a poll.
    Plan,
    Hosts(Poll),
    Reports(Poll),
    All(Poll),
    CompareSet {
        expected: Option<Box<Plan>>,
        plan: Box<Plan>,
    },
}

#[derive(Clone, Debug)]
pub(super) enum Answer {
    Done,
    Number(u64),
    /// A part of a view: the other parts are empty.
    View(View),
    Planned(Option<Plan>),
}

impl Store {
    /// Carries out a request. A plan that was replaced comes back, too.
    pub(super) fn handle(&mut self, request: Request) -> (Answer, Option<Option<Plan>>) {
        let answer = match request {
            Request::Number => {
                self.count += 1;
                Answer::Number(self.count)
            }
            Request::Host(number, host) => {
                self.hosts.insert(number, host);
                Answer::Done
            }
            Request::Report(number, report) => {
                self.reports.insert(number, report);
                Answer::Done
            }
            Request::Plan => Answer::View(View { plan: self.plan.clone(), ..View::default() }),
            Request::Hosts(poll) => Answer::View(View { plan: None, ..self.hosts(&poll) }),
            Request::Reports(poll) => Answer::View(self.reports(&poll)),
            Request::All(poll) => Answer::View(View {
                plan: self.plan.clone(),
                reports: self.reports(&poll).reports,
                ..self.hosts(&poll)
            }),
            Request::CompareSet { expected, plan } => {
                let old = self.plan.clone();
                if old != expected.map(|it| *it) {
                    return (Answer::Planned(old), None);
                }
                self.plan = Some(*plan);
                return (Answer::Planned(self.plan.clone()), Some(old));
            }
        };
        (answer, None)
    }

    fn hosts(&self, poll: &Poll) -> View {
        let host = |number: &u64| Some((*number, Ok(self.hosts.get(number)?.clone())));
        View {
            count: poll.count.then_some(self.count),
            hosts: poll.hosts.iter().filter_map(host).collect(),
            ..View::default()
        }
    }

    fn reports(&self, poll: &Poll) -> View {
        let report = |number: &u64| (*number, self.reports.get(number).cloned());
        View { reports: poll.reports.iter().map(report).collect(), ..View::default() }
    }
}
