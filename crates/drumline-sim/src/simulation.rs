//! The virtual world: time, connections, faults, launchers.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap},
    sync::{Arc, atomic::AtomicU64},
    time::{Duration, Instant},
};

use crate::member::{Identity, Member, PeerStreams, SharedMemory};
use drumline_launch::{
    Ending,
    supervisor::{Event as Launched, Policy, Signal, Supervisor},
};
use drumline_shm::{PeerSegment, Segment, SegmentSize};
use fastrand::Rng;

use crate::{
    dial::{Dial, Stage, Wire, bundle},
    network::{End, Nanos, Network, Stream, connect, lock},
    plan::{FaultKind, MS, Plan, SECOND, TIMEOUT},
    process::{Epoch, Process, World},
    warnings::{Warning, Warnings},
};

/// A job that has run to its end.
#[derive(Debug)]
pub(crate) struct Simulation {
    pub(crate) plan: Plan,
    /// The ranks of each.
    hosts: BTreeMap<usize, Vec<usize>>,
    pub(crate) processes: Vec<Process>,
    /// One for each host, with its ranks, if the job was launched.
    pub(crate) launchers: Vec<(Vec<usize>, Supervisor)>,
    /// When the fault happened, if it did, and how far its victim's groups were then closed.
    pub(crate) fault: Option<(Nanos, Vec<bool>)>,
    pub(crate) warnings: Vec<Warning>,
    pub(crate) now: Nanos,
    pub(crate) events: u64,
    pub(crate) rng: Rng,
    pub(crate) network: Arc<Network>,
    queue: BinaryHeap<Reverse<(Nanos, u64, Event)>>,
    /// By the two ranks, the lower one first.
    pub(crate) wires: BTreeMap<(usize, usize), Vec<Wire>>,
    /// Streams of calls that have reached the callee, at the end of the caller or not.
    pub(crate) opened: BTreeMap<(Dial, bool), PeerStreams<Stream>>,
    /// Which ranks of different hosts have agreed on streams, and when: the group, and the ranks.
    pub(crate) bundles: BTreeMap<(usize, usize, usize), Nanos>,
    pub(crate) epoch: Epoch,
    pub(crate) trace: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Event {
    Step(usize),
    Dial(Dial, Stage),
    /// A rank hears that the process of another has ended.
    Exit {
        of: usize,
        to: usize,
    },
    /// A host's launcher hears that a process has ended.
    Reaped(usize),
    Launcher(usize),
    Kill {
        process: usize,
        signal: i32,
    },
}

/// More events than any job needs, for each of its ranks and 32 more: somebody spins. Of 700 seeds the
/// one that needed most had 3,500; more need 64 ranks that send each other some hundred bytes, in
/// pieces of a few.
const EVENTS_MAX_PER_RANK: u64 = 210_000;

impl Simulation {
    /// Runs the job of a seed.
    ///
    /// # Errors
    ///
    /// What made it impossible to begin, or who hangs.
    pub(crate) fn run(mut rng: Rng, plan: Plan, trace: bool) -> Result<Simulation, String> {
        let network = Arc::new(Network::default());
        let warnings = Warnings::new(&network);
        let killed: Vec<_> = (0..plan.world_size).map(|_| Arc::new(AtomicU64::new(0))).collect();
        let mut hosts: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (rank, host) in plan.host_of.iter().enumerate() {
            hosts.entry(*host).or_default().push(rank);
        }
        let mut wires = BTreeMap::new();
        let mut members: Vec<Vec<_>> = (0..plan.world_size).map(|_| Vec::new()).collect();
        for group in 0..plan.groups.len() {
            for (members, member) in members
                .iter_mut()
                .zip(join(&plan, group, &network, &killed, &hosts, &mut wires, &mut rng)?)
            {
                members.push(member);
            }
        }
        let processes: Vec<_> = members
            .into_iter()
            .zip(killed)
            .enumerate()
            .map(|(rank, (members, killed))| Process::new(rank, members, killed))
            .collect();
        let launchers = match plan.launched {
            true => hosts
                .values()
                .map(|ranks| (ranks.len(), ranks.clone()))
                .map(|(workers, ranks)| (ranks, Supervisor::new(workers, Policy::default())))
                .collect(),
            false => Vec::new(),
        };
        let mut simulation = Simulation {
            plan,
            hosts,
            processes,
            launchers,
            fault: None,
            warnings: Vec::new(),
            now: 0,
            events: 0,
            rng,
            network,
            queue: BinaryHeap::new(),
            wires,
            opened: BTreeMap::new(),
            bundles: BTreeMap::new(),
            // Only distances from it are ever looked at.
            epoch: Epoch(Instant::now()),
            trace,
        };
        tracing::subscriber::with_default(warnings.clone(), || simulation.run_to_end())?;
        simulation.warnings = warnings.take();
        Ok(simulation)
    }

    pub(crate) fn schedule(&mut self, at: Nanos, event: Event) {
        let tie = self.rng.u64(..);
        self.queue.push(Reverse((at, tie, event)));
    }

