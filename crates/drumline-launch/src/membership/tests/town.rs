//! Launchers that share a store.

use std::{collections::BTreeMap, num::NonZeroUsize, ops::RangeInclusive, time::Duration};

use crate::{Ending, Hosts, Joining, Restarts, membership::*};

pub(super) fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A host with so many ranks, of a job of so many hosts.
pub(super) fn host(hosts: RangeInclusive<usize>, ranks: usize) -> Host {
    let number = |it: &usize| NonZeroUsize::new(*it).unwrap();
    Host {
        terms: Terms {
            version: "1".into(),
            run_id: "job".into(),
            backend: "etcd".into(),
            hosts: Hosts { min: number(hosts.start()), max: number(hosts.end()) },
            restarts: Restarts { max: 2, ..Restarts::default() },
        },
        node_rank: None,
        ranks,
        name: String::new(),
        address: String::new(),
        keeps_store: false,
    }
}

/// Launchers that share a store. Everything is encoded and decoded on its way.
pub(super) struct Town {
    pub(super) now: Duration,
    count: u64,
    hosts: BTreeMap<u64, Vec<u8>>,
    reports: BTreeMap<u64, Vec<u8>>,
    plan: Option<Vec<u8>>,
    pub(super) launchers: BTreeMap<u64, Launcher>,
    pub(super) notes: Vec<(u64, String)>,
}

pub(super) struct Launcher {
    membership: Membership,
    host: Host,
    /// The world whose workers run.
    world: Option<WorldPlan>,
    /// The last world that it started.
    last_world: Option<WorldPlan>,
    pub(super) started_at: Duration,
    pub(super) held: bool,
    pub(super) stops_at: Option<u64>,
    end: Option<End>,
    /// It neither polls nor hears anything, and its workers die with the lease.
    pub(super) is_cut: bool,
    /// Workers end as soon as they are told to.
    pub(super) is_obedient: bool,
    /// Workers make a step.
    pub(super) steps: bool,
}

impl Town {
    pub(super) fn new(hosts: &[Host]) -> Town {
        let mut town = Town {
            now: Duration::ZERO,
            count: 0,
            hosts: BTreeMap::new(),
            reports: BTreeMap::new(),
            plan: None,
            launchers: BTreeMap::new(),
            notes: Vec::new(),
        };
        for host in hosts {
            town.join(host.clone());
        }
        town
    }

    /// A launcher starts. Its name is a letter.
    pub(super) fn join(&mut self, mut host: Host) -> u64 {
        self.count += 1;
        let number = self.count;
        if host.name.is_empty() {
            host.name = char::from(b'a' + number as u8 - 1).to_string();
            host.address = format!("10.0.0.{number}");
        }
        self.hosts.insert(number, host.encode());
        let timing = Timing::of(&Joining::default());
        let membership = Membership::new(number, host.clone(), timing);
        self.launchers.insert(
            number,
            Launcher {
                membership,
                host,
                world: None,
                last_world: None,
                started_at: Duration::ZERO,
                held: false,
                stops_at: None,
                end: None,
                is_cut: false,
                is_obedient: true,
                steps: true,
            },
        );
        number
    }

    /// Writes something else for a host.
    pub(super) fn damage(&mut self, number: u64, bytes: &[u8]) {
        self.hosts.insert(number, bytes.to_vec());
    }

