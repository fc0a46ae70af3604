//! How simulated ranks of different hosts open connections: calls take time, cross each other,
//! reach hosts that are cut off and processes that are stopped or have ended.

use crate::member::{Member, PeerStreams};

use crate::{
    network::{Nanos, Quality, SharedPipe, Stream, connect},
    plan::{FaultKind, Group, MS, SECOND},
    process::World,
    simulation::{Event, Simulation},
};

/// A rank calls another one in a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Dial {
    pub(crate) group: usize,
    pub(crate) from: usize,
    pub(crate) to: usize,
}

/// What happens to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stage {
    /// It reaches the other host.
    Arrives,
    /// The streams are open at the end of the callee.
    Taken,
    /// The streams are open at the end of the caller.
    Answered,
    /// Nobody is there.
    Refused,
    /// Nobody answers.
    Unanswered,
}

/// One direction of a stream that somebody may want to break.
#[derive(Clone, Debug)]
pub(crate) struct Wire {
    pub(crate) group: usize,
    pub(crate) is_control: bool,
    pub(crate) pipe: SharedPipe,
}

/// How long a host that does not answer is called.
const PATIENCE: Nanos = 5 * SECOND / 2;

impl Simulation {
    /// Begins the calls that a process wants.
    pub(crate) fn begin_dials(&mut self, from: usize) {
        let lanes = self.processes[from].lanes.iter_mut().enumerate();
        let wanted = lanes.flat_map(|(group, lane)| {
            let wanted = lane.member.as_mut().map(Member::take_wanted).unwrap_or_default();
            wanted.into_iter().map(move |to| Dial { group, from, to })
        });
        for dial in wanted.collect::<Vec<_>>() {
            let at = self.now + self.travel();
            self.schedule(at, Event::Dial(dial, Stage::Arrives));
        }
    }

    fn travel(&mut self) -> Nanos {
        self.plan.far.latency_ns + self.rng.u64(0..=self.plan.far.jitter_ns)
    }

    pub(crate) fn go_on_with_dial(&mut self, dial: Dial, stage: Stage) {
        let Dial { group, from, to } = dial;
        match stage {
            Stage::Arrives => self.arrive(dial),
            Stage::Taken => {
                // A process that is stopped takes nothing, one that computes does.
                let stopped = self.processes[to].stopped_until;
                if stopped > self.now {
                    return self.schedule(stopped, Event::Dial(dial, stage));
                }
                let Some(streams) = self.opened.remove(&(dial, false)) else { return };
                let answered = self.now + self.travel();
                if self.processes[to].ended.is_some() {
                    self.opened.remove(&(dial, true));
                    return self.schedule(answered, Event::Dial(dial, Stage::Refused));
                }
                self.schedule(answered, Event::Dial(dial, Stage::Answered));
                if let Some(member) = &mut self.processes[to].lanes[group].member
                    && member.came(from, streams)
                {
                    self.bundles.insert((group, from.min(to), from.max(to)), self.now);
                }
                self.interrupt(to, group);
            }
            Stage::Answered => {
                let Some(streams) = self.opened.remove(&(dial, true)) else { return };
                if let Some(agreed) = self.bundles.get_mut(&(group, from.min(to), from.max(to))) {
                    *agreed = self.now;
                }
                if let Some(member) = &mut self.processes[from].lanes[group].member {
                    member.called(to, streams);
                }
                self.interrupt(from, group);
            }
            Stage::Refused | Stage::Unanswered => {
                let problem = match stage {
                    Stage::Refused => "at its address: connection refused",
                    _ => "at its address: connection timed out",
                };
                if let Some(member) = &mut self.processes[from].lanes[group].member
                    && member.unreachable(to, problem)
                {
                    self.bundles.insert((group, from.min(to), from.max(to)), self.now);
                }
                self.interrupt(from, group);
            }
        }
    }

    fn arrive(&mut self, dial: Dial) {
        let Dial { group, from, to } = dial;
        let plan = &self.plan;
        let is_cut = self.fault.is_some()
            && plan.fault.is_some_and(|fault| match fault.kind {
                FaultKind::SilentHost(_) => {
                    plan.same_host(from, fault.victim) != plan.same_host(to, fault.victim)
                }
                FaultKind::LostConnection { peer, group: of, .. } => {
                    group == of && [[from, to], [to, from]].contains(&[fault.victim, peer])
                }
                _ => false,
            });
        if is_cut {
            return self.schedule(self.now + PATIENCE, Event::Dial(dial, Stage::Unanswered));
        }
        if self.processes[to].ended.is_some() {
            let answered = self.now + self.travel();
            return self.schedule(answered, Event::Dial(dial, Stage::Refused));
        }
        if self.processes[to].stopped_until > self.now {
            let resumes = self.processes[to].stopped_until;
            return self.schedule(resumes, Event::Dial(dial, Stage::Arrives));
        }
        let (ours, theirs) = self.open(group, from, to);
        self.opened.insert((dial, true), ours);
        self.opened.insert((dial, false), theirs);
        let taken = self.now + self.rng.u64(0..MS);
        self.schedule(taken, Event::Dial(dial, Stage::Taken));
    }

    /// The streams between two ranks, at both ends.
    fn open(
        &mut self,
        group: usize,
        a: usize,
        b: usize,
    ) -> (PeerStreams<Stream>, PeerStreams<Stream>) {
        let quality = self.plan.far;
        let killed = [a, b].map(|rank| self.processes[rank].killed.clone());
        let mut open = |quality| {
            let ends = [(a, &killed[0]), (b, &killed[1])];
            connect(&self.network, ends, quality, &mut self.rng)
        };
        let (streams, wires) = bundle(group, &self.plan.groups[group], quality, &mut open);
        self.wires.entry((a.min(b), a.max(b))).or_default().extend(wires);
        streams
    }

    /// Lets a process look at something that has happened in a group.
    fn interrupt(&mut self, rank: usize, group: usize) {
        let world = World { plan: &self.plan, epoch: self.epoch, now: self.now, trace: self.trace };
        self.processes[rank].lanes[group].interrupt(&world);
        for (at, process) in self.network.take_wakes() {
            self.schedule(at, Event::Step(process));
        }
        self.schedule(self.now, Event::Step(rank));
    }
}

type Ends = ((PeerStreams<Stream>, PeerStreams<Stream>), Vec<Wire>);

/// All streams between two ranks.
pub(crate) fn bundle(
    group: usize,
    of_plan: &Group,
    quality: Quality,
    open: &mut dyn FnMut(Quality) -> ([Stream; 2], [SharedPipe; 2]),
) -> Ends {
    // Words on control connections are few and short: there is always room.
    let spacious = Quality { capacity: 1 << 20, stalls_percent: 0, ..quality };
    let ([control, their_control], control_pipes) = open(spacious);
    let wire = |is_control| move |pipe| Wire { group, is_control, pipe };
    let mut wires: Vec<Wire> = control_pipes.into_iter().map(wire(true)).collect();
    let block_bytes = of_plan.block_bytes;
    let (mut data, mut their_data) = (Vec::new(), Vec::new());
    for _ in 0..of_plan.streams {
        let ([near, far], pipes) = open(quality);
        data.push(near);
        their_data.push(far);
        wires.extend(pipes.map(wire(false)));
    }
    let ([points, their_points], points_pipes) = open(quality);
    wires.extend(points_pipes.map(wire(false)));
    let ours = PeerStreams { control, data, block_bytes, points };
    let theirs =
        PeerStreams { control: their_control, data: their_data, block_bytes, points: their_points };
    ((ours, theirs), wires)
}
