//! Jobs without faults that carry out cases of the conformance suite.

use std::time::Duration;

use drumline_conformance::{Case, on_group::Form};
use drumline_engine::Settings;
use drumline_schedule::{ALGORITHMS, Collective, Rounding, SumOrder, Topology};
use fastrand::Rng;

use crate::{
    call::PlannedCall,
    network::LinkQuality,
    process::Record,
    scenario::{GroupSetup, Instruction, Scenario, leaves_slices},
    simulation::Simulation,
    summary::{RunSummary, caught},
    time::{TIMEOUT, WARN_AFTER},
};

/// The hosts on which the ranks of a job are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// All ranks share the memory of one host.
    OneHost,
    /// This number of hosts, filled in the order of ranks. The ranks of a host share memory.
    Hosts(usize),
    /// Ranks share no memory, and the topology has no hosts.
    Flat,
}

/// Cases that all ranks carry out one after another. Many or long cases are spread over several
/// groups.
#[derive(Clone, Debug)]
pub struct ConformanceJob<'a> {
    /// Number of ranks.
    pub world_size: usize,
    /// The hosts of the ranks.
    pub place: Place,
    /// The order in which ranks sum.
    pub sum_order: SumOrder,
    /// Where they round sums of narrow floats.
    pub rounding: Rounding,
    /// The algorithm of all-reduces; see [`Settings::all_reduce`].
    pub all_reduce: Option<&'a str>,
    /// The form of all calls. Asynchronous calls of a group are in flight at the same time.
    pub form: Form,
    /// The cases.
    pub cases: &'a [Case],
}

impl ConformanceJob<'_> {
    /// Runs the job and compares every result with the oracle's.
    ///
    /// # Errors
    ///
    /// The first check that fails.
    pub fn run(&self) -> Result<RunSummary, String> {
        let of_groups = self.simulate(|simulation| (simulation.events, simulation.now))?;
        let (events, times): (Vec<u64>, Vec<u64>) = of_groups.into_iter().unzip();
        let (events, virtual_ns) = (events.iter().sum(), times.iter().sum());
        Ok(RunSummary { fault: false, events, virtual_ns })
    }

    /// Like [`ConformanceJob::run`]. Returns the digest of every result of every rank, with its
    /// case.
    ///
    /// # Errors
    ///
    /// The first check that fails.
    pub fn digests(&self) -> Result<Vec<(Case, u64)>, String> {
        let of_groups = self.simulate(|simulation| {
            let records = simulation.processes.iter().flat_map(|process| &process.records);
            let digest = |record: &Record| {
                let case = simulation.scenario.calls[record.call()?].case;
                Some((case, case.digest(record.bytes()?)))
            };
            records.filter_map(digest).collect::<Vec<_>>()
        })?;
        Ok(of_groups.into_iter().flatten().collect())
    }

    fn simulate<R>(&self, look: impl Fn(&Simulation) -> R) -> Result<Vec<R>, String> {
        let job = |cases: &[Case]| {
            let simulation = Simulation::run(Rng::with_seed(0), self.scenario(cases), false)?;
            simulation.check()?;
            Ok(look(&simulation))
        };
        let named = |problem| format!("{}: {problem}", self.name());
        let groups = self.groups().into_iter();
        groups.map(|cases| caught(|| job(cases)).map_err(named)).collect()
    }

    /// The cases of each group. A group keeps all its buffers to its end, so that a write after the
    /// end of a call is noticed.
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

    /// Bytes of the longest buffer of a rank.
    fn bytes(&self, case: &Case) -> usize {
        let blocks = if case.kind.has_blocks() { self.world_size } else { 1 };
        case.elements * case.dtype.size() * blocks
    }

    /// A description of the job, without its cases.
    pub fn name(&self) -> String {
        let ConformanceJob { world_size, place, sum_order, rounding, all_reduce, form, .. } = self;
        let algorithm = all_reduce.unwrap_or("the best algorithm");
        format!(
            "{world_size} ranks, {place:?}, {sum_order:?}, rounded {rounding}, {algorithm}, {form:?}"
        )
    }

    /// Whether any ranks share memory. Only then can buffers be registered.
    pub fn shares_memory(&self) -> bool {
        self.topology().ranks_by_host().iter().any(|ranks| ranks.len() > 1)
    }

    /// Where the ranks are, and the order in which they sum.
    pub fn topology(&self) -> Topology {
        let topology = match self.place {
            Place::Flat => Topology::flat(self.world_size),
            _ => Topology::placed(self.hosts()),
        };
        topology.with_order(self.sum_order).with_rounding(self.rounding)
    }

    /// Whether some algorithm can carry out the case. None sums blocks by placement if the ranks of a host are no
    /// node of the tree.
    pub fn serves(&self, case: &Case) -> bool {
        let topology = self.topology();
        let collective = case.kind.collective();
        match collective {
            Collective::ReduceSlices => leaves_slices(&topology, case.dtype),
            _ => {
                let mut rows = ALGORITHMS.iter().filter(|row| row.collective == collective);
                rows.any(|row| (row.applies)(&topology))
            }
        }
    }

    fn hosts(&self) -> Vec<usize> {
        let hosts = match self.place {
            Place::OneHost => 1,
            Place::Hosts(hosts) => hosts.min(self.world_size),
            Place::Flat => self.world_size,
        };
        (0..self.world_size).map(|rank| rank * hosts / self.world_size).collect()
    }

    fn scenario(&self, cases: &[Case]) -> Scenario {
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
        let calls: Vec<_> =
            cases.map(|&case| PlannedCall { group: 0, case, form: self.form }).collect();
        let blocking = self.form != Form::Async;
        let call = |call| Instruction::Call { call, blocking };
        let end = [Instruction::Wait { group: 0 }, Instruction::Close { group: 0 }];
        let program: Vec<_> = (0..calls.len()).map(call).chain(end).collect();
        let (topology, arena_bytes) = (self.topology(), 2 * GROUP_BYTES);
        Scenario {
            world_size: self.world_size,
            host_of: self.hosts(),
            groups: vec![GroupSetup {
                topology,
                settings,
                sum_order: self.sum_order,
                streams: 1 + self.world_size % 2,
                block_bytes: 1000,
                slot_bytes,
                arena_bytes,
            }],
            calls,
            messages: vec![],
            programs: vec![program; self.world_size],
            fault: None,
            launched: false,
            goes_on: false,
            near: NETWORK,
            far: NETWORK,
        }
    }
}

/// The most calls of a group, and the most bytes of its results on one rank. A single call may have
/// more bytes.
const GROUP_CALLS: usize = 300;
const GROUP_BYTES: usize = 32 << 20;

/// Bytes of slots and windows: a block of 1,024 `f32` just fits.
const PIECE_BYTES: usize = 4096;

/// For long buffers, windows and slots grow so that there are about this many at most.
const PIECES_MAX: usize = 32;

/// Bytes are torn but hardly late: late bytes are tested by seeds.
const NETWORK: LinkQuality = LinkQuality {
    latency_ns: 1_000,
    jitter_ns: 1_000,
    ns_per_byte: 0,
    capacity: 64 << 10,
    stalls_percent: 0,
};
