//! Jobs without faults: chosen cases on chosen transports.

use std::time::Duration;

use drumline::{Config, SumOrder};
use drumline_conformance::{Case, on_group::Form};
use drumline_schedule::Topology;
use fastrand::Rng;

use crate::{
    Summary,
    call::Call,
    caught,
    network::Quality,
    plan::{Group, Instruction, Plan, TIMEOUT, WARN_AFTER},
    process::Record,
    simulation::Simulation,
};

/// Where the ranks of a job are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// On one host: they share memory.
    OneHost,
    /// On so many hosts, in the order of ranks: those of a host share memory.
    Hosts(usize),
    /// They share no memory, and know nothing of hosts.
    Flat,
}

/// Collectives that all ranks of one group call, one after another.
#[derive(Clone, Debug)]
pub struct Job<'a> {
    /// How many ranks there are.
    pub world_size: usize,
    /// Where they are.
    pub place: Place,
    /// In which order they sum.
    pub sum_order: SumOrder,
    /// The algorithm of all-reduces; see [`Config::all_reduce`].
    pub all_reduce: Option<&'a str>,
    /// How all calls are made. Asynchronous ones are all under way at the same time.
    pub form: Form,
    /// What is called.
    pub cases: &'a [Case],
}

impl Job<'_> {
    /// Runs the job and compares every result with the oracle's.
    ///
    /// # Errors
    ///
    /// The first thing that is wrong.
    pub fn run(&self) -> Result<Summary, String> {
        self.simulate(|simulation| Summary {
            fault: false,
            events: simulation.events,
            virtual_ns: simulation.now,
        })
    }

    /// Runs the job and compares every result with the oracle's. Returns the digest of every
    /// result of every rank, with its case.
    ///
    /// # Errors
    ///
    /// The first thing that is wrong.
    pub fn digests(&self) -> Result<Vec<(Case, u64)>, String> {
        self.simulate(|simulation| {
            let records = simulation.processes.iter().flat_map(|process| &process.records);
            let digest = |record: &Record| {
                let case = simulation.plan.calls[record.call()?].case;
                Some((case, case.digest(record.bytes()?)))
            };
            records.filter_map(digest).collect()
        })
    }

    fn simulate<R>(&self, look: impl FnOnce(&Simulation) -> R) -> Result<R, String> {
        let job = || {
            let simulation = Simulation::run(Rng::with_seed(0), self.plan(), false)?;
            simulation.check()?;
            Ok(look(&simulation))
        };
        caught(job).map_err(|problem| format!("{}: {problem}", self.name()))
    }

    /// Who runs it, and how.
    pub fn name(&self) -> String {
        let Job { world_size, place, sum_order, all_reduce, form, .. } = self;
        let algorithm = all_reduce.unwrap_or("the best algorithm");
        format!("{world_size} ranks, {place:?}, {sum_order:?}, {algorithm}, {form:?}")
    }

    /// Whether neighbours can reach a rank's memory, so that there may be registered buffers.
    pub fn shares_memory(&self) -> bool {
        self.topology().ranks_by_host().iter().any(|ranks| ranks.len() > 1)
    }

    /// Who is where.
    pub fn topology(&self) -> Topology {
        let topology = match self.place {
            Place::Flat => Topology::flat(self.world_size),
            _ => Topology::placed(self.hosts()),
        };
        topology.with_order(self.sum_order)
    }

    fn hosts(&self) -> Vec<usize> {
        let hosts = match self.place {
            Place::OneHost => 1,
            Place::Hosts(hosts) => hosts.min(self.world_size),
            Place::Flat => self.world_size,
        };
        (0..self.world_size).map(|rank| rank * hosts / self.world_size).collect()
    }

    fn plan(&self) -> Plan {
        let config = Config {
            timeout: Duration::from_nanos(TIMEOUT),
            warn_after: Duration::from_nanos(WARN_AFTER),
            all_reduce: self.all_reduce.map(str::to_owned),
            sum_order: self.sum_order,
            window_bytes: WINDOW_BYTES,
            ..Config::default()
        };
        let slot_bytes = self.shares_memory().then_some(SLOT_BYTES);
        let cases = self.cases.iter().filter(|case| self.form.is_of(case.kind));
        let registered = self.form == Form::Registered;
        let calls: Vec<_> = cases.map(|&case| Call { group: 0, case, registered }).collect();
        let blocking = self.form != Form::Async;
        let call = |call| Instruction::Call { call, blocking };
        let end = [Instruction::Wait { group: 0 }, Instruction::Close { group: 0 }];
        let script: Vec<_> = (0..calls.len()).map(call).chain(end).collect();
        let (topology, arena_bytes) = (self.topology(), 64 << 20);
        Plan {
            world_size: self.world_size,
            host_of: self.hosts(),
            groups: vec![Group { topology, config, slot_bytes, arena_bytes }],
            calls,
            messages: vec![],
            scripts: vec![script; self.world_size],
            fault: None,
            launched: false,
            goes_on: false,
            near: NETWORK,
            far: NETWORK,
        }
    }
}

/// Blocks of 1,024 `f32` just fit.
const SLOT_BYTES: usize = 4096;

/// The longest cases take several windows.
const WINDOW_BYTES: usize = 4096;

/// Messages are torn, but not for long: how bytes may come late is up to the seeds.
const NETWORK: Quality = Quality {
    latency_ns: 1_000,
    jitter_ns: 1_000,
    ns_per_byte: 0,
    capacity: 64 << 10,
    stalls_percent: 0,
};
