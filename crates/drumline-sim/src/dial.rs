//! How ranks of different hosts open links. Dials take time and cross each other. They reach hosts
//! that are cut off, and processes that are stopped or have ended.

use crate::member::{Member, PeerStreams};

use crate::{
    link::open_link,
    network::{SimStream, connect},
    scenario::FaultKind,
    simulation::{Dial, DialStage, JobEvent, Simulation},
    time::{MS, Nanos, SECOND},
};

/// How long the caller waits for a host that does not answer.
const PATIENCE: Nanos = 5 * SECOND / 2;

impl Simulation {
    /// Begins the dials that a process wants.
    pub(crate) fn begin_dials(&mut self, from: usize) {
        let groups = self.processes[from].groups.iter_mut().enumerate();
        let wanted = groups.flat_map(|(group, state)| {
            let wanted = state.member.as_mut().map(Member::take_wanted).unwrap_or_default();
            wanted.into_iter().map(move |to| (group, from, to))
        });
        for (group, from, to) in wanted.collect::<Vec<_>>() {
            let number = self.last_dials.entry((group, from, to)).or_default();
            *number += 1;
            let dial = Dial { group, from, to, number: *number };
            let at = self.now + self.travel();
            self.schedule(at, JobEvent::Dial(dial, DialStage::Arrives));
        }
    }

    fn travel(&mut self) -> Nanos {
        self.scenario.far.latency_ns + self.rng.u64(0..=self.scenario.far.jitter_ns)
    }

    pub(crate) fn go_on_with_dial(&mut self, dial: Dial, stage: DialStage) {
        let Dial { group, from, to, number } = dial;
        let is_dropped = self.last_dials.get(&(group, from, to)) != Some(&number);
        match stage {
            DialStage::Arrives => self.arrive(dial),
            DialStage::Taken => {
                // A stopped process takes no dials. A computing process does.
                let stopped = self.processes[to].stopped_until;
                if stopped > self.now {
                    return self.schedule(stopped, JobEvent::Dial(dial, stage));
                }
                let Some(streams) = self.opened.remove(&(dial, false)) else { return };
                let answered = self.now + self.travel();
                if self.processes[to].ended.is_some() {
                    self.opened.remove(&(dial, true));
                    return self.schedule(answered, JobEvent::Dial(dial, DialStage::Refused));
                }
                self.schedule(answered, JobEvent::Dial(dial, DialStage::Answered));
                if let Some(member) = &mut self.processes[to].groups[group].member
                    && member.came(from, streams)
                {
                    self.links.insert((group, from.min(to), from.max(to)), self.now);
                }
                self.interrupt(to, group);
            }
            DialStage::Answered => {
                let Some(streams) = self.opened.remove(&(dial, true)) else { return };
                if is_dropped {
                    return;
                }
                if let Some(agreed) = self.links.get_mut(&(group, from.min(to), from.max(to))) {
                    *agreed = self.now;
                }
                if let Some(member) = &mut self.processes[from].groups[group].member {
                    member.called(to, streams);
                }
                self.interrupt(from, group);
            }
            DialStage::Refused | DialStage::Unanswered if is_dropped => {}
            DialStage::Refused | DialStage::Unanswered => {
                let problem = match stage {
                    DialStage::Refused => "at its address: connection refused",
                    _ => "at its address: connection timed out",
                };
                if let Some(member) = &mut self.processes[from].groups[group].member
                    && member.unreachable(to, problem, stage == DialStage::Refused)
                {
                    self.links.insert((group, from.min(to), from.max(to)), self.now);
                }
                self.interrupt(from, group);
            }
        }
    }

    fn arrive(&mut self, dial: Dial) {
        let Dial { group, from, to, .. } = dial;
        let scenario = &self.scenario;
        let is_cut = self.fault.is_some()
            && scenario.fault.is_some_and(|fault| match fault.kind {
                FaultKind::SilentHost(_) => {
                    scenario.same_host(from, fault.victim) != scenario.same_host(to, fault.victim)
                }
                // What resets a connection lets a new one through.
                FaultKind::LostConnection { peer, group: of, reset, .. } => {
                    !reset
                        && group == of
                        && [[from, to], [to, from]].contains(&[fault.victim, peer])
                }
                _ => false,
            });
        if is_cut {
            return self.schedule(self.now + PATIENCE, JobEvent::Dial(dial, DialStage::Unanswered));
        }
        if self.processes[to].ended.is_some() {
            let answered = self.now + self.travel();
            return self.schedule(answered, JobEvent::Dial(dial, DialStage::Refused));
        }
        if self.processes[to].stopped_until > self.now {
            let resumes = self.processes[to].stopped_until;
            return self.schedule(resumes, JobEvent::Dial(dial, DialStage::Arrives));
        }
        let [ours, theirs] = self.open(group, from, to);
        self.opened.insert((dial, true), ours);
        self.opened.insert((dial, false), theirs);
        let taken = self.now + self.rng.u64(0..MS);
        self.schedule(taken, JobEvent::Dial(dial, DialStage::Taken));
    }

    /// Opens a link between two ranks. Returns both ends.
    fn open(&mut self, group: usize, a: usize, b: usize) -> [PeerStreams<SimStream>; 2] {
        let quality = self.scenario.far;
        let killed = [a, b].map(|rank| self.processes[rank].killed.clone());
        let mut open = |quality| {
            let ends = [(a, &killed[0]), (b, &killed[1])];
            connect(&self.network, ends, quality, &mut self.rng)
        };
        let (streams, wires) = open_link(group, &self.scenario.groups[group], quality, &mut open);
        self.wires.entry((a.min(b), a.max(b))).or_default().extend(wires);
        streams
    }

    /// Makes a process look at a group at once.
    fn interrupt(&mut self, rank: usize, group: usize) {
        let view = self.view();
        self.processes[rank].groups[group].wake(&view);
        self.schedule_wakes();
        self.schedule(self.now, JobEvent::Step(rank));
    }
}
