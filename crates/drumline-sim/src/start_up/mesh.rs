//! Calls between ranks of one host: who calls whom, and which calls are accepted.

use std::collections::BTreeSet;

use drumline_engine::transport::Channel;
use drumline_schedule::step::Rank;

use crate::time::Nanos;

/// How the sign of another rank is seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sees {
    /// Both are on one host.
    Near,
    /// It is on another host.
    Elsewhere,
    /// It is on another host, which looks like this one: nobody listens under its name here.
    Copy,
}

/// The sockets of all ranks.
#[derive(Debug, Default)]
pub(super) struct Sockets {
    calls: Vec<Call>,
    /// Ranks that have ended. Their listening sockets are closed.
    closed: BTreeSet<Rank>,
    /// Ranks whose processes have ended. Those that have started up go on.
    ended: BTreeSet<Rank>,
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

    /// The process of a rank ends.
    pub(super) fn end(&mut self, rank: Rank) {
        self.ended.insert(rank);
    }

    /// Of the signs of ranks, those that are reached, and those that are closed, on the way that `sees` tells.
    pub(super) fn look(
        &self,
        signs: &BTreeSet<String>,
        sees: impl Fn(Rank) -> Sees,
    ) -> [BTreeSet<String>; 2] {
        let [mut reached, mut closed] = [BTreeSet::new(), BTreeSet::new()];
        for sign in signs {
            let mut words = sign.split(' ').skip(2);
            let Some(rank) = words.next().and_then(|it| it.parse().ok()) else { continue };
            match (sees(rank), words.next()) {
                (Sees::Elsewhere, None) => {}
                (Sees::Copy, _) => drop(closed.insert(sign.clone())),
                _ if self.ended.contains(&rank) => drop(closed.insert(sign.clone())),
                _ => drop(reached.insert(sign.clone())),
            }
        }
        [reached, closed]
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
