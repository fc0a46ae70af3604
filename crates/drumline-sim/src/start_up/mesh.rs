//! Calls between ranks of one host: who calls whom, and who has been let in.

use std::collections::BTreeSet;

use drumline_engine::transport::Channel;
use drumline_schedule::step::Rank;

use crate::time::Nanos;

/// The sockets of all ranks.
#[derive(Debug, Default)]
pub(super) struct Sockets {
    calls: Vec<Call>,
    /// Ranks that have ended, and what they listened on with them.
    closed: BTreeSet<Rank>,
    /// When something changes for a rank.
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
    /// Begins to call a rank. The call arrives at this time.
    pub(super) fn dial(&mut self, from: Rank, to: Rank, channel: Channel, at: Nanos) {
        self.calls.push(Call { at, from, to, channel, let_in: false });
        self.wakes.push((at, to));
    }

    /// How the call of a rank ended; `None` while nobody has let it in.
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

    /// Lets in those whose calls have arrived.
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

    /// Closes what a rank listened on. Its callers notice.
    pub(super) fn close(&mut self, rank: Rank, now: Nanos) {
        self.closed.insert(rank);
        let callers = self.calls.iter().filter(|call| call.to == rank).map(|call| call.from);
        self.wakes.extend(callers.map(|from| (now + ANSWER_TAKES, from)));
    }
}

/// How long a rank takes to hear that it was let in, or that the other end has closed.
const ANSWER_TAKES: Nanos = 5_000;
