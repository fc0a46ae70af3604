//! What the workers of a world do, as the monitor hears it.

use std::time::Duration;

use rustix::process::Pid;

use super::{
    Monitor,
    happening::{Happening, Worker},
};
use crate::{
    Ending,
    ending::signal_name,
    supervisor::{Event, Verdict},
    watch::finding::Finding,
    world::World,
};

/// Tells the monitor about the workers of one world.
#[derive(Debug)]
pub(crate) struct WorkerNews {
    monitor: Monitor,
    first_rank: usize,
    pids: Vec<Pid>,
    is_stopped: bool,
}

impl WorkerNews {
    /// A world starts, whose workers do not run yet.
    pub(crate) fn of(world: &World, monitor: &Monitor) -> WorkerNews {
        monitor.tell(Happening::WorldStarts(world.clone()));
        let (monitor, first_rank) = (monitor.clone(), world.first_rank);
        WorkerNews { monitor, first_rank, pids: Vec::new(), is_stopped: false }
    }

    /// The next worker runs.
    pub(crate) fn started(&mut self, pid: Pid) {
        self.pids.push(pid);
        let worker = self.worker(self.pids.len() - 1);
        worker.into_iter().for_each(|it| self.monitor.tell(Happening::WorkerStarts(it)));
    }

    fn worker(&self, local_rank: usize) -> Option<Worker> {
        let worker_id = self.pids.get(local_rank)?.as_raw_pid();
        Some(Worker { global_rank: self.first_rank + local_rank, local_rank, worker_id })
    }

    /// This has happened. `is_lost` tells whether the others go on without a worker.
    pub(crate) fn hear(&mut self, event: &Event<'_>, is_lost: impl Fn(usize) -> bool) {
        match event {
            Event::Exited(workers) => {
                workers.iter().for_each(|exit| self.ended(*exit, is_lost(exit.0)));
            }
            Event::End(signal) if !std::mem::replace(&mut self.is_stopped, true) => {
                let signal = signal_name(signal.as_raw());
                self.monitor.tell(Happening::Stops { signal });
            }
            _ => {}
        }
    }

    /// A worker hangs.
    pub(crate) fn hung(&self, finding: &Finding) {
        let Some(worker) = self.worker(finding.worker) else { return };
        self.monitor.tell(Happening::WorkerHangs { worker, how: finding.how.clone() });
    }

    /// All workers have ended.
    pub(crate) fn over(&self, verdict: Verdict, lived: Duration) {
        let (outcome, first) = match verdict {
            Verdict::Success => ("success", None),
            Verdict::Failed { worker } => ("failed", Some(self.first_rank + worker)),
            _ => ("stopped", None),
        };
        self.monitor.tell(Happening::WorldEnds {
            outcome,
            global_rank: first,
            total_run_time: lived.as_secs_f64(),
        });
    }

    fn ended(&self, (local_rank, ending): (usize, Ending), lost: bool) {
        let Some(worker) = self.worker(local_rank) else { return };
        let (exit_code, signal) = match ending {
            Ending::Code(code) => (Some(code), None),
            Ending::Signal { number, .. } => (None, Some(signal_name(number))),
        };
        self.monitor.tell(Happening::WorkerEnds { worker, exit_code, signal, lost });
    }
}
