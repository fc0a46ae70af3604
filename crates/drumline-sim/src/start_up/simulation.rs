//! The start-up of a job, one event after another.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, BinaryHeap},
    sync::{Arc, atomic::AtomicU64},
};

use drumline_engine::start_up::Failure;
use fastrand::Rng;

use super::{
    action::Action,
    client::{ActionOutcome, Client},
    mesh::Sockets,
    rank::{Outcome, RankPlan},
    scenario::{StartUpFault, StartUpScenario},
    script::Program,
    shared_state::{STORE, SharedState},
    store_process::StoreProcess,
};
use crate::{
    network::{Network, PipeEnd, lock},
    scenario::Scenario,
    time::{MS, Nanos, SECOND},
};

/// The counts of a start-up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StartUpSummary {
    /// Whether the job can begin.
    pub(crate) complete: bool,
    /// Number of requests that the store carried out.
    pub(crate) requests: u64,
    pub(crate) events: u64,
    pub(crate) virtual_ns: Nanos,
}

/// Runs the start-up of a job and checks it.
pub(crate) fn run(rng: &mut Rng, job: &Scenario, trace: bool) -> Result<StartUpSummary, String> {
    let scenario = StartUpScenario::new(rng, job);
    StartUpSimulation::new(rng.fork(), &scenario, trace).run()
}

/// Like [`run`], without other programs and without faults.
pub(crate) fn run_undisturbed(rng: &mut Rng, job: &Scenario) -> Result<StartUpSummary, String> {
    let scenario = StartUpScenario::undisturbed(rng, job);
    StartUpSimulation::new(rng.fork(), &scenario, false).run()
}

struct StartUpSimulation<'p> {
    scenario: &'p StartUpScenario,
    shared: SharedState,
    store: StoreProcess,
    clients: Vec<Client<'p>>,
    queue: BinaryHeap<Reverse<(Nanos, u64, StartUpEvent)>>,
    /// When the next step of each process is scheduled.
    looks: Vec<Option<Nanos>>,
    /// The fault that struck.
    struck: Option<StartUpFault>,
    /// When it struck.
    struck_at: Nanos,
    events: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum StartUpEvent {
    Step(usize),
    Fault,
    Cut(usize),
    StoreStops,
}

/// Limit on events: more than any start-up needs.
const EVENTS_MAX: u64 = 3_000_000;
const TIME_MAX: Nanos = 600 * SECOND;

