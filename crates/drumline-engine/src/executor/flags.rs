//! How far everybody has come in the memory that neighbours share.

use drumline_schedule::step::Rank;

/// What a rank knows of the shared memory of its host: how often everybody has posted.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    pub(crate) epoch: Epoch,
    /// The ranks that share memory with this one, by seat, and how far each has come.
    pub(crate) peers: Vec<Neighbour>,
}

/// One of the ranks that share memory with this one, counted in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seat(pub usize);

/// Where each of them is found: schedules name ranks.
#[derive(Clone, Debug, Default)]
pub struct Seats {
    first: Rank,
    /// From the first of them to the last, who mostly follow each other.
    by_rank: Vec<Option<Seat>>,
}

impl Seats {
    /// Of these ranks, in their order.
    pub fn of(neighbours: &[Rank]) -> Seats {
        let [Some(&first), Some(last)] = [neighbours.first(), neighbours.last()] else {
            return Seats::default();
        };
        let mut by_rank = vec![None; last - first + 1];
        for (seat, rank) in neighbours.iter().enumerate() {
            by_rank[rank - first] = Some(Seat(seat));
        }
        Seats { first, by_rank }
    }

    #[inline]
    pub fn find(&self, rank: Rank) -> Option<Seat> {
        *self.by_rank.get(rank.wrapping_sub(self.first))?
    }
}

/// How far the shared-memory operations of a group have come: the same on all ranks of a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Epoch {
    /// Every rank's posts before this piece.
    pub(crate) base: u64,
    /// How many pieces came before.
    pub(crate) pieces: u64,
    /// The piece before, if there was one.
    pub(crate) previous: Option<Previous>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Previous {
    /// Every rank's posts before it.
    pub(crate) base: u64,
    /// The number of the call that it was a piece of.
    pub sequence: u64,
    /// What this rank has announced.
    pub digest: u64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Neighbour {
    pub(crate) rank: Rank,
    pub(crate) posted: u64,
    /// Of how many pieces its announcements have been compared: of all before this one, or all but
    /// one, and maybe of this one, too.
    met: u64,
}

impl Flags {
    pub fn new(neighbours: impl IntoIterator<Item = Rank>) -> Flags {
        let neighbour = |rank| Neighbour { rank, posted: 0, met: 0 };
        let mut ranks: Vec<Rank> = neighbours.into_iter().collect();
        ranks.sort_unstable();
        Flags { epoch: Epoch::default(), peers: ranks.into_iter().map(neighbour).collect() }
    }

    pub(crate) fn next_piece(&mut self, posts: u64, sequence: u64, digest: u64) {
        let Epoch { base, pieces, .. } = self.epoch;
        self.epoch = Epoch {
            base: base + posts,
            pieces: pieces + 1,
            previous: Some(Previous { base, sequence, digest }),
        };
    }

    /// A neighbour's announcement of a piece has been compared: of this one, or of the one before.
    pub(crate) fn on_met(&mut self, seat: Seat, piece: u64) {
        self.of_mut(seat).met = piece + 1;
    }

    /// What was compared with a call that posted nothing is to be compared with the next one.
    pub(crate) fn forget_met(&mut self) {
        let pieces = self.epoch.pieces;
        self.peers.iter_mut().for_each(|peer| peer.met = peer.met.min(pieces));
    }

    /// Whether a neighbour's announcement of this piece has been compared.
    pub(crate) fn has_met(&self, seat: Seat) -> bool {
        self.of(seat).met > self.epoch.pieces
    }

    /// Whether that of the piece before has been.
    pub(crate) fn has_met_before(&self, seat: Seat) -> bool {
        self.of(seat).met >= self.epoch.pieces
    }

    /// A neighbour that may not have posted in the piece before, or whose
    /// announcement there has not been compared, and its count of posts from which on it can be.
    pub(crate) fn owed(&self) -> Option<(Seat, u64)> {
        let Epoch { pieces, previous, .. } = self.epoch;
        let level = previous?.base + 1;
        let is_owed = |peer: &Neighbour| peer.posted < level || peer.met < pieces;
        let owed = self.peers.iter().position(is_owed)?;
        Some((Seat(owed), level))
    }

    /// Announcements that nobody has looked at, after all neighbours have left: (whose, piece,
    /// what this rank called there).
    pub fn left_over(&self) -> impl Iterator<Item = (Seat, u64, Option<Previous>)> {
        let Epoch { base, pieces, previous } = self.epoch;
        self.peers.iter().enumerate().filter_map(move |(seat, peer)| match previous {
            // One that left before that call has announced nothing, and had nothing to give.
            Some(previous) if peer.met < pieces && peer.posted > previous.base => {
                Some((Seat(seat), pieces - 1, Some(previous)))
            }
            _ if peer.posted > base => Some((Seat(seat), pieces, None)),
            _ => None,
        })
    }

    /// A neighbour has posted so often, as it says in one of its lines. Returns what is known now.
    pub fn on_posted(&mut self, seat: Seat, posted: u64) -> u64 {
        let known = self.of_mut(seat);
        known.posted = known.posted.max(posted);
        known.posted
    }

    /// Whether a neighbour is known to have posted so often in the call at hand, or `find` finds that
    /// it has: how often then.
    #[inline]
    pub(crate) fn meets(
        &mut self,
        seat: Seat,
        level: u64,
        find: impl FnOnce() -> Option<u64>,
    ) -> bool {
        let pieces = self.epoch.pieces;
        let known = self.of_mut(seat);
        if known.met > pieces && known.posted >= level {
            return true;
        }
        // What was announced before this piece is to be compared first.
        let found = if known.met >= pieces { find() } else { None };
        if let Some(posted) = found {
            (known.met, known.posted) = (pieces + 1, known.posted.max(posted));
        }
        found.is_some()
    }

    pub(crate) fn of(&self, seat: Seat) -> &Neighbour {
        &self.peers[seat.0]
    }

    pub(crate) fn of_mut(&mut self, seat: Seat) -> &mut Neighbour {
        &mut self.peers[seat.0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_neighbour_has_a_seat_and_nobody_else() {
        for neighbours in [&[][..], &[0], &[7], &[0, 1, 3], &[5, 6, 40]] {
            let seats = Seats::of(neighbours);
            let found = |rank: Rank| seats.find(rank).map(|Seat(seat)| neighbours[seat]);
            for rank in 0..50 {
                let expected = neighbours.contains(&rank).then_some(rank);
                assert_eq!(found(rank), expected, "{rank} of {neighbours:?}");
            }
        }
    }
}
