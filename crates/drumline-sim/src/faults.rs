//! How faults strike.

use drumline_launch::Ending;

use crate::{
    network::{PipeEnd, lock},
    scenario::FaultKind,
    simulation::Simulation,
    time::MS,
};

impl Simulation {
    pub(crate) fn strike(&mut self, fault: FaultKind, victim: usize) {
        self.network.note(|| format!("rank {victim}: FAULT {fault:?}"));
        let groups = &self.processes[victim].groups;
        let leaving = groups.iter().map(|state| state.closing_since.is_some()).collect();
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
                let inside = |rank: usize| self.scenario.same_host(rank, victim);
                let cut = self.wires.iter().filter(|((a, b), _)| inside(*a) != inside(*b));
                for wire in cut.flat_map(|(_, wires)| wires) {
                    let noticed = self.now + keepalive + self.rng.u64(0..100 * MS);
                    lock(&wire.pipe).fall_silent(&self.network, noticed);
                }
            }
            FaultKind::LostConnection { peer, group, control, data, reset } => {
                let end = if reset { PipeEnd::Reset } else { PipeEnd::Closed };
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
                if let Some(member) = &mut self.processes[victim].groups[group].member {
                    member.abort(self.network.instant());
                }
                let view = self.view();
                self.processes[victim].groups[group].wake(&view);
            }
        }
        self.schedule_wakes();
    }
}
