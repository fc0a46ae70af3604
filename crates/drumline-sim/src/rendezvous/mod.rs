//! How a job starts up: ranks meet through a store, on virtual time, before their groups begin.
//!
//! The real server runs here, and the real client's way to wait; ranks ask what they ask between
//! `rendezvous` and the end of `ProcessGroup::connect`. Other programs make any calls beside
//! them, die in the middle of one or lose their connections, and strangers send anything. Some
//! start-ups fail, because the store or a rank does; then there is no job.
//!
//! A sequential model carries out every request in the order in which the server received it. What
//! the server writes, whom it refuses and what it keeps is compared with it at every step.

mod client;
mod host;
mod model;
mod phone;
mod plan;
mod programs;
mod script;
mod start_up;
mod waiting;
mod world;

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    sync::{Arc, atomic::AtomicU64},
};

use fastrand::Rng;

use self::{
    client::{Client, Outcome},
    host::Host,
    plan::{Fault, Plan},
    script::{Bytes, Op},
    world::{HOST, World},
};
use crate::{
    network::{End, Nanos, Network, lock},
    plan::{MS, SECOND},
};

/// What a start-up was like.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Meeting {
    /// Whether the job can begin.
    pub(crate) complete: bool,
    /// How many requests the store has carried out.
    pub(crate) requests: u64,
    pub(crate) events: u64,
    pub(crate) virtual_ns: Nanos,
}

/// Runs the start-up of a job and checks it.
///
/// # Errors
///
/// What is wrong.
pub(crate) fn run(rng: &mut Rng, job: &crate::plan::Plan, trace: bool) -> Result<Meeting, String> {
    let plan = Plan::new(rng, job);
    StartUp::new(rng.fork(), &plan, trace).run()
}

/// The same, where nobody else uses the store and nothing goes wrong.
pub(crate) fn run_undisturbed(rng: &mut Rng, job: &crate::plan::Plan) -> Result<Meeting, String> {
    let plan = Plan::undisturbed(rng, job);
    StartUp::new(rng.fork(), &plan, false).run()
}

struct StartUp<'p> {
    plan: &'p Plan,
    world: World,
    host: Host,
    clients: Vec<Client<'p>>,
    queue: BinaryHeap<Reverse<(Nanos, u64, Event)>>,
    /// When each process will look again of its own accord.
    looks: Vec<Option<Nanos>>,
    /// What has kept the job from beginning.
    struck: Option<Fault>,
    events: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Step(usize),
    Fault,
    Cut(usize),
    HostStops,
}

/// More than any start-up needs.
const EVENTS_MAX: u64 = 3_000_000;
const TIME_MAX: Nanos = 600 * SECOND;

