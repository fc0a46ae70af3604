//! A job that is larger than those of seeds, and in which nothing goes wrong: does it scale?

use std::time::Duration;

use drumline::{Config, DType, ReduceOp};
use drumline_conformance::{Case, Kind};
use drumline_schedule::{
    Collective, Topology,
    price::{ElementKind, Prices, choose},
};
use fastrand::Rng;

use crate::{
    call::Call,
    network::Quality,
    plan::{Group, Instruction, MS, Plan, TIMEOUT, WARN_AFTER},
    simulation::Simulation,
};

/// What all ranks of a [`large`](run) job do, before they close the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// Nothing.
    Nothing,
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
pub fn run(hosts: usize, ranks_per_host: usize, task: Task, seed: u64) -> Result<Summary, String> {
    let world_size = hosts * ranks_per_host;
    let host_of: Vec<usize> = (0..world_size).map(|rank| rank / ranks_per_host).collect();
    let topology = Topology::placed(host_of.clone());
    let mut case = Case { kind: Kind::Barrier, dtype: DType::U8, elements: 0, uneven: false, seed };
    if let Task::AllReduce { elements } = task {
        let kind = Kind::AllReduce(ReduceOp::Sum);
        case = Case { kind, dtype: DType::F32, elements, ..case };
    }
    let call = Call { group: 0, case, registered: false };
    let calls = if task == Task::Nothing { vec![] } else { vec![call] };
    let each = (0..calls.len()).map(|call| Instruction::Call { call, blocking: true });
    let script: Vec<_> = each.chain([Instruction::Close { group: 0 }]).collect();
    // What every rank would find for itself, and takes a while at this size.
    let all_reduce = match task {
        Task::AllReduce { elements } => {
            let f32 = ElementKind { bytes: 4, sum_bytes: 4 };
            choose(Collective::AllReduce, &topology, elements, f32, &Prices::TCP)
        }
        _ => None,
    };
    let config = Config {
        all_reduce: all_reduce.map(|algorithm| algorithm.name.to_owned()),
        timeout: Duration::from_nanos(TIMEOUT),
        warn_after: Duration::from_nanos(WARN_AFTER),
        ..Config::default()
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
            config,
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
    let simulation = Simulation::run(Rng::with_seed(seed), plan, false)?;
    simulation.check_complete()?;
    let group = &simulation.plan.groups[0];
    // All get the same.
    let expected = simulation.plan.calls.first().map(|call| call.case.expected(0, &group.topology));
    for process in &simulation.processes {
        for record in &process.records {
            if record.call().is_some() && record.bytes() != expected.as_ref() {
                return Err(format!("rank {} has a wrong result", process.rank));
            }
        }
    }
    let (bundles, events) = (simulation.bundles.len(), simulation.events);
    Ok(Summary { bundles, events, virtual_ns: simulation.now })
}
