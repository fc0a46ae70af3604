//! The launchers of a job: each watches the processes of its host.

use std::time::Duration;

use drumline_launch::supervisor::{Event as Launched, Signal};

use crate::{
    simulation::{JobEvent, Simulation},
    time::Nanos,
};

impl Simulation {
    pub(crate) fn reap(&mut self, rank: usize) {
        let host = self.launchers.iter().position(|(ranks, _)| ranks.contains(&rank));
        if let Some(host) = host {
            self.order(host, Some(rank));
        }
    }

    /// Tells a launcher that a process has ended, or what time it is, and sends the signals that the launcher
    /// orders.
    pub(crate) fn order(&mut self, host: usize, ended: Option<usize>) {
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
            // A stopped process reacts to no signal but SIGKILL.
            let stopped = self.processes[process].stopped_until;
            let at = if signal == Signal::KILL { self.now } else { self.now.max(stopped) };
            self.schedule(at, JobEvent::Kill { process, signal: signal.as_raw() });
        }
        if let Some(deadline) = deadline {
            self.schedule(deadline.as_nanos() as Nanos, JobEvent::Launcher(host));
        }
    }
}
