//! Runs a job, one event after another.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap},
    sync::Arc,
};

use crate::member::{Identity, Member, SharedMemory};
use drumline_launch::{
    Ending,
    supervisor::{Policy, Supervisor},
};
use drumline_shm::{PeerSegment, Segment, SegmentSize};
use fastrand::Rng;

use crate::{
    link::open_link,
    network::{Network, connect},
    process::Process,
    scenario::Scenario,
    simulation::{JobEvent, Simulation},
    time::{MS, Nanos, SECOND, TIMEOUT},
    warnings::Warnings,
};

/// A job with more events than this, times its number of ranks plus 32, is taken for an endless loop. Of 700
/// seeds, the most demanding needed 3,500. Jobs of 64 ranks whose messages arrive in tiny pieces need more.
const EVENTS_MAX_PER_RANK: u64 = 210_000;

impl Simulation {
    /// Runs a job to its end. Fails if the job cannot begin or ranks hang.
    pub(crate) fn run(rng: Rng, scenario: Scenario, trace: bool) -> Result<Simulation, String> {
        let network = Network::new(trace);
        let warnings = Warnings::new(&network);
        let mut hosts: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (rank, host) in scenario.host_of.iter().enumerate() {
            hosts.entry(*host).or_default().push(rank);
        }
        let launcher =
            |ranks: &Vec<usize>| (ranks.clone(), Supervisor::new(ranks.len(), Policy::default()));
        let mut simulation = Simulation {
            launchers: hosts.values().filter(|_| scenario.launched).map(launcher).collect(),
            hosts,
            processes: (0..scenario.world_size).map(Process::new).collect(),
            scenario: Arc::new(scenario),
            fault: None,
            warnings: Vec::new(),
            now: 0,
            events: 0,
            rng,
            network,
            queue: BinaryHeap::new(),
            wires: BTreeMap::new(),
            last_dials: BTreeMap::new(),
            opened: BTreeMap::new(),
            links: BTreeMap::new(),
        };
        for group in 0..simulation.scenario.groups.len() {
            simulation.join(group)?;
        }
        tracing::subscriber::with_default(warnings.clone(), || simulation.run_to_end())?;
        simulation.warnings = warnings.take();
        Ok(simulation)
    }

    fn run_to_end(&mut self) -> Result<(), String> {
        for rank in 0..self.processes.len() {
            let at = self.rng.u64(0..MS);
            self.schedule(at, JobEvent::Step(rank));
        }
        let events_max = EVENTS_MAX_PER_RANK * (self.scenario.world_size as u64 + 32);
        let limit =
            (2 + 2 * self.scenario.groups.len() as u64) * (TIMEOUT + 3 * SECOND) + 2 * TIMEOUT;
        while let Some(Reverse((at, _, event))) = self.queue.pop() {
            self.now = self.now.max(at);
            self.network.set_now(self.now);
            self.events += 1;
            if self.now > limit || self.events > events_max {
                break;
            }
            match event {
                JobEvent::Step(rank) => self.step(rank),
                JobEvent::Dial(dial, stage) => self.go_on_with_dial(dial, stage),
                JobEvent::Exit { of, to } => {
                    for state in &mut self.processes[to].groups {
                        if let Some(member) = &mut state.member {
                            member.on_exit(of);
                        }
                    }
                    self.schedule(self.now, JobEvent::Step(to));
                }
                JobEvent::Reaped(rank) => self.reap(rank),
                JobEvent::Launcher(host) => self.order(host, None),
                JobEvent::Kill { process, signal } => {
                    self.end(process, Ending::Signal { number: signal, core_dumped: false });
                }
            }
        }
        let hanging: Vec<_> =
            self.processes.iter().filter(|it| it.ended.is_none()).map(|it| it.rank).collect();
        if hanging.is_empty() {
            return Ok(());
        }
        Err(format!(
            "ranks {hanging:?} hang: at {:.3} s, after {} events, they are still there",
            self.now as f64 / 1e9,
            self.events
        ))
    }