impl<'p> StartUp<'p> {
    fn new(rng: Rng, plan: &'p Plan, trace: bool) -> StartUp<'p> {
        let names = plan.scripts.iter().map(|script| script.name.clone());
        let world = World {
            network: Arc::new(Network::default()),
            rng,
            lines: Vec::new(),
            calls: Vec::new(),
            host_is_there: true,
            host_switch: Arc::new(AtomicU64::new(0)),
            names: std::iter::once("the store".to_owned()).chain(names).collect(),
            trace,
        };
        let clients = plan.scripts.iter().enumerate();
        let clients = clients.map(|(at, script)| Client::new(at + 1, script));
        StartUp {
            plan,
            world,
            host: Host::default(),
            clients: clients.collect(),
            queue: BinaryHeap::new(),
            looks: vec![None; plan.scripts.len() + 1],
            struck: None,
            events: 0,
        }
    }

    fn run(mut self) -> Result<Meeting, String> {
        self.run_to_end()?;
        self.check()?;
        Ok(Meeting {
            complete: self.struck.is_none(),
            requests: self.host.requests,
            events: self.events,
            virtual_ns: self.world.now(),
        })
    }

    fn schedule(&mut self, at: Nanos, event: Event) {
        let tie = self.world.rng.u64(..);
        self.queue.push(Reverse((at, tie, event)));
    }

    fn run_to_end(&mut self) -> Result<(), String> {
        for (at, script) in self.plan.scripts.iter().enumerate() {
            self.schedule(script.starts_at, Event::Step(at + 1));
        }
        for (at, client) in &self.plan.cuts {
            self.schedule(*at, Event::Cut(*client));
        }
        if let Some((at, _)) = self.plan.fault {
            self.schedule(at, Event::Fault);
        }
        if let Some((at, _)) = self.plan.host_stops {
            self.schedule(at, Event::HostStops);
        }
        while let Some(Reverse((at, _, event))) = self.queue.pop() {
            let now = self.world.now().max(at);
            self.world.network.set_now(now);
            self.events += 1;
            if self.events > EVENTS_MAX || now > TIME_MAX {
                break;
            }
            match event {
                Event::Step(HOST) => self.step_host()?,
                Event::Step(process) => self.step_client(process)?,
                Event::Cut(client) => self.cut(client),
                Event::Fault => self.strike(),
                Event::HostStops => {
                    if let Some((_, time)) = self.plan.host_stops {
                        self.world.note(|| "the store: is stopped".to_owned());
                        self.host.stopped_until = now + time;
                    }
                }
            }
            for (at, process) in self.world.network.take_wakes() {
                self.schedule(at, Event::Step(process));
            }
        }
        match self.clients.iter().find(|client| !client.ended) {
            None => Ok(()),
            Some(client) => Err(format!("{} hangs, using the store", client.script.name)),
        }
    }

    fn step_host(&mut self) -> Result<(), String> {
        let now = self.world.now();
        if self.host.ended {
            return Ok(());
        }
        if self.looks[HOST].is_some_and(|at| at <= now) {
            self.looks[HOST] = None;
        }
        let resumes = self.host.stopped_until.max(self.host.busy_until);
        let next = match now < resumes {
            true => Some(resumes),
            false => {
                let more = self.host.step(&mut self.world)?;
                self.host.busy_until = now + self.world.rng.u64(500..5_000);
                more.then_some(self.host.busy_until)
            }
        };
        self.look_again(HOST, next);
        Ok(())
    }

    fn look_again(&mut self, process: usize, next: Option<Nanos>) {
        if let Some(at) = next.filter(|at| self.looks[process].is_none_or(|next| *at < next)) {
            self.looks[process] = Some(at);
            self.schedule(at, Event::Step(process));
        }
    }

    fn step_client(&mut self, process: usize) -> Result<(), String> {
        let now = self.world.now();
        if self.looks[process].is_some_and(|at| at <= now) {
            self.looks[process] = None;
        }
        let client = &mut self.clients[process - 1];
        let next = client.step(&mut self.world);
        let next = next.map_err(|bad| format!("{}: {bad}", client.script.name))?;
        self.look_again(process, next);
        for (at, line, stream) in std::mem::take(&mut self.world.calls) {
            self.schedule(at, Event::Step(HOST));
            self.host.callers.push((at, line, stream));
        }
        Ok(())
    }

    /// Breaks the connection of a client, if it has one.
    fn cut(&mut self, client: usize) {
        let Some(line) = self.clients[client].line() else { return };
        self.world.note(|| format!("{}: its connection breaks", self.clients[client].script.name));
        let end = if self.world.rng.bool() { End::Reset } else { End::Closed };
        let line = &mut self.world.lines[line];
        line.doomed = true;
        line.pipes.iter().for_each(|pipe| lock(pipe).cut(&self.world.network, end));
    }

    fn strike(&mut self) {
        let Some((_, fault)) = self.plan.fault else { return };
        let victims = match fault {
            Fault::HostCrash | Fault::HostSilent(_) => 0..self.plan.ranks,
            Fault::RankCrash(rank) | Fault::RankCut(rank) => rank..rank + 1,
        };
        // Who is ready cannot be hit any more, nor can a connection break that is not there.
        let victims = &self.clients[victims];
        let connected = !matches!(fault, Fault::RankCut(_)) || victims[0].line().is_some();
        if !connected || victims.iter().all(|client| client.ended) {
            return;
        }
        self.world.note(|| format!("FAULT {fault:?}"));
        self.struck = Some(fault);
        match fault {
            Fault::HostCrash => {
                self.world.host_is_there = false;
                self.host.end();
            }
            Fault::HostSilent(keepalive) => {
                self.world.host_is_there = false;
                for line in &self.world.lines {
                    let noticed = self.world.now() + keepalive + self.world.rng.u64(0..100 * MS);
                    let silence = |pipe| lock(pipe).fall_silent(&self.world.network, noticed);
                    line.pipes.iter().for_each(silence);
                }
                self.host.end();
            }
            Fault::RankCrash(rank) => self.clients[rank].die(),
            Fault::RankCut(rank) => self.cut(rank),
        }
    }

    /// What must hold after every start-up, whatever went wrong in it.
    fn check(&mut self) -> Result<(), String> {
        for (number, line) in self.world.lines.iter().enumerate() {
            line.check().map_err(|bad| format!("{}: {bad}", self.world.whose(number)))?;
        }
        for client in &self.clients {
            for (op, outcome) in client.script.ops.iter().zip(&client.outcomes) {
                self.check_outcome(client, op, outcome).map_err(|bad| {
                    format!("{}: {bad}: {op:?} gave {outcome:?}", client.script.name)
                })?;
            }
        }
        match self.host.ended {
            true => Ok(()),
            false => self.host.check_at_end(&mut self.world),
        }
    }

    fn check_outcome(&self, client: &Client<'_>, op: &Op, outcome: &Outcome) -> Result<(), String> {
        let store_failed = matches!(self.struck, Some(Fault::HostCrash | Fault::HostSilent(_)));
        let is_rank = client.process <= self.plan.ranks;
        if is_rank && *outcome != Outcome::Done && self.struck.is_none() {
            return Err("an error although nothing is wrong".to_owned());
        }
        let may_be = match outcome {
            Outcome::Done => true,
            Outcome::Missing(keys) if is_rank => keys.iter().all(|key| self.is_missing(key)),
            Outcome::Missing(keys) => {
                let Op::Wait { keys: asked, .. } = op else { return Err("no wait".to_owned()) };
                !keys.is_empty() && keys.iter().all(|key| asked.contains(key))
            }
            Outcome::Alone(_) => is_rank,
            Outcome::Lost { line } => store_failed || self.world.lines[*line].doomed,
            Outcome::NoStore => store_failed,
            Outcome::NoAnswer => store_failed || matches!(op, Op::Ask { may_be_in_vain: true, .. }),
        };
        match may_be {
            true => Ok(()),
            false => Err("nothing explains this".to_owned()),
        }
    }

    /// Whether a rank that did not come through should have set this key.
    fn is_missing(&self, key: &Bytes) -> bool {
        let name = String::from_utf8_lossy(&key.0);
        let name = name.rsplit('/').next().unwrap_or_default();
        // What has no number comes from rank 0.
        let rank = name.parse::<usize>().unwrap_or(0);
        self.clients.get(rank).is_some_and(|client| {
            let all = client.outcomes.len() == client.script.ops.len();
            !all || client.outcomes.iter().any(|outcome| *outcome != Outcome::Done)
        })
    }
}
