//! What the calls of a group have taken on this rank.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use drumline_schedule::Collective;

use crate::transport::{Direction, PointCall};

/// The calls of one kind that have ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// The number of calls.
    pub ended: u64,
    /// The sum of the lengths of this rank's buffers in bytes.
    pub bytes: u64,
    /// The time of the calls, including the time spent waiting for other ranks. Of short calls that do not
    /// wait long, one in 64 is timed and counts for all.
    pub time: Duration,
}

/// Counts the calls of one kind. One thread at a time adds to it; any thread reads it, without waiting.
#[derive(Debug, Default)]
pub struct Counter {
    ended: AtomicU64,
    bytes: AtomicU64,
    nanoseconds: AtomicU64,
}

impl Counter {
    /// Adds a call that has ended.
    pub fn add(&self, bytes: u64, time: Duration) {
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let add = |to: &AtomicU64, more| to.store(to.load(Relaxed).saturating_add(more), Relaxed);
        add(&self.ended, 1);
        add(&self.bytes, bytes);
        add(&self.nanoseconds, nanoseconds);
    }

    fn read(&self) -> Calls {
        Calls {
            ended: self.ended.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
            time: Duration::from_nanos(self.nanoseconds.load(Relaxed)),
        }
    }
}

/// The calls of all kinds, and whether one has failed.
#[derive(Debug, Default)]
pub struct Usage {
    /// By code.
    collectives: [Counter; CODES],
    sends: Counter,
    receives: Counter,
    failed: AtomicBool,
}

/// More than the highest code of a collective. Some codes are not used.
const CODES: usize = Collective::ALL[Collective::ALL.len() - 1].code() as usize + 1;

impl Usage {
    /// The calls of one collective.
    pub fn of(&self, collective: Collective) -> &Counter {
        &self.collectives[usize::from(collective.code())]
    }

    /// Adds a message that has arrived or left.
    pub fn add_message(&self, call: &PointCall, time: Duration) {
        let counter = match call.direction {
            Direction::Send => &self.sends,
            Direction::Receive => &self.receives,
        };
        counter.add(call.bytes(), time);
    }

    /// Notes that a call has failed.
    pub fn fail(&self) {
        self.failed.store(true, Relaxed);
    }

    /// Whether a call has failed.
    pub fn has_failed(&self) -> bool {
        self.failed.load(Relaxed)
    }

    /// The number of all collectives that have ended.
    pub fn collectives_ended(&self) -> u64 {
        self.collectives.iter().map(|calls| calls.ended.load(Relaxed)).sum()
    }

    /// The time of all collectives.
    pub fn collective_time(&self) -> Duration {
        self.collectives.iter().map(|calls| calls.read().time).sum()
    }

    /// Every kind that was called, by the name of its function.
    pub fn by_name(&self) -> impl Iterator<Item = (&'static str, Calls)> {
        let collectives = Collective::ALL.into_iter().map(|it| (it.name(), self.of(it)));
        let messages = [("send", &self.sends), ("recv", &self.receives)];
        let all = collectives.chain(messages).map(|(name, counter)| (name, counter.read()));
        all.filter(|(_, calls)| calls.ended > 0)
    }
}
