//! Jobs of many ranks without faults, which show how start-up and connections scale.
//!
//! The ranks meet in the store, carry out their tasks and close their group.

use std::time::Duration;

use drumline_conformance::{Case, Kind, on_group::Form};
use drumline_engine::{DType, ReduceOp, Settings};
use drumline_schedule::{
    Collective, SumOrder, Topology,
    price::{ElementKind, Prices, choose},
};
use fastrand::Rng;

use crate::{
    call::PlannedCall,
    network::LinkQuality,
    scenario::{GroupSetup, Instruction, Scenario},
    simulation::Simulation,
    start_up,
    time::{MS, TIMEOUT, WARN_AFTER},
};

/// What all ranks of a large job do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// A barrier.
    Barrier,
    /// A sum of `f32`.
    AllReduce {
        /// Number of elements.
        elements: usize,
    },
}

/// The counts and the time of a large job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LargeSummary {
    /// Number of requests that the store carried out during start-up.
    pub requests: u64,
    /// Number of links between ranks of different hosts.
    pub links: usize,
    /// Number of simulated events.
    pub events: u64,
    /// Virtual time from start to end, in nanoseconds.
    pub virtual_ns: u64,
}

/// Runs a job of `hosts` times `ranks_per_host` ranks. The ranks of a host share memory.
///
/// # Errors
///
/// What failed: a rank hung, failed or has a wrong result.
pub fn run(
    hosts: usize,
    ranks_per_host: usize,
    tasks: &[Task],
    seed: u64,
) -> Result<LargeSummary, String> {
    let world_size = hosts * ranks_per_host;
    let host_of: Vec<usize> = (0..world_size).map(|rank| rank / ranks_per_host).collect();
    let topology = Topology::placed(host_of.clone());
    let call = |task: &Task| {
        let (kind, dtype, elements) = match *task {
            Task::Barrier => (Kind::Barrier, DType::U8, 0),
            Task::AllReduce { elements } => (Kind::AllReduce(ReduceOp::Sum), DType::F32, elements),
        };
        let case = Case { kind, dtype, elements, uneven: false, seed };
        PlannedCall { group: 0, case, form: Form::Blocking }
    };
    let calls: Vec<PlannedCall> = tasks.iter().map(call).collect();
    let each = (0..calls.len()).map(|call| Instruction::Call { call, blocking: true });
    let program: Vec<_> = each.chain([Instruction::Close { group: 0 }]).collect();
    // Every rank would choose this algorithm, but at this size each choice takes long.
    let longest = tasks.iter().filter_map(|task| match *task {
        Task::AllReduce { elements } => Some(elements),
        Task::Barrier => None,
    });
    let all_reduce = longest.max().and_then(|elements| {
        let f32 = ElementKind { bytes: 4, sum_bytes: 4 };
        choose(Collective::AllReduce, &topology, elements, f32, &Prices::TCP)
    });
    let settings = Settings {
        all_reduce: all_reduce.map(|algorithm| algorithm.name.to_owned()),
        timeout: Duration::from_nanos(TIMEOUT),
        warn_after: Duration::from_nanos(WARN_AFTER),
        ..Settings::default()
    };
    let near = LinkQuality {
        latency_ns: 5_000,
        jitter_ns: 5_000,
        ns_per_byte: 1,
        capacity: 64 << 10,
        stalls_percent: 0,
    };
    let scenario = Scenario {
        world_size,
        host_of,
        groups: vec![GroupSetup {
            topology,
            settings,
            sum_order: SumOrder::Rank,
            streams: 1,
            block_bytes: 64 << 10,
            slot_bytes: (ranks_per_host > 1).then_some(64 << 10),
            arena_bytes: 4 << 20,
        }],
        calls,
        messages: vec![],
        programs: vec![program; world_size],
        fault: None,
        launched: false,
        goes_on: false,
        near,
        far: LinkQuality { latency_ns: 20_000, jitter_ns: MS / 10, ..near },
    };
    let start_up = start_up::run_undisturbed(&mut Rng::with_seed(!seed), &scenario)?;
    let simulation = Simulation::run(Rng::with_seed(seed), scenario, false)?;
    simulation.check_complete()?;
    let group = &simulation.scenario.groups[0];
    // All ranks have the same result.
    let calls = simulation.scenario.calls.iter();
    let expected: Vec<Vec<u8>> = calls.map(|call| call.case.expected(0, &group.topology)).collect();
    for process in &simulation.processes {
        for record in &process.records {
            if record.call().is_some_and(|call| record.bytes() != Some(&expected[call])) {
                return Err(format!("rank {} has a wrong result", process.rank));
            }
        }
    }
    Ok(LargeSummary {
        requests: start_up.requests,
        links: simulation.links.len(),
        events: start_up.events + simulation.events,
        virtual_ns: start_up.virtual_ns + simulation.now,
    })
}
