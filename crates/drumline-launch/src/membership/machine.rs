//! The state machine of one host.

use std::time::Duration;

use crate::{Ending, RestartBudget};

use super::{
    actions::{Action, End, WorldPlan},
    events::{Event, Local, Poll, View},
    leader::Leader,
    notes,
    sightings::{Knowledge, Sightings},
    timing::{self, Timing},
    values::{Failure, Held, Host, How, Outcome, Phase, Plan, Report, State, Why},
};

/// The membership of one host: see the [module](super).
#[derive(Clone, Debug)]
pub struct Membership {
    me: u64,
    host: Host,
    timing: Timing,
    /// The last plan that was read, and when one was first found to be over.
    plan: Option<Plan>,
    over_at: Option<Duration>,
    /// When the first plan was read.
    learned_at: Option<Duration>,
    /// What the next poll says, but for its beat.
    report: Report,
    /// What the last poll said that came to its end.
    written: Option<Report>,
    /// Of the poll that is under way.
    asked: Option<Report>,
    lease: Option<Duration>,
    poll_at: Duration,
    /// Whether workers run, or are being started.
    is_busy: bool,
    /// What the workers of this world were told.
    told: Told,
    /// Since when this host could leave.
    leaves_at: Option<Duration>,
    seen: Sightings,
    leader: Leader,
    is_done: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Told {
    hold: bool,
    stop: bool,
    abandon: bool,
}

impl Membership {
    /// This host has got the number `me` from the store, and has written `host`.
    pub fn new(me: u64, host: Host, timing: Timing) -> Membership {
        Membership {
            me,
            host,
            timing,
            plan: None,
            over_at: None,
            learned_at: None,
            report: Report::default(),
            written: None,
            asked: None,
            lease: None,
            poll_at: Duration::ZERO,
            is_busy: false,
            told: Told::default(),
            leaves_at: None,
            seen: Sightings::default(),
            leader: Leader::default(),
            is_done: false,
        }
    }

    /// When the next poll is due.
    pub fn poll_at(&self) -> Duration {
        self.poll_at
    }

    /// When [`Event::Tick`] is due, if ever.
    pub fn deadline(&self) -> Option<Duration> {
        let over = self.over_at.filter(|_| !self.is_busy).map(|at| at + self.patience());
        let leave =
            self.leaves_at.filter(|_| self.over_at.is_none()).map(|at| at + self.patience());
        let lease = self.lease.filter(|_| self.over_at.is_none());
        [over, leave, lease].into_iter().flatten().min().filter(|_| !self.is_done)
    }

    /// Until when workers of this host may live. `None`: there must be none.
    pub fn lease(&self) -> Option<Duration> {
        self.lease
    }

    /// The plan as this host knows it.
    pub fn plan(&self) -> Option<&Plan> {
        self.plan.as_ref()
    }

    /// Begins a poll.
    pub fn poll(&mut self, now: Duration) -> Poll {
        self.report.beat += 1;
        self.asked = Some(self.report.clone());
        self.poll_at = now + self.pause();
        let count = self.is_leader() || self.waits_for_others();
        let (mut hosts, mut reports) = match count {
            true => (self.seen.strangers(), self.seen.watched(&self.timing)),
            false => (Vec::new(), self.plan.iter().map(|it| it.leader).collect()),
        };
        reports.extend(&hosts);
        reports.retain(|number| *number != self.me);
        hosts.retain(|number| *number != self.me);
        Poll { report: self.report.clone(), count, hosts, reports }
    }

    /// Handles `event`, which happened at `now`, and returns what to do. `now` never runs backwards.
    pub fn handle(&mut self, now: Duration, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        if self.is_done {
            return actions;
        }
        let is_polled = matches!(event, Event::Polled(_));
        match event {
            Event::Polled(view) => self.polled(now, view, &mut actions),
            Event::Planned(plan) => self.learn(now, plan, &mut actions),
            Event::Local(local) => self.local(now, local),
            Event::Tick => {}
        }
        self.follow(now, &mut actions);
        if is_polled && !self.is_done {
            self.lead(now, &mut actions);
        }
        actions
    }

    fn is_leader(&self) -> bool {
        self.plan.as_ref().is_some_and(|plan| plan.leader == self.me)
    }

    /// Whether this host keeps the store for those that have not heard yet that the job is over.
    fn waits_for_others(&self) -> bool {
        self.over_at.is_some() && self.host.keeps_store
    }

    /// How long this host stays when the job is over, or when its launcher was told to end.
    fn patience(&self) -> Duration {
        if self.host.keeps_store { self.timing.linger } else { self.timing.silent }
    }

    fn pause(&self) -> Duration {
        let hosts = self.plan.as_ref().map_or(1, |plan| plan.members.len().max(1));
        let hosts = u32::try_from(hosts).unwrap_or(u32::MAX);
        let is_calm = self.plan.as_ref().is_some_and(|plan| plan.phase == Phase::Running);
        let pause = if is_calm { self.timing.poll } else { self.timing.poll_waiting };
        pause + self.timing.poll_per_host * hosts
    }

