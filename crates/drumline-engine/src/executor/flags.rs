//! How far each rank of a host has come in the memory that they share.

use drumline_schedule::step::Rank;

/// What this rank knows of the shared memory of its host: how often each neighbour has posted.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    pub(crate) epoch: Epoch,
    /// The neighbours, by seat.
    pub(crate) peers: Vec<Neighbour>,
}

/// The place of a neighbour: its index among this rank's neighbours, in the order of their ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seat(pub usize);

/// Finds the seat of each neighbour. Schedules name ranks, so each schedule needs this table.
#[derive(Clone, Debug, Default)]
pub struct Seats {
    first: Rank,
    /// One entry for each rank from the first neighbour to the last. Ranks of a host mostly have consecutive
    /// numbers.
    by_rank: Vec<Option<Seat>>,
}

impl Seats {
    /// The seats of `neighbours`, which are in ascending order.
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

/// How far a group has come in shared memory; the same on all ranks of a host. A piece is one turn of a call
/// that posts: a call on long data takes several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Epoch {
    /// How often each rank had posted before this piece.
    pub(crate) base: u64,
    /// The number of pieces before this one.
    pub(crate) pieces: u64,
    /// The piece before this one, if there was one.
    pub(crate) previous: Option<Previous>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Previous {
    /// How often each rank had posted before that piece.
    pub(crate) base: u64,
    /// The number of the call to which that piece belonged.
    pub sequence: u64,
    /// The digest that this rank announced in that piece.
    pub digest: u64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Neighbour {
    pub(crate) rank: Rank,
    pub(crate) posted: u64,
    /// The number of pieces of which this rank has compared the neighbour's announcement. It lags behind
    /// `Epoch::pieces` by at most one piece, or is one ahead when this piece was compared.
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

    /// A neighbour's announcement of a piece has been compared. `piece` is the present piece or the one
    /// before.
    pub(crate) fn on_met(&mut self, seat: Seat, piece: u64) {
        self.of_mut(seat).met = piece + 1;
    }

    /// The call that ended posted nothing, so announcements that were compared with it must be compared
    /// again, with the next call.
    pub(crate) fn forget_met(&mut self) {
        let pieces = self.epoch.pieces;
        self.peers.iter_mut().for_each(|peer| peer.met = peer.met.min(pieces));
    }

    /// Whether a neighbour's announcement of this piece has been compared.
    pub(crate) fn has_met(&self, seat: Seat) -> bool {
        self.of(seat).met > self.epoch.pieces
    }

    /// Whether a neighbour's announcement of the piece before this one has been compared.
    pub(crate) fn has_met_before(&self, seat: Seat) -> bool {
        self.of(seat).met >= self.epoch.pieces
    }

    /// A neighbour whose announcement of the piece before this one has not been compared, or that may not
    /// have posted in that piece. Also returns the count of posts from which the announcement can be
    /// compared.
    pub(crate) fn owed(&self) -> Option<(Seat, u64)> {
        let Epoch { pieces, previous, .. } = self.epoch;
        let level = previous?.base + 1;
        let is_owed = |peer: &Neighbour| peer.posted < level || peer.met < pieces;
        let owed = self.peers.iter().position(is_owed)?;
        Some((Seat(owed), level))
    }

    /// The announcements that were not compared when all neighbours had left. Each item has the neighbour,
    /// the piece, and what this rank announced for the piece.
    pub fn left_over(&self) -> impl Iterator<Item = (Seat, u64, Option<Previous>)> {
        let Epoch { base, pieces, previous } = self.epoch;
        self.peers.iter().enumerate().filter_map(move |(seat, peer)| match previous {
            // A neighbour that left before that call has announced nothing, and nobody needed anything from
            // it.
            Some(previous) if peer.met < pieces && peer.posted > previous.base => {
                Some((Seat(seat), pieces - 1, Some(previous)))
            }
            _ if peer.posted > base => Some((Seat(seat), pieces, None)),
            _ => None,
        })
    }

    /// One of a neighbour's lines says that it has posted this often. Returns the highest count known.
    pub fn on_posted(&mut self, seat: Seat, posted: u64) -> u64 {
        let known = self.of_mut(seat);
        known.posted = known.posted.max(posted);
        known.posted
    }

    /// Whether a neighbour has posted at least `level` times in the present call. `find` looks at its line
    /// and returns the count of posts if it is enough.
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
        // The announcement of the piece before must be compared first.
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
