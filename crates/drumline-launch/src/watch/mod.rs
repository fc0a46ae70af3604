//! Looks for workers that hang.
//!
//! ```text
//!  Attempt ── prepare ─► guards: steps, torch's timers
//!     ▲                     │  one thread lets each look when it is time
//!     └────── Finding ◄─────┘
//! ```
//!
//! The thread only looks. What follows is up to the [supervisor](crate::supervisor), to which a worker that hangs is
//! a worker that has failed.

pub(crate) mod finding;
mod guard;
pub(crate) mod hangs;
mod steps;
mod timers;

use std::{
    io::{Read, Write},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    sync::mpsc::{Receiver, Sender, channel},
    thread,
    time::{Duration, Instant},
};

use drumline::store::tcp::TcpStore;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use self::{
    finding::Finding,
    guard::{Guard, Ward},
    hangs::Hangs,
    steps::StepGuard,
    timers::{TimerFile, TimerGuard},
};
use crate::{Error, Result, monitor::Monitor, worker::Worker};

/// Guards of the workers of one world. It stops when it is dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    guards: Vec<Box<dyn Guard>>,
    _timer_file: Option<TimerFile>,
    findings: Receiver<Finding>,
    /// One end of a socket pair: the thread writes a byte when it has found something, and ends when this end is closed.
    near: UnixStream,
    /// The ends of the thread, until it runs.
    far: Option<(Sender<Finding>, UnixStream)>,
}

/// A turn of the thread that takes this much longer than it should shows that the process was stopped.
const STOPPED_AFTER: Duration = Duration::from_secs(1);

impl Watch {
    /// Prepares the guards. Call it before the workers start, which will use `store`.
    pub(crate) fn prepare(
        hangs: &Hangs,
        workers: usize,
        store: &TcpStore,
        monitor: &Monitor,
    ) -> Result<Watch> {
        let mut guards: Vec<Box<dyn Guard>> = Vec::new();
        if hangs.step_timeout.is_some() || monitor.wants_steps() {
            let guard = StepGuard::before(workers, hangs.step_timeout, monitor, store)?;
            guards.push(Box::new(guard));
        }
        let mut timer_file = None;
        if let Some(path) = &hangs.timer_file {
            let (guard, file) = TimerGuard::make(path)?;
            guards.push(Box::new(guard));
            timer_file = Some(file);
        }
        let (near, far) =
            UnixStream::pair().map_err(Error::call("socketpair", "make a socket pair"))?;
        let (told, findings) = channel();
        Ok(Watch { guards, _timer_file: timer_file, findings, near, far: Some((told, far)) })
    }

    /// Lets the guards look after these workers, the first of which has this rank.
    pub(crate) fn begin(&mut self, workers: &[Worker], first_rank: usize) -> Result<()> {
        let guards = std::mem::take(&mut self.guards);
        // Without a guard it stays open, so that nothing is heard of it.
        let Some((told, far)) = self.far.take_if(|_| !guards.is_empty()) else { return Ok(()) };
        let ward = |(local_rank, worker): (usize, &Worker)| -> Result<Ward> {
            let pidfd = worker.pidfd().try_clone_to_owned();
            let pidfd = pidfd.map_err(Error::system("watch a worker"))?;
            Ok(Ward { rank: first_rank + local_rank, pid: worker.pid(), pidfd })
        };
        let wards = workers.iter().enumerate().map(ward).collect::<Result<Vec<_>>>()?;
        thread::Builder::new()
            .name("watch".into())
            .spawn(move || look(guards, &wards, &told, &far))
            .map_err(Error::call("clone3", "start a thread that watches the workers"))?;
        Ok(())
    }

    /// What was found since the last call. Call it when the watch is readable.
    pub(crate) fn found(&mut self) -> Vec<Finding> {
        // A byte for each.
        let mut bytes = [0; 64];
        let _ = self.near.read(&mut bytes);
        self.findings.try_iter().collect()
    }
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.near.as_fd()
    }
}

/// Lets each guard look when it is time, until nobody hears any more.
fn look(
    mut guards: Vec<Box<dyn Guard>>,
    wards: &[Ward],
    told: &Sender<Finding>,
    mut far: &UnixStream,
) {
    let mut now = Duration::ZERO;
    loop {
        let due = guards.iter().filter_map(|guard| guard.due()).min();
        let patience = due.map(|due| due.saturating_sub(now));
        let turn = Instant::now();
        let mut ready = vec![PollFd::new(&far, PollFlags::IN)];
        let descriptors = guards.iter().filter_map(|guard| guard.descriptor());
        ready.extend(descriptors.map(|it| PollFd::from_borrowed_fd(it, PollFlags::IN)));
        let timeout = patience.and_then(|patience| Timespec::try_from(patience).ok());
        let polled = poll(&mut ready, timeout.as_ref());
        if polled.is_ok() && !ready[0].revents().is_empty() {
            return;
        }
        now += match patience {
            Some(patience) => turn.elapsed().min(patience + STOPPED_AFTER),
            None => turn.elapsed(),
        };
        for guard in &mut guards {
            if let Some(finding) = guard.look(now, wards)
                && (told.send(finding).is_err() || far.write_all(&[1]).is_err())
            {
                return;
            }
        }
    }
}