impl<'p> StartUpSimulation<'p> {
    fn new(rng: Rng, scenario: &'p StartUpScenario, trace: bool) -> StartUpSimulation<'p> {
        let names = scenario.scripts.iter().map(|script| script.name.clone());
        let shared = SharedState {
            network: Network::new(trace),
            rng,
            transcripts: Vec::new(),
            dials: Vec::new(),
            store_answers: true,
            store_killed: Arc::new(AtomicU64::new(0)),
            sockets: Sockets::default(),
            names: std::iter::once("the store".to_owned()).chain(names).collect(),
        };
        let clients = scenario.scripts.iter().enumerate();
        let clients = clients.map(|(at, script)| Client::new(at + 1, script));
        StartUpSimulation {
            scenario,
            shared,
            store: StoreProcess::default(),
            clients: clients.collect(),
            queue: BinaryHeap::new(),
            looks: vec![None; scenario.scripts.len() + 1],
            struck: None,
            struck_at: 0,
            events: 0,
        }
    }

    fn run(mut self) -> Result<StartUpSummary, String> {
        self.run_to_end()?;
        self.check()?;
        Ok(StartUpSummary {
            complete: self.struck.is_none(),
            requests: self.store.requests,
            events: self.events,
            virtual_ns: self.shared.now(),
        })
    }

    fn schedule(&mut self, at: Nanos, event: StartUpEvent) {
        let tie = self.shared.rng.u64(..);
        self.queue.push(Reverse((at, tie, event)));
    }

    fn run_to_end(&mut self) -> Result<(), String> {
        for (at, script) in self.scenario.scripts.iter().enumerate() {
            self.schedule(script.starts_at, StartUpEvent::Step(at + 1));
        }
        for (at, client) in &self.scenario.cuts {
            self.schedule(*at, StartUpEvent::Cut(*client));
        }
        if let Some((at, _)) = self.scenario.fault {
            self.schedule(at, StartUpEvent::Fault);
        }
        if let Some((at, _)) = self.scenario.store_stops {
            self.schedule(at, StartUpEvent::StoreStops);
        }
        while let Some(Reverse((at, _, event))) = self.queue.pop() {
            let now = self.shared.now().max(at);
            self.shared.network.set_now(now);
            self.events += 1;
            if self.events > EVENTS_MAX || now > TIME_MAX {
                break;
            }
            match event {
                StartUpEvent::Step(STORE) => self.step_store()?,
                StartUpEvent::Step(process) => self.step_client(process)?,
                StartUpEvent::Cut(client) => self.cut(client),
                StartUpEvent::Fault => self.strike(),
                StartUpEvent::StoreStops => {
                    if let Some((_, time)) = self.scenario.store_stops {
                        self.shared.note(|| "the store: is stopped".to_owned());
                        self.store.stopped_until = now + time;
                    }
                }
            }
            let ranks = std::mem::take(&mut self.shared.sockets.wakes).into_iter();
            let ranks = ranks.map(|(at, rank)| (at, rank + 1));
            for (at, process) in self.shared.network.take_wakes().into_iter().chain(ranks) {
                self.schedule(at, StartUpEvent::Step(process));
            }
        }
        match self.clients.iter().find(|client| !client.ended) {
            None => Ok(()),
            Some(client) => Err(format!("{} hangs, using the store", client.script.name)),
        }
    }

    fn step_store(&mut self) -> Result<(), String> {
        let now = self.shared.now();
        if self.store.ended {
            return Ok(());
        }
        if self.looks[STORE].is_some_and(|at| at <= now) {
            self.looks[STORE] = None;
        }
        let resumes = self.store.stopped_until.max(self.store.busy_until);
        let next = match now < resumes {
            true => Some(resumes),
            false => {
                let more = self.store.step(&mut self.shared)?;
                self.store.busy_until = now + self.shared.rng.u64(500..5_000);
                more.then_some(self.store.busy_until)
            }
        };
        self.look_again(STORE, next);
        Ok(())
    }

    fn look_again(&mut self, process: usize, next: Option<Nanos>) {
        if let Some(at) = next.filter(|at| self.looks[process].is_none_or(|next| *at < next)) {
            self.looks[process] = Some(at);
            self.schedule(at, StartUpEvent::Step(process));
        }
    }

    fn step_client(&mut self, process: usize) -> Result<(), String> {
        let now = self.shared.now();
        if self.looks[process].is_some_and(|at| at <= now) {
            self.looks[process] = None;
        }
        let client = &mut self.clients[process - 1];
        let next = client.step(&mut self.shared);
        let next = next.map_err(|bad| format!("{}: {bad}", client.script.name))?;
        self.look_again(process, next);
        for (at, transcript, stream) in std::mem::take(&mut self.shared.dials) {
            self.schedule(at, StartUpEvent::Step(STORE));
            self.store.callers.push((at, transcript, stream));
        }
        Ok(())
    }

    /// Breaks the connection of a client, if it has one.
    fn cut(&mut self, client: usize) {
        let Some(transcript) = self.clients[client].transcript() else { return };
        self.shared.note(|| format!("{}: its connection breaks", self.clients[client].script.name));
        let end = if self.shared.rng.bool() { PipeEnd::Reset } else { PipeEnd::Closed };
        let transcript = &mut self.shared.transcripts[transcript];
        transcript.doomed = true;
        transcript.pipes.iter().for_each(|pipe| lock(pipe).cut(&self.shared.network, end));
    }

    fn strike(&mut self) {
        let Some((_, fault)) = self.scenario.fault else { return };
        let victims = match fault {
            StartUpFault::StoreCrash | StartUpFault::StoreSilent(_) => 0..self.scenario.ranks,
            StartUpFault::RankCrash(rank) | StartUpFault::RankCut(rank) => rank..rank + 1,
        };
        // A fault cannot hit ranks that have ended, nor break a connection that is not open.
        let victims = &self.clients[victims];
        let connected =
            !matches!(fault, StartUpFault::RankCut(_)) || victims[0].transcript().is_some();
        if !connected || victims.iter().all(|client| client.ended) {
            return;
        }
        self.shared.note(|| format!("FAULT {fault:?}"));
        (self.struck, self.struck_at) = (Some(fault), self.shared.now());
        match fault {
            StartUpFault::StoreCrash => {
                self.shared.store_answers = false;
                self.store.end();
            }
            StartUpFault::StoreSilent(keepalive) => {
                self.shared.store_answers = false;
                for transcript in &self.shared.transcripts {
                    let noticed = self.shared.now() + keepalive + self.shared.rng.u64(0..100 * MS);
                    let silence = |pipe| lock(pipe).fall_silent(&self.shared.network, noticed);
                    transcript.pipes.iter().for_each(silence);
                }
                self.store.end();
            }
            StartUpFault::RankCrash(rank) => self.clients[rank].die(&mut self.shared),
            StartUpFault::RankCut(rank) => self.cut(rank),
        }
    }

    /// Checks what must hold after every start-up, whichever fault struck.
    fn check(&mut self) -> Result<(), String> {
        for (number, transcript) in self.shared.transcripts.iter().enumerate() {
            transcript.check().map_err(|bad| format!("{}: {bad}", self.shared.whose(number)))?;
        }
        for client in &self.clients {
            for (action, outcome) in &client.outcomes {
                self.check_outcome(client, action, outcome).map_err(|bad| {
                    format!("{}: {bad}: {action:?} gave {outcome:?}", client.script.name)
                })?;
            }
        }
        self.check_ranks()?;
        match self.store.ended {
            true => Ok(()),
            false => self.store.check_at_end(&mut self.shared),
        }
    }

    fn check_outcome(
        &self,
        client: &Client<'_>,
        action: &Action,
        outcome: &ActionOutcome,
    ) -> Result<(), String> {
        let store_failed =
            matches!(self.struck, Some(StartUpFault::StoreCrash | StartUpFault::StoreSilent(_)));
        let is_rank = client.process <= self.scenario.ranks;
        let may_be = match outcome {
            ActionOutcome::Done => true,
            ActionOutcome::Missing(keys) => {
                let Action::Wait { keys: asked, .. } = action else {
                    return Err("no wait".to_owned());
                };
                !keys.is_empty() && keys.iter().all(|key| asked.contains(key))
            }
            ActionOutcome::Alone(_) => is_rank,
            ActionOutcome::Lost { transcript } => {
                store_failed || self.shared.transcripts[*transcript].doomed
            }
            ActionOutcome::NoStore => store_failed,
            ActionOutcome::NoAnswer => {
                store_failed || matches!(action, Action::Ask { may_be_in_vain: true, .. })
            }
        };
        match may_be {
            true => Ok(()),
            false => Err("nothing explains this".to_owned()),
        }
    }

    /// Checks that a rank fails soon after the process of another one has ended.
    fn check_haste(&self, client: &Client<'_>, plan: &RankPlan) -> Result<(), String> {
        let Some(StartUpFault::RankCrash(victim)) = self.struck else { return Ok(()) };
        let is_told = plan.rank != victim
            && plan.sees_all()
            && matches!(client.result(), Some(Err(_)))
            && self.clients[victim].has_shown_itself();
        let stopped = self.scenario.store_stops.map_or(0, |(_, time)| time);
        let took = client.ended_at.saturating_sub(self.struck_at.max(client.script.starts_at));
        let within = if plan.is_alone() { TOLD_WITHIN } else { TOLD_FAR_WITHIN };
        match is_told && took > within + stopped {
            true => Err(format!("is told of the end of rank {victim} after {} ms", took / MS)),
            false => Ok(()),
        }
    }

    /// Checks what every rank has learned, or whom its error blames.
    fn check_ranks(&self) -> Result<(), String> {
        let results = self.clients[..self.scenario.ranks].iter();
        let joined = |result: &Option<&Outcome>| match result {
            Some(Ok(joined)) => Some(joined.secret.clone()),
            _ => None,
        };
        let results: Vec<Option<&Outcome>> = results.map(Client::result).collect();
        let host_waits = matches!(results.first(), Some(Some(Err(Failure::Outside(_)))));
        let secret = results.iter().find_map(joined).unwrap_or_default();
        for (client, result) in self.clients.iter().zip(results) {
            let Program::Rank(plan, _) = &client.script.program else { continue };
            let right = match (result, self.struck) {
                (Some(Ok(joined)), _) => plan.check(joined, &secret),
                (Some(Err(failure)), None) => {
                    Err(format!("fails although nothing is wrong: {failure:?}"))
                }
                (None, Some(StartUpFault::RankCrash(victim))) if victim == plan.rank => Ok(()),
                (None, _) => Err("neither starts up nor fails".to_owned()),
                (Some(Err(Failure::Outside(_))), _) => Ok(()),
                (Some(Err(Failure::Ended(rank) | Failure::Refused(rank, _))), Some(fault)) => {
                    check_ended(plan, *rank, fault, host_waits)
                }
                (Some(Err(Failure::Connect(problem))), Some(fault)) => {
                    check_blame(problem, fault, host_waits)
                }
            };
            let right = right.and_then(|()| self.check_haste(client, plan));
            right.map_err(|bad| format!("{}: {bad}", client.script.name))?;
        }
        Ok(())
    }
}

/// Checks that an error blames the rank whose process has ended. Rank 0 ends without a word to the others if it has waited
/// in vain for the struck rank to join the job.
fn check_ended(
    plan: &RankPlan,
    rank: usize,
    fault: StartUpFault,
    host_waits: bool,
) -> Result<(), String> {
    let is_right = match fault {
        StartUpFault::RankCrash(victim) | StartUpFault::RankCut(victim) => {
            rank == victim || (rank == 0 && host_waits)
        }
        StartUpFault::StoreCrash | StartUpFault::StoreSilent(_) => plan.hosts_store(rank),
    };
    match is_right {
        true => Ok(()),
        false => Err(format!("says that the process of rank {rank} has ended")),
    }
}

/// How long it may take until all know that the process of a rank has ended, on one host and on several: there a rank whose
/// sign was never reached has time to object.
const TOLD_WITHIN: Nanos = SECOND;
const TOLD_FAR_WITHIN: Nanos = 2 * SECOND;

/// Checks that an error blames the rank that a fault has struck, and no other. It may also blame rank 0, if
/// rank 0 still waits for the struck rank to join the job and therefore has not come to the group.
fn check_blame(problem: &str, fault: StartUpFault, host_waits: bool) -> Result<(), String> {
    let (StartUpFault::RankCrash(victim) | StartUpFault::RankCut(victim)) = fault else {
        return Ok(());
    };
    // A rank that learns of a failure from another rank repeats whom that rank blames.
    let blamed = problem.rsplit("it has failed: ").next().unwrap_or(problem);
    let named = blamed
        .split("rank ")
        .skip(1)
        .filter_map(|rest| rest.split(|c: char| !c.is_ascii_digit()).next()?.parse::<usize>().ok());
    // `rank(s) [1, 2] did not connect in time`
    let list = blamed.split_once("rank(s) [").and_then(|(_, rest)| rest.split_once(']'));
    let listed = list.map_or("", |(list, _)| list).split(", ").filter_map(|it| it.parse().ok());
    let blamed: BTreeSet<usize> = named.chain(listed).collect();
    let may_blame = |rank: &usize| *rank == victim || (*rank == 0 && host_waits);
    match blamed.contains(&victim) && blamed.iter().all(may_blame) {
        true => Ok(()),
        false => Err(format!("blames {blamed:?}, not {victim}: {problem}")),
    }
}
