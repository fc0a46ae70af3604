//! What the calls of a group have taken on this rank.

use std::time::Duration;

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

impl Calls {
    /// Adds a call that has ended.
    pub fn add(&mut self, bytes: u64, time: Duration) {
        self.ended += 1;
        self.bytes = self.bytes.saturating_add(bytes);
        self.time = self.time.saturating_add(time);
    }
}

/// The calls of all kinds.
#[derive(Clone, Debug, Default)]
pub struct Usage {
    collectives: [Calls; Collective::ALL.len()],
    sends: Calls,
    receives: Calls,
}

impl Usage {
    /// The calls of one collective.
    pub fn of(&mut self, collective: Collective) -> &mut Calls {
        // Codes begin at 1.
        &mut self.collectives[usize::from(collective.code()) - 1]
    }

    /// Adds a message that has arrived or left.
    pub fn add_message(&mut self, call: &PointCall, time: Duration) {
        let calls = match call.direction {
            Direction::Send => &mut self.sends,
            Direction::Receive => &mut self.receives,
        };
        calls.add(call.bytes(), time);
    }

    /// The time of all collectives.
    pub fn collective_time(&self) -> Duration {
        self.collectives.iter().map(|calls| calls.time).sum()
    }

    /// Every kind that was called, by the name of its function.
    pub fn by_name(&self) -> impl Iterator<Item = (&'static str, Calls)> {
        let collectives = Collective::ALL.map(Collective::name).into_iter().zip(self.collectives);
        let messages = [("send", self.sends), ("recv", self.receives)];
        collectives.chain(messages).filter(|(_, calls)| calls.ended > 0)
    }
}