    pub(super) fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        while self.now < until {
            self.now += ms(1);
            for number in self.launchers.keys().copied().collect::<Vec<_>>() {
                self.turn(number);
            }
        }
    }

    /// Lets time pass until something holds. That it does so within some minutes is what is tested.
    pub(super) fn run_until(&mut self, what: &str, holds: impl Fn(&Town) -> bool) -> Duration {
        let start = self.now;
        while !holds(self) {
            self.pass(ms(1));
            assert!(
                self.now < start + Duration::from_secs(700),
                "not yet: {what}\n{:?}",
                self.plan()
            );
        }
        self.now - start
    }

    fn turn(&mut self, number: u64) {
        let Some(launcher) = self.launchers.get_mut(&number) else { return };
        if launcher.membership.lease().is_some_and(|it| self.now >= it) {
            launcher.world = None;
        }
        if launcher.is_cut {
            return;
        }
        if launcher.membership.deadline().is_some_and(|it| self.now >= it) {
            self.handle(number, Event::Tick);
        }
        let Some(launcher) = self.launchers.get_mut(&number) else { return };
        if launcher.end.is_some() || self.now < launcher.membership.poll_at() {
            return;
        }
        let began = self.now;
        let poll = launcher.membership.poll(began);
        self.reports.insert(number, poll.report.encode());
        let host = |it: &u64| {
            let host = Host::decode(&format!("host/{it}"), self.hosts.get(it)?);
            Some((*it, host.map_err(|error| error.to_string())))
        };
        let report = |it: &u64| {
            let report = self.reports.get(it).and_then(|it| Report::decode("report", it).ok());
            (*it, report)
        };
        let view = View {
            began,
            plan: self.plan(),
            count: poll.count.then_some(self.count),
            hosts: poll.hosts.iter().filter_map(host).collect(),
            reports: poll.reports.iter().map(report).collect(),
        };
        self.handle(number, Event::Polled(view));
    }

    fn handle(&mut self, number: u64, event: Event) {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            let now = self.now;
            let launcher = self.launchers.get_mut(&number).unwrap();
            for action in launcher.membership.handle(now, event) {
                match action {
                    Action::WritePlan { expected, plan } => {
                        if self.plan == expected.map(|it| it.encode()) {
                            self.plan = Some(plan.encode());
                        }
                        let plan = self.plan.as_ref().unwrap();
                        events.push(Event::Planned(Plan::decode("plan", plan).unwrap()));
                    }
                    Action::Start(world) => {
                        assert_eq!(launcher.world, None);
                        launcher.world = Some(world.clone());
                        launcher.last_world = Some(world);
                        launcher.started_at = now;
                        launcher.held = false;
                        launcher.stops_at = None;
                        events.push(Event::Local(Local::Started));
                    }
                    Action::Hold => launcher.held = true,
                    Action::StopAt(step) => launcher.stops_at = Some(step),
                    Action::Abandon(_) if launcher.is_obedient => {
                        let outcome = launcher.outcome(now, How::Abandoned);
                        events.push(Event::Local(Local::Ended(outcome)));
                    }
                    Action::Abandon(_) => {}
                    Action::Note(text) => self.notes.push((number, text)),
                    Action::Rejoin => {
                        let host = launcher.host.clone();
                        self.launchers.remove(&number);
                        self.join(host);
                        return;
                    }
                    Action::End(end) => {
                        assert_eq!(launcher.world, None);
                        launcher.end = Some(end);
                    }
                }
            }
        }
    }

    pub(super) fn local(&mut self, number: u64, local: Local) {
        self.handle(number, Event::Local(local));
    }

    pub(super) fn workers_end(&mut self, number: u64, how: How) {
        let now = self.now;
        let outcome = self.launchers.get_mut(&number).unwrap().outcome(now, how);
        self.local(number, Local::Ended(outcome));
    }

    /// A worker fails, and the launcher ends the others.
    pub(super) fn worker_fails(&mut self, number: u64, ending: Ending) {
        self.worker_tells(number, ending, false);
    }

    /// The same, and it tells why: perhaps only that it has lost another one.
    pub(super) fn worker_tells(&mut self, number: u64, ending: Ending, has_only_heard: bool) {
        let first_rank = self.world_of(number).members[self.world_of(number).place].first_rank;
        let failure = Failure {
            rank: first_rank,
            local_rank: 0,
            pid: 1000,
            ending,
            has_only_heard,
            time: self.now.as_millis() as u64,
            text: "out of patience".into(),
        };
        self.local(number, Local::Failed(failure));
        self.workers_end(number, How::Failed);
    }

    /// The host loses its power.
    pub(super) fn crash(&mut self, number: u64) {
        self.launchers.remove(&number);
    }

    pub(super) fn plan(&self) -> Option<Plan> {
        self.plan.as_ref().map(|plan| Plan::decode("plan", plan).unwrap())
    }

    pub(super) fn running(&self) -> Vec<u64> {
        let running = self.launchers.iter().filter(|(_, it)| it.world.is_some());
        running.map(|(number, _)| *number).collect()
    }

    pub(super) fn world_of(&self, number: u64) -> &WorldPlan {
        self.launchers[&number].last_world.as_ref().expect("it has started")
    }

    pub(super) fn ends(&self) -> Vec<(u64, End)> {
        let end = |(number, it): (&u64, &Launcher)| Some((*number, it.end.clone()?));
        self.launchers.iter().filter_map(end).collect()
    }

    pub(super) fn exit_codes(&self) -> Vec<u8> {
        self.ends().iter().map(|(_, end)| end.exit_code()).collect()
    }

    /// The hosts of the last world, in the order of their ranks.
    pub(super) fn order(&self) -> Vec<u64> {
        self.plan().unwrap().members.iter().map(|it| it.host).collect()
    }

    pub(super) fn has_note(&self, number: u64, text: &str) -> bool {
        self.notes.iter().any(|(of, note)| *of == number && note.contains(text))
    }
}

impl Launcher {
    fn outcome(&mut self, now: Duration, how: How) -> Outcome {
        self.world = None;
        Outcome { how, lived: now - self.started_at, stepped: self.steps }
    }
}
