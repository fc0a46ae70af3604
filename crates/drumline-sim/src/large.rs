//! A job that is larger than those of seeds, and in which nothing goes wrong: does it scale?
//!
//! Its ranks meet in the store, then carry out their tasks, then close their group.

use std::time::Duration;

use drumline_conformance::{Case, Kind, on_group::Form};
use drumline_engine::{DType, ReduceOp, Settings};
use drumline_schedule::{
    Collective, SumOrder, Topology,
    price::{ElementKind, Prices, choose},
};
use fastrand::Rng;

use crate::{
    call::Call,
    network::Quality,
    plan::{Group, Instruction, MS, Plan, TIMEOUT, WARN_AFTER},
    rendezvous,
    simulation::Simulation,
};

/// What all ranks of a [`large`](run) job do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// They meet.
    Barrier,
    /// They add so many `f32`.
    AllReduce {
        /// How many.
        elements: usize,
    },
}

/// What a large job was like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// How many requests of theirs the store has carried out until all were ready.
    pub requests: u64,
    /// How many pairs of ranks of different hosts were connected.
    pub bundles: usize,
    /// How many things happened.
    pub events: u64,
    /// How long it took, in nanoseconds of virtual time.
    pub virtual_ns: u64,
}

/// Runs a job of `hosts` times `ranks_per_host` ranks. Those of one host share memory.
///
/// # Errors
///
/// What is wrong: an error, a wrong result, or somebody hangs.
pub fn run(
    hosts: usize,
    ranks_per_host: usize,
    tasks: &[Task],
    seed: u64,
) -> Result<Summary, String> {
    let world_size = hosts * ranks_per_host;
    let host_of: Vec<usize> = (0..world_size).map(|rank| rank / ranks_per_host).collect();
    let topology = Topology::placed(host_of.clone());
    let call = |task: &Task| {
        let (kind, dtype, elements) = match *task {
            Task::Barrier => (Kind::Barrier, DType::U8, 0),
            Task::AllReduce { elements } => (Kind::AllReduce(ReduceOp::Sum), DType::F32, elements),
        };
        let case = Case { kind, dtype, elements, uneven: false, seed };
        Call { group: 0, case, form: Form::Blocking }
    };
    let calls: Vec<Call> = tasks.iter().map(call).collect();
    let each = (0..calls.len()).map(|call| Instruction::Call { call, blocking: true });
    let script: Vec<_> = each.chain([Instruction::Close { group: 0 }]).collect();
    // What every rank would find for itself, and takes a while at this size.
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
    let near = Quality {
        latency_ns: 5_000,
        jitter_ns: 5_000,
        ns_per_byte: 1,
        capacity: 64 << 10,
        stalls_percent: 0,
    };
    let plan = Plan {
        world_size,
        host_of,
        groups: vec![Group {
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
        scripts: vec![script; world_size],
        fault: None,
        launched: false,
        goes_on: false,
        near,
        far: Quality { latency_ns: 20_000, jitter_ns: MS / 10, ..near },
    };
    let meeting = rendezvous::run_undisturbed(&mut Rng::with_seed(!seed), &plan)?;
    let simulation = Simulation::run(Rng::with_seed(seed), plan, false)?;
    simulation.check_complete()?;
    let group = &simulation.plan.groups[0];
    // All get the same.
    let calls = simulation.plan.calls.iter();
    let expected: Vec<Vec<u8>> = calls.map(|call| call.case.expected(0, &group.topology)).collect();
    for process in &simulation.processes {
        for record in &process.records {
            if record.call().is_some_and(|call| record.bytes() != Some(&expected[call])) {
                return Err(format!("rank {} has a wrong result", process.rank));
            }
        }
    }
    Ok(Summary {
        requests: meeting.requests,
        bundles: simulation.bundles.len(),
        events: meeting.events + simulation.events,
        virtual_ns: meeting.virtual_ns + simulation.now,
    })
}
