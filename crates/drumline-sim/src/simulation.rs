//! The state of a running job: time, events, processes, connections.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap},
    sync::Arc,
};

use crate::member::PeerStreams;
use drumline_launch::{Ending, supervisor::Supervisor};
use fastrand::Rng;

use crate::{
    link::Wire,
    network::{Network, SimStream, lock},
    process::{Process, View},
    scenario::Scenario,
    time::{MS, Nanos},
    warnings::Warning,
};

/// A job that runs or has ended.
#[derive(Debug)]
pub(crate) struct Simulation {
    pub(crate) scenario: Arc<Scenario>,
    /// The ranks of each host.
    pub(crate) hosts: BTreeMap<usize, Vec<usize>>,
    pub(crate) processes: Vec<Process>,
    /// If the job was launched: one launcher for each host, with the host's ranks.
    pub(crate) launchers: Vec<(Vec<usize>, Supervisor)>,
    /// When the fault struck, and which groups its victim was closing then.
    pub(crate) fault: Option<(Nanos, Vec<bool>)>,
    pub(crate) warnings: Vec<Warning>,
    pub(crate) now: Nanos,
    pub(crate) events: u64,
    pub(crate) rng: Rng,
    pub(crate) network: Arc<Network>,
    pub(crate) queue: BinaryHeap<Reverse<(Nanos, u64, JobEvent)>>,
    /// The wires of each pair of ranks, the lower rank first.
    pub(crate) wires: BTreeMap<(usize, usize), Vec<Wire>>,
    /// The last dial of each rank to each other one in each group.
    pub(crate) last_dials: BTreeMap<(usize, usize, usize), u64>,
    /// Streams of dials that have arrived and are not in use yet: those of the caller (`true`) and
    /// of the callee.
    pub(crate) opened: BTreeMap<(Dial, bool), PeerStreams<SimStream>>,
    /// When two ranks of different hosts agreed on a link, by group and ranks, the lower one first.
    pub(crate) links: BTreeMap<(usize, usize, usize), Nanos>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum JobEvent {
    /// A process takes a step.
    Step(usize),
    Dial(Dial, DialStage),
    /// A rank hears that the process of another has ended.
    Exit {
        of: usize,
        to: usize,
    },
    /// A host's launcher hears that a process has ended.
    Reaped(usize),
    /// The time that a host's launcher has asked for has come.
    Launcher(usize),
    Kill {
        process: usize,
        signal: i32,
    },
}

/// One rank dials another in a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Dial {
    pub(crate) group: usize,
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// A rank that dials again drops what it has dialled before.
    pub(crate) number: u64,
}

/// What happens to a dial next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum DialStage {
    /// It reaches the callee's host.
    Arrives,
    /// The streams are open at the callee.
    Taken,
    /// The streams are open at the caller.
    Answered,
    /// The caller hears that the callee's process has ended.
    Refused,
    /// The caller has waited in vain for the callee's host.
    Unanswered,
}

impl Simulation {
    pub(crate) fn schedule(&mut self, at: Nanos, event: JobEvent) {
        let tie = self.rng.u64(..);
        self.queue.push(Reverse((at, tie, event)));
    }

    /// Schedules a step of every process for which the network has news.
    pub(crate) fn schedule_wakes(&mut self) {
        for (at, process) in self.network.take_wakes() {
            self.schedule(at, JobEvent::Step(process));
        }
    }

    pub(crate) fn view(&self) -> View {
        View { scenario: self.scenario.clone(), network: self.network.clone() }
    }

    /// The other ranks of a host.
    pub(crate) fn neighbours(&self, rank: usize) -> Vec<usize> {
        let on_host = self.hosts.get(&self.scenario.host_of[rank]).into_iter().flatten();
        on_host.copied().filter(|other| *other != rank).collect()
    }

    pub(crate) fn end(&mut self, rank: usize, ending: Ending) {
        if self.processes[rank].ended.is_none() {
            self.processes[rank].end(self.now, ending);
            self.after_end(rank, ending);
        }
    }

    pub(crate) fn after_end(&mut self, rank: usize, ending: Ending) {
        self.network.note(|| format!("rank {rank}: its process has ended with {ending}"));
        for other in self.neighbours(rank) {
            // Within a host, bytes arrive before the end of their writer is noticed.
            let pair = (rank.min(other), rank.max(other));
            let last = self.wires[&pair].iter().map(|wire| lock(&wire.pipe).last_arrival());
            let at = last.max().unwrap_or(0).max(self.now) + self.rng.u64(1_000..MS);
            self.schedule(at, JobEvent::Exit { of: rank, to: other });
        }
        self.schedule_wakes();
        self.schedule(self.now + 10_000, JobEvent::Reaped(rank));
    }
}
