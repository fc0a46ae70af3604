//! Jobs without faults: chosen cases on chosen transports.

use std::time::Duration;

use drumline_conformance::{Case, on_group::Form};
use drumline_engine::Settings;
use drumline_schedule::SumOrder;
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

/// Collectives that all ranks of one group call, one after another: in several groups if they are
/// many or long.
#[derive(Clone, Debug)]
pub struct Job<'a> {
    /// How many ranks there are.
    pub world_size: usize,
    /// Where they are.
    pub place: Place,
    /// In which order they sum.
    pub sum_order: SumOrder,
    /// The algorithm of all-reduces; see [`Settings::all_reduce`].
    pub all_reduce: Option<&'a str>,
    /// How all calls are made. Asynchronous ones of a group are all under way at the same time.
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
        let of_groups = self.simulate(|simulation| (simulation.events, simulation.now))?;
        let (events, times): (Vec<u64>, Vec<u64>) = of_groups.into_iter().unzip();
        let (events, virtual_ns) = (events.iter().sum(), times.iter().sum());
        Ok(Summary { fault: false, events, virtual_ns })
    }

    /// Runs the job and compares every result with the oracle's. Returns the digest of every
    /// result of every rank, with its case.
    ///
    /// # Errors
    ///
    /// The first thing that is wrong.
    pub fn digests(&self) -> Result<Vec<(Case, u64)>, String> {
        let of_groups = self.simulate(|simulation| {
            let records = simulation.processes.iter().flat_map(|process| &process.records);
            let digest = |record: &Record| {
                let case = simulation.plan.calls[record.call()?].case;
                Some((case, case.digest(record.bytes()?)))
            };
            records.filter_map(digest).collect::<Vec<_>>()
        })?;
        Ok(of_groups.into_iter().flatten().collect())
    }

    fn simulate<R>(&self, look: impl Fn(&Simulation) -> R) -> Result<Vec<R>, String> {
        let job = |cases: &[Case]| {
            let simulation = Simulation::run(Rng::with_seed(0), self.plan(cases), false)?;
            simulation.check()?;
            Ok(look(&simulation))
        };
        let named = |problem| format!("{}: {problem}", self.name());
        let groups = self.groups().into_iter();
        groups.map(|cases| caught(|| job(cases)).map_err(named)).collect()
    }

    /// The cases of each group. All buffers of a group are kept to its end, to see whether somebody
    /// still writes to them.
    fn groups(&self) -> Vec<&[Case]> {
        let mut groups = Vec::new();
        let mut rest = self.cases;
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = |case: &&Case| {
                bytes += self.bytes(case);
                bytes <= GROUP_BYTES
            };
            let count = rest.iter().take(GROUP_CALLS).take_while(fits).count().max(1);
            let (group, others) = rest.split_at(count);
            groups.push(group);
            rest = others;
        }
        groups
    }

    /// What one buffer of a rank takes at most.
    fn bytes(&self, case: &Case) -> usize {
        let blocks = if case.kind.has_blocks() { self.world_size } else { 1 };
        case.elements * case.dtype.size() * blocks
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

    fn plan(&self, cases: &[Case]) -> Plan {
        let longest = cases.iter().map(|case| self.bytes(case)).max().unwrap_or(0);
        let piece_bytes = (longest / PIECES_MAX).next_multiple_of(PIECE_BYTES).max(PIECE_BYTES);
        let settings = Settings {
            timeout: Duration::from_nanos(TIMEOUT),
            warn_after: Duration::from_nanos(WARN_AFTER),
            all_reduce: self.all_reduce.map(str::to_owned),
            window_bytes: piece_bytes,
            ..Settings::default()
        };
        let slot_bytes = self.shares_memory().then_some(piece_bytes);
        let cases = cases.iter().filter(|case| self.form.is_of(case.kind));
        let calls: Vec<_> = cases.map(|&case| Call { group: 0, case, form: self.form }).collect();
        let blocking = self.form != Form::Async;
        let call = |call| Instruction::Call { call, blocking };
        let end = [Instruction::Wait { group: 0 }, Instruction::Close { group: 0 }];
        let script: Vec<_> = (0..calls.len()).map(call).chain(end).collect();
        let group = Group {
            topology: self.topology(),
            settings,
            sum_order: self.sum_order,
            streams: 1 + self.world_size % 2,
            block_bytes: 1000,
            slot_bytes,
            arena_bytes: 2 * GROUP_BYTES,
        };
        Plan {
            world_size: self.world_size,
            host_of: self.hosts(),
            groups: vec![group],
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

/// How many calls are made in a group at most, and how long the buffers of a rank are that hold
/// their results, unless it is a single call.
const GROUP_CALLS: usize = 300;
const GROUP_BYTES: usize = 32 << 20;

/// Slots and windows: blocks of 1,024 `f32` just fit.
const PIECE_BYTES: usize = 4096;

/// Longer buffers take no more windows and slots than about so many: these are larger.
const PIECES_MAX: usize = 32;

/// Messages are torn, but not for long: how bytes may come late is up to the seeds.
const NETWORK: Quality = Quality {
    latency_ns: 1_000,
    jitter_ns: 1_000,
    ns_per_byte: 0,
    capacity: 64 << 10,
    stalls_percent: 0,
};
