//! The communication thread.

use std::{
    io,
    sync::mpsc::{Receiver, Sender, channel},
    thread,
    time::{Duration, Instant},
};

use super::memory::Memory;
use crate::{Error, ProcessGroup, Result};

/// Takes buckets by value, one after the other, and gives them back.
///
/// It is not joined when dropped: a collective that waits for a dead peer ends by its own
/// deadline, and nobody should wait for that. The closed channel ends the thread. Between two
/// buckets it holds no handle of the group, so that dropping the last handle elsewhere takes
/// leave of the peers at once.
#[derive(Debug)]
pub(super) struct Worker {
    jobs: Sender<(usize, Memory)>,
    done: Receiver<Done>,
    pub(super) in_flight: usize,
}

#[derive(Debug)]
pub(super) struct Done {
    pub(super) bucket: usize,
    pub(super) memory: Memory,
    pub(super) result: Result<()>,
    pub(super) took: Duration,
    pub(super) at: Instant,
}

impl Worker {
    pub(super) fn start(group: &ProcessGroup) -> Result<Self> {
        let group = group.downgrade();
        let (jobs, next_job) = channel::<(usize, Memory)>();
        let (send_done, done) = channel();
        let work = move || {
            while let Ok((bucket, mut memory)) = next_job.recv() {
                let Some(group) = group.upgrade() else { break };
                let start = Instant::now();
                let result = memory.all_reduce(&group);
                drop(group);
                let at = Instant::now();
                let done = Done { bucket, memory, result, took: at - start, at };
                if send_done.send(done).is_err() {
                    break;
                }
            }
        };
        thread::Builder::new()
            .name("drumline-ddp".to_owned())
            .spawn(work)
            .map_err(|error| Error::io("start the communication thread", error))?;
        Ok(Self { jobs, done, in_flight: 0 })
    }

    pub(super) fn start_all_reduce(&mut self, bucket: usize, memory: Memory) {
        // If the thread has gone, `wait` finds out: what is in flight never comes back.
        let _ = self.jobs.send((bucket, memory));
        self.in_flight += 1;
    }

    pub(super) fn wait(&mut self) -> Result<Done> {
        let done = self.done.recv().map_err(|_| {
            let gone = io::Error::other("it ended early; its panic message stands above");
            Error::io("wait for the communication thread", gone)
        })?;
        self.in_flight -= 1;
        Ok(done)
    }
}