    fn step(&mut self, rank: usize) {
        let process = &mut self.processes[rank];
        if process.ended.is_some() {
            return;
        }
        if process.next_look.is_some_and(|at| at <= self.now) {
            process.next_look = None;
        }
        let resumes = process.stopped_until.max(process.busy_until);
        if resumes > self.now {
            return self.look_again(rank, resumes);
        }
        if !process.has_reason(self.now) {
            if let Some(next) = process.asleep_until() {
                self.look_again(rank, next);
            }
            return;
        }
        if let Some(fault) = self.scenario.fault
            && fault.victim == rank
            && self.fault.is_none()
            && process.steps >= fault.after_steps
        {
            self.strike(fault.kind, rank);
            if self.processes[rank].ended.is_some() || self.processes[rank].stopped_until > self.now
            {
                return self.look_again(rank, self.processes[rank].stopped_until);
            }
        }
        let view = self.view();
        let process = &mut self.processes[rank];
        let next = process.step(&view, &mut self.rng);
        process.busy_until = self.now + self.rng.u64(50..2_000);
        self.begin_dials(rank);
        if let Some((_, ending)) = self.processes[rank].ended {
            self.after_end(rank, ending);
        }
        if let Some(next) = next {
            self.look_again(rank, next);
        }
        self.schedule_wakes();
        // Neighbours see what the rank wrote to shared memory a moment later.
        for other in self.neighbours(rank) {
            let at = self.now + self.rng.u64(50..2_000);
            self.schedule(at, JobEvent::Step(other));
        }
    }

    fn look_again(&mut self, rank: usize, at: Nanos) {
        let process = &mut self.processes[rank];
        if process.next_look.is_none_or(|next| at < next) {
            process.next_look = Some(at);
            self.schedule(at, JobEvent::Step(rank));
        }
    }

    /// Makes the members of a group, linked to their neighbours and with their shared memory.
    fn join(&mut self, group: usize) -> Result<(), String> {
        let text = |error: drumline_shm::Error| error.to_string();
        let setup = &self.scenario.groups[group];
        let mut streams: Vec<Vec<_>> = self.processes.iter().map(|_| Vec::new()).collect();
        for ranks in self.hosts.values() {
            for (index, &a) in ranks.iter().enumerate() {
                for &b in &ranks[index + 1..] {
                    let ends = [a, b].map(|rank| (rank, &self.processes[rank].killed));
                    let mut open = |quality| connect(&self.network, ends, quality, &mut self.rng);
                    let ([to_b, to_a], wires) =
                        open_link(group, setup, self.scenario.near, &mut open);
                    streams[a].push((b, to_b));
                    streams[b].push((a, to_a));
                    self.wires.entry((a, b)).or_default().extend(wires);
                }
            }
        }
        let slot_bytes = setup.slot_bytes.unwrap_or(1);
        let size = SegmentSize { slot_bytes, arena_bytes: setup.arena_bytes };
        let sharing = self.processes.iter().filter(|_| setup.slot_bytes.is_some());
        let segments = sharing.map(|_| Segment::create(size));
        let segments = segments.collect::<Result<Vec<_>, _>>().map_err(text)?;
        let mut memories = Vec::new();
        for rank in 0..segments.len() {
            let near = setup.topology.neighbours(rank).iter().filter(|peer| **peer != rank);
            let map = |&peer: &usize| Ok((peer, PeerSegment::map(segments[peer].handles()?)?));
            memories.push(near.map(map).collect::<Result<BTreeMap<_, _>, _>>().map_err(text)?);
        }
        let mut memories = segments.into_iter().zip(memories);
        let digest = self.rng.u64(..);
        for (rank, mut streams) in streams.into_iter().enumerate() {
            self.rng.shuffle(&mut streams);
            let identity = Identity { group: group.to_string(), rank, digest };
            let memory = memories.next().map(|(segment, neighbours)| SharedMemory {
                segment,
                neighbours,
                slot_bytes,
            });
            let member = Member::new(&identity, &setup.topology, &setup.settings, streams, memory);
            self.processes[rank].join(member.map_err(text)?);
        }
        Ok(())
    }
}
