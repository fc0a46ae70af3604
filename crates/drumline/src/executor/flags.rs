//! How far everybody has come in the memory that neighbours share.

use drumline_schedule::step::Rank;

/// What a rank knows of the shared memory of its host: how often everybody has posted.
#[derive(Clone, Debug, Default)]
pub(crate) struct Flags {
    pub(super) epoch: Epoch,
    /// The ranks that share memory with this one, in their order, and how far each has come.
    pub(super) peers: Vec<Neighbour>,
}

/// How far the shared-memory operations of a group have come: the same on all ranks of a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Epoch {
    /// Every rank's posts before this piece.
    pub(super) base: u64,
    /// How many pieces came before.
    pub(super) pieces: u64,
    /// The piece before, if there was one.
    pub(super) previous: Option<Previous>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Previous {
    /// Every rank's posts before it.
    pub(super) base: u64,
    /// The number of the call that it was a piece of.
    pub(crate) sequence: u64,
    /// What this rank has announced.
    pub(crate) digest: u64,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Neighbour {
    pub(super) rank: Rank,
    pub(super) posted: u64,
    /// Whether its announcement of this piece has been compared, and that of the piece before.
    pub(super) met: bool,
    pub(super) met_before: bool,
}

impl Flags {
    pub(crate) fn new(neighbours: impl IntoIterator<Item = Rank>) -> Flags {
        let neighbour = |rank| Neighbour { rank, posted: 0, met: false, met_before: true };
        let mut peers: Vec<_> = neighbours.into_iter().map(neighbour).collect();
        peers.sort_unstable_by_key(|peer| peer.rank);
        Flags { epoch: Epoch::default(), peers }
    }

    pub(super) fn next_piece(&mut self, posts: u64, sequence: u64, digest: u64) {
        let Epoch { base, pieces, .. } = self.epoch;
        self.epoch = Epoch {
            base: base + posts,
            pieces: pieces + 1,
            previous: Some(Previous { base, sequence, digest }),
        };
        for peer in &mut self.peers {
            peer.met_before = std::mem::take(&mut peer.met);
        }
    }

    /// A neighbour whose announcement of the piece before has not been compared, and its count
    /// of posts from which on it can be.
    pub(super) fn owed(&self) -> Option<(Rank, u64)> {
        let previous = self.epoch.previous?;
        let owed = self.peers.iter().find(|peer| !peer.met_before)?;
        Some((owed.rank, previous.base + 1))
    }

    /// Announcements that nobody has looked at, after all neighbours have left: (rank, piece,
    /// what this rank called there).
    pub(crate) fn left_over(&self) -> impl Iterator<Item = (Rank, u64, Option<Previous>)> {
        let Epoch { base, pieces, previous } = self.epoch;
        self.peers.iter().filter_map(move |peer| match previous {
            // One that left before that call has announced nothing, and had nothing to give.
            Some(previous) if !peer.met_before && peer.posted > previous.base => {
                Some((peer.rank, pieces - 1, Some(previous)))
            }
            _ if peer.posted > base => Some((peer.rank, pieces, None)),
            _ => None,
        })
    }

    /// A neighbour has posted so often.
    pub(crate) fn on_posted(&mut self, peer: Rank, posted: u64) {
        if let Some(known) = self.of_mut(peer) {
            known.posted = known.posted.max(posted);
        }
    }

    pub(super) fn of(&self, peer: Rank) -> Option<&Neighbour> {
        let index = self.peers.binary_search_by_key(&peer, |known| known.rank).ok()?;
        self.peers.get(index)
    }

    pub(super) fn of_mut(&mut self, peer: Rank) -> Option<&mut Neighbour> {
        let index = self.peers.binary_search_by_key(&peer, |known| known.rank).ok()?;
        self.peers.get_mut(index)
    }
}