    fn polled(&mut self, now: Duration, view: View, actions: &mut Vec<Action>) {
        let until = view.began + timing::with_ranks(self.timing.lease, self.host.ranks);
        // Once it has run out it stays so.
        if self.lease.is_none_or(|lease| now < lease) {
            self.lease = Some(until);
        }
        if let Some(count) = view.count {
            self.seen.count(count);
        }
        for (number, host) in view.hosts {
            self.seen.host(number, now, host);
        }
        for (number, report) in view.reports {
            self.seen.report(number, now, view.began, report);
        }
        self.written = self.asked.take();
        self.seen.own(self.me, now, &self.host, self.written.clone());
        match view.plan {
            Some(plan) => self.learn(now, plan, actions),
            // It may have been written since it was read.
            None if self.learned_at.is_some_and(|at| at < view.began) => {
                self.end(End::Forgotten, actions);
            }
            None => {}
        }
    }

    fn learn(&mut self, now: Duration, plan: Plan, actions: &mut Vec<Action>) {
        let old = self.plan.as_ref();
        if old.is_some_and(|old| old.version >= plan.version) {
            return;
        }
        let notes = notes::between(old, &plan, self.me);
        actions.extend(notes.into_iter().map(Action::Note));
        if matches!(plan.phase, Phase::Over(_)) {
            self.over_at.get_or_insert(now);
        }
        self.learned_at.get_or_insert(now);
        self.report.plan = plan.version;
        self.plan = Some(plan);
        self.poll_at = self.poll_at.min(now + self.pause());
    }

    fn local(&mut self, now: Duration, local: Local) {
        self.poll_at = now;
        match local {
            Local::Leaving(signal) => self.report.leaves = Some(signal),
            // It is about workers of an earlier world.
            _ if !self.is_busy => {}
            Local::Started => self.report.state = State::Running,
            Local::Failed(failure) => self.report.failure = Some(failure),
            Local::Regroups(ranks) => self.report.regroups = Some(ranks),
            Local::Held(begun) => self.report.held = Some(Held { begun }),
            Local::Ended(outcome) => {
                self.is_busy = false;
                if outcome.how == How::Failed && self.report.failure.is_none() {
                    self.report.failure = Some(self.nameless_failure());
                }
                self.report.state = State::Ended(outcome);
            }
        }
    }

    /// A worker failed, and nobody said which.
    fn nameless_failure(&self) -> Failure {
        let place = self.plan.as_ref().and_then(|plan| plan.members.get(plan.place(self.me)?));
        Failure {
            rank: place.map_or(0, |it| it.first_rank),
            local_rank: 0,
            pid: 0,
            ending: Ending::Code(1),
            has_only_heard: false,
            time: 0,
            text: String::new(),
        }
    }

    /// Does what the plan says.
    fn follow(&mut self, now: Duration, actions: &mut Vec<Action>) {
        if self.is_done {
            return;
        }
        if self.over_at.is_none() && self.lease.is_some_and(|lease| now >= lease) {
            return self.cut_off(actions);
        }
        if let Some(plan) = self.plan.clone() {
            self.obey(now, &plan, actions);
        }
        if !self.is_done {
            self.leave(now, actions);
        }
    }

    fn obey(&mut self, now: Duration, plan: &Plan, actions: &mut Vec<Action>) {
        if let Some(refused) = plan.refused.iter().find(|it| it.host == self.me) {
            return self.end(End::Refused(refused.why.clone()), actions);
        }
        if let Phase::Over(verdict) = &plan.phase {
            if self.is_busy {
                return self.cut_off(actions);
            }
            let has_said = self.written.as_ref().is_some_and(|it| it.plan >= plan.version);
            let is_heard = has_said && (!self.host.keeps_store || self.all_have_heard(plan));
            if is_heard || self.over_at.is_some_and(|at| now >= at + self.patience()) {
                self.end(End::Over(verdict.clone(), plan.failure.clone()), actions);
            }
            return;
        }
        let is_member = plan.place(self.me).is_some();
        let is_in_world = is_member && plan.runs();
        if self.is_busy && !(is_in_world && self.report.world == plan.world) {
            return self.cut_off(actions);
        }
        if self.report.world == plan.world && plan.runs() && plan.world > 0 && !is_member {
            return self.cut_off(actions);
        }
        if !is_in_world {
            return;
        }
        let is_new = self.report.world < plan.world;
        match &plan.phase {
            Phase::Running if is_new => self.start(plan, actions),
            _ if is_new => {
                self.enter(plan.world);
                self.report.state = State::Ended(Outcome::NEVER_RAN);
                self.poll_at = now;
            }
            _ if !self.is_busy => {}
            Phase::Holding if !std::mem::replace(&mut self.told.hold, true) => {
                actions.push(Action::Hold);
            }
            Phase::StoppingAt(step) if !std::mem::replace(&mut self.told.stop, true) => {
                actions.push(Action::StopAt(*step));
            }
            Phase::Ending(why) => self.abandon(why.clone(), actions),
            _ => {}
        }
    }