    fn run_to_end(&mut self) -> Result<(), String> {
        for rank in 0..self.processes.len() {
            let at = self.rng.u64(0..MS);
            self.schedule(at, Event::Step(rank));
        }
        let events_max = EVENTS_MAX_PER_RANK * (self.plan.world_size as u64 + 32);
        let limit = (2 + 2 * self.plan.groups.len() as u64) * (TIMEOUT + 3 * SECOND) + 2 * TIMEOUT;
        while let Some(Reverse((at, _, event))) = self.queue.pop() {
            self.now = self.now.max(at);
            self.network.set_now(self.now);
            self.events += 1;
            if self.now > limit || self.events > events_max {
                break;
            }
            match event {
                Event::Step(rank) => self.step(rank),
                Event::Dial(dial, stage) => self.go_on_with_dial(dial, stage),
                Event::Exit { of, to } => {
                    for lane in &mut self.processes[to].lanes {
                        if let Some(member) = &mut lane.member {
                            member.on_exit(of);
                        }
                    }
                    self.schedule(self.now, Event::Step(to));
                }
                Event::Reaped(rank) => self.reap(rank),
                Event::Launcher(host) => self.order(host, None),
                Event::Kill { process, signal } => {
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
        if let Some(fault) = self.plan.fault
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
        let world = World { plan: &self.plan, epoch: self.epoch, now: self.now, trace: self.trace };
        let process = &mut self.processes[rank];
        let next = process.step(&world, &mut self.rng);
        process.busy_until = self.now + self.rng.u64(50..2_000);
        self.begin_dials(rank);
        if let Some((_, ending)) = self.processes[rank].ended {
            self.after_end(rank, ending);
        }
        if let Some(next) = next {
            self.look_again(rank, next);
        }
        for (at, process) in self.network.take_wakes() {
            self.schedule(at, Event::Step(process));
        }
        // What it wrote to shared memory is seen a moment later.
        for other in self.neighbours(rank) {
            let at = self.now + self.rng.u64(50..2_000);
            self.schedule(at, Event::Step(other));
        }
    }

    /// The other ranks of a host.
    fn neighbours(&self, rank: usize) -> Vec<usize> {
        let on_host = self.hosts.get(&self.plan.host_of[rank]).into_iter().flatten();
        on_host.copied().filter(|other| *other != rank).collect()
    }

    fn look_again(&mut self, rank: usize, at: Nanos) {
        let process = &mut self.processes[rank];
        if process.next_look.is_none_or(|next| at < next) {
            process.next_look = Some(at);
            self.schedule(at, Event::Step(rank));
        }
    }

    fn end(&mut self, rank: usize, ending: Ending) {
        if self.processes[rank].ended.is_none() {
            self.processes[rank].end(self.now, ending);
            self.after_end(rank, ending);
        }
    }

    fn after_end(&mut self, rank: usize, ending: Ending) {
        let world = World { plan: &self.plan, epoch: self.epoch, now: self.now, trace: self.trace };
        world.note(|| format!("rank {rank}: its process has ended with {ending}"));
        for other in self.neighbours(rank) {
            // Within a host what a process wrote is there before its end is noticed.
            let pair = (rank.min(other), rank.max(other));
            let last = self.wires[&pair].iter().map(|wire| lock(&wire.pipe).last_arrival());
            let at = last.max().unwrap_or(0).max(self.now) + self.rng.u64(1_000..MS);
            self.schedule(at, Event::Exit { of: rank, to: other });
        }
        for (at, process) in self.network.take_wakes() {
            self.schedule(at, Event::Step(process));
        }
        self.schedule(self.now + 10_000, Event::Reaped(rank));
    }

    fn reap(&mut self, rank: usize) {
        let host = self.launchers.iter().position(|(ranks, _)| ranks.contains(&rank));
        if let Some(host) = host {
            self.order(host, Some(rank));
        }
    }

    /// Tells a launcher of the end of a process, or the time, and does what it says.
    fn order(&mut self, host: usize, ended: Option<usize>) {
        let now = Duration::from_nanos(self.now);
        let (ranks, supervisor) = &mut self.launchers[host];
        let before = supervisor.deadline();
        let ended = ended.and_then(|rank| {
            let worker = ranks.iter().position(|it| *it == rank)?;
            Some((worker, self.processes[rank].ended?.1))
        });
        let orders = match ended {
            Some(end) => supervisor.handle(now, Launched::Exited(&[end])),
            None => supervisor.handle(now, Launched::Tick),
        };
        let kills: Vec<_> =
            orders.iter().map(|order| (ranks[order.worker], order.signal)).collect();
        let deadline = supervisor.deadline().filter(|deadline| Some(*deadline) != before);
        for (process, signal) in kills {
            // A stopped process hears nothing but SIGKILL.
            let stopped = self.processes[process].stopped_until;
            let at = if signal == Signal::KILL { self.now } else { self.now.max(stopped) };
            self.schedule(at, Event::Kill { process, signal: signal.as_raw() });
        }
        if let Some(deadline) = deadline {
            self.schedule(deadline.as_nanos() as Nanos, Event::Launcher(host));
        }
    }

    fn strike(&mut self, fault: FaultKind, victim: usize) {
        let world = World { plan: &self.plan, epoch: self.epoch, now: self.now, trace: self.trace };
        world.note(|| format!("rank {victim}: FAULT {fault:?}"));
        let lanes = &self.processes[victim].lanes;
        let leaving = lanes.iter().map(|lane| lane.closing_since.is_some()).collect();
        self.fault = Some((self.now, leaving));
        match fault {
            FaultKind::Crash => {
                let ending = match self.rng.bool() {
                    true => Ending::Signal { number: 9, core_dumped: false },
                    false => Ending::Code(101),
                };
                self.end(victim, ending);
            }
            FaultKind::SilentHost(keepalive) => {
                let inside = |rank: usize| self.plan.same_host(rank, victim);
                let cut = self.wires.iter().filter(|((a, b), _)| inside(*a) != inside(*b));
                for wire in cut.flat_map(|(_, wires)| wires) {
                    let noticed = self.now + keepalive + self.rng.u64(0..100 * MS);
                    lock(&wire.pipe).fall_silent(&self.network, noticed);
                }
            }
            FaultKind::LostConnection { peer, group, control, data, reset } => {
                let end = if reset { End::Reset } else { End::Closed };
                let wires = self.wires.get(&(victim.min(peer), victim.max(peer)));
                for wire in wires.into_iter().flatten() {
                    if wire.group == group && (if wire.is_control { control } else { data }) {
                        lock(&wire.pipe).cut(&self.network, end);
                    }
                }
            }
            FaultKind::Slow(time) => self.processes[victim].stopped_until = self.now + time,
            FaultKind::Mismatch { .. } => {}
            FaultKind::Abort { group } => {
                if let Some(member) = &mut self.processes[victim].lanes[group].member {
                    member.abort(self.epoch.instant(self.now));
                }
                self.processes[victim].lanes[group].interrupt(&world);
            }
        }
        for (at, process) in self.network.take_wakes() {
            self.schedule(at, Event::Step(process));
        }
    }
}

/// All members of a group, connected with those of their hosts and with their shared memory.
fn join(
    plan: &Plan,
    group: usize,
    network: &Arc<Network>,
    killed: &[Arc<AtomicU64>],
    hosts: &BTreeMap<usize, Vec<usize>>,
    wires: &mut BTreeMap<(usize, usize), Vec<Wire>>,
    rng: &mut Rng,
) -> Result<Vec<Member<crate::network::Stream>>, String> {
    let text = |error: drumline_shm::Error| error.to_string();
    let of_plan = &plan.groups[group];
    let members = plan.world_size;
    let mut streams: Vec<Vec<_>> = (0..members).map(|_| Vec::new()).collect();
    for ranks in hosts.values() {
        for (index, &a) in ranks.iter().enumerate() {
            for &b in &ranks[index + 1..] {
                let ends = [(a, &killed[a]), (b, &killed[b])];
                let mut open = |quality| connect(network, ends, quality, rng);
                let ((to_b, to_a), new) = bundle(group, of_plan, plan.near, &mut open);
                streams[a].push((b, to_b));
                streams[b].push((a, to_a));
                wires.entry((a, b)).or_default().extend(new);
            }
        }
    }
    let slot_bytes = of_plan.slot_bytes.unwrap_or(1);
    let size = SegmentSize { slot_bytes, arena_bytes: of_plan.arena_bytes };
    let segments = (0..members).map(|_| Segment::create(size));
    let segments: Vec<_> = match of_plan.slot_bytes {
        Some(_) => segments.collect::<Result<_, _>>().map_err(text)?,
        None => Vec::new(),
    };
    let mut memories = Vec::new();
    for rank in 0..segments.len() {
        let near = of_plan.topology.neighbours(rank).iter().filter(|peer| **peer != rank);
        let map = |&peer: &usize| Ok((peer, PeerSegment::map(segments[peer].handles()?)?));
        memories.push(near.map(map).collect::<Result<BTreeMap<_, _>, _>>().map_err(text)?);
    }
    let mut memories = segments.into_iter().zip(memories);
    let digest = rng.u64(..);
    streams
        .into_iter()
        .enumerate()
        .map(|(rank, mut streams)| {
            rng.shuffle(&mut streams);
            let identity = Identity { group: group.to_string(), rank, digest };
            let memory = memories.next().map(|(segment, neighbours)| SharedMemory {
                segment,
                neighbours,
                slot_bytes: of_plan.slot_bytes.unwrap_or(usize::MAX),
            });
            Member::new(&identity, &of_plan.topology, &of_plan.settings, streams, memory)
                .map_err(text)
        })
        .collect()
}
