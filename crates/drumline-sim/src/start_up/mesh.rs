//! Calls between ranks of one host: who calls whom, and which calls are accepted.

use std::collections::BTreeSet;

use drumline_engine::transport::Channel;
use drumline_schedule::step::Rank;

use crate::time::Nanos;

/// The sockets of all ranks.
#[derive(Debug, Default)]
pub(super) struct Sockets {
    calls: Vec<Call>,
    /// Ranks that have ended. Their listening sockets are closed.
    closed: BTreeSet<Rank>,
    /// When something changes for a rank, with the rank.
    pub(super) wakes: Vec<(Nanos, Rank)>,
}

#[derive(Debug)]
struct Call {
    at: Nanos,
    from: Rank,
    to: Rank,
    channel: Channel,
    let_in: bool,
}

impl Sockets {
    /// Begins a call, which arrives at the time `at`.
    pub(super) fn dial(&mut self, from: Rank, to: Rank, channel: Channel, at: Nanos) {
        self.calls.push(Call { at, from, to, channel, let_in: false });
        self.wakes.push((at, to));
    }

    /// Whether the call of a rank was accepted; `None` while it is neither accepted nor refused.
    pub(super) fn dialled(&mut self, from: Rank, to: Rank) -> Option<bool> {
        let at = self.calls.iter().position(|call| (call.from, call.to) == (from, to))?;
        let ended = match self.calls[at].let_in {
            true => true,
            false if self.closed.contains(&to) => false,
            false => return None,
        };
        self.calls.remove(at);
        Some(ended)
    }

    /// Accepts the calls that have arrived. Returns the callers.
    pub(super) fn admit(&mut self, to: Rank, now: Nanos) -> Vec<(Rank, Channel)> {
        let here = |call: &&mut Call| call.to == to && call.at <= now && !call.let_in;
        let mut came = Vec::new();
        for call in self.calls.iter_mut().filter(here) {
            call.let_in = true;
            self.wakes.push((now + ANSWER_TAKES, call.from));
            came.push((call.from, call.channel));
        }
        came
    }

    /// Closes a rank's listening socket. Its callers notice.
    pub(super) fn close(&mut self, rank: Rank, now: Nanos) {
        self.closed.insert(rank);
        let callers = self.calls.iter().filter(|call| call.to == rank).map(|call| call.from);
        self.wakes.extend(callers.map(|from| (now + ANSWER_TAKES, from)));
    }
}

/// How long it takes until a caller learns that its call was accepted, or that the other end has closed.
const ANSWER_TAKES: Nanos = 5_000;