    fn start(&mut self, plan: &Plan, actions: &mut Vec<Action>) {
        let Some(place) = plan.place(self.me) else { return };
        // A launcher that is told to end starts nothing any more.
        if self.lease.is_none() || self.report.leaves.is_some() {
            return;
        }
        self.enter(plan.world);
        self.is_busy = true;
        actions.push(Action::Start(WorldPlan {
            world: plan.world,
            restart: plan.restart,
            size: plan.members.iter().map(|it| it.ranks).sum(),
            place,
            members: plan.members.clone(),
        }));
    }

    fn enter(&mut self, world: u64) {
        self.report.world = world;
        self.report.state = State::Waiting;
        self.report.failure = None;
        self.report.regroups = None;
        self.report.held = None;
        self.told = Told::default();
    }

    fn abandon(&mut self, why: Why, actions: &mut Vec<Action>) {
        // A launcher that was told to end is ending its workers.
        let is_asked = self.report.leaves.is_some() || self.told.abandon;
        if !is_asked || why == Why::CutOff {
            self.told.abandon = true;
            actions.push(Action::Abandon(why));
        }
    }

    /// This host's lease has run out, or the others have gone on without it.
    fn cut_off(&mut self, actions: &mut Vec<Action>) {
        if self.is_busy {
            self.abandon(Why::CutOff, actions);
        }
        match self.report.leaves {
            Some(signal) => self.end(End::Left(signal), actions),
            None => {
                self.is_done = true;
                actions.push(Action::Rejoin);
            }
        }
    }

    /// Ends this host's part when its launcher was told to end, its workers have ended, and the others know.
    fn leave(&mut self, now: Duration, actions: &mut Vec<Action>) {
        let Some(signal) = self.report.leaves.filter(|_| !self.is_busy && self.over_at.is_none())
        else {
            return;
        };
        let since = *self.leaves_at.get_or_insert(now);
        let has_said = self
            .written
            .as_ref()
            .is_some_and(|it| it.leaves.is_some() && it.state == self.report.state);
        let is_needed = self.is_leader() || self.host.keeps_store;
        if (has_said && !is_needed) || now >= since + self.patience() {
            self.end(End::Left(signal), actions);
        }
    }

    fn end(&mut self, end: End, actions: &mut Vec<Action>) {
        if self.is_busy {
            self.abandon(Why::CutOff, actions);
        }
        self.is_done = true;
        actions.push(Action::End(end));
    }

    /// Whether each host that lives has seen this plan.
    fn all_have_heard(&self, plan: &Plan) -> bool {
        let has_heard = |number: u64| {
            let report = self.seen.report_of(number);
            number == self.me
                || self.seen.is_silent(number, &self.timing)
                || report.is_some_and(|it| it.plan >= plan.version || it.leaves.is_some())
                || plan.refused.iter().any(|it| it.host == number)
        };
        self.seen.has_counted()
            && self.seen.numbers().all(has_heard)
            && self.seen.strangers().is_empty()
    }

    /// Writes the next plan, if this host is the leader or has to become it.
    fn lead(&mut self, now: Duration, actions: &mut Vec<Action>) {
        let budget = RestartBudget::new(self.host.terms.restarts);
        let first = Plan { leader: self.me, budget, ..Plan::default() };
        let plan = match &self.plan {
            None => &first,
            Some(plan) if plan.leader == self.me || self.takes_over(plan) => plan,
            Some(_) => {
                self.leader = Leader::default();
                return;
            }
        };
        let it = Knowledge {
            now,
            me: self.me,
            host: &self.host,
            seen: &self.seen,
            timing: &self.timing,
        };
        let mut next = self.leader.next(it, plan);
        next.version = next.version.max(1);
        if Some(&next) != self.plan.as_ref() {
            let expected = self.plan.clone().map(Box::new);
            actions.push(Action::WritePlan { expected, plan: Box::new(next) });
        }
    }

    /// Whether the leader has been silent for long enough. Each host waits a little longer than the one before it.
    fn takes_over(&self, plan: &Plan) -> bool {
        const PLACES_MAX: u32 = 10;
        let place = plan.place(self.me).unwrap_or(plan.members.len());
        let place = u32::try_from(place).unwrap_or(PLACES_MAX).min(PLACES_MAX);
        let later = self.timing.take_over_step * place;
        self.seen.is_silent_for(plan.leader, &self.timing, later)
            && !matches!(plan.phase, Phase::Over(_))
            && self.report.leaves.is_none()
    }
}
