use std::ops::RangeInclusive;

use drumline_schedule::step::{Loc, Rank};

use crate::walk::Combine;

pub(super) struct Event {
    pub(super) round: usize,
    pub(super) kind: Kind,
}

pub(super) enum Kind {
    Message {
        from: Rank,
        to: Rank,
        src: Loc,
        dst: Loc,
        combine: Option<Combine>,
    },
    Combine {
        rank: Rank,
        dst: Loc,
        finish: bool,
        reads: Vec<Rank>,
        writes: Vec<Rank>,
    },
    Copy {
        rank: Rank,
        dst: Loc,
    },
    /// A copy from or to the memory of a neighbour.
    Reach {
        rank: Rank,
        dst: Loc,
        src: Loc,
    },
    Post {
        rank: Rank,
    },
    Wait {
        rank: Rank,
        peers: Vec<Rank>,
    },
}

impl Kind {
    /// The lanes that it touches, and the lane with its mark, if it has one.
    pub(super) fn lanes(&self) -> (Vec<Rank>, Option<Rank>) {
        match self {
            Kind::Message { from, to, combine, .. } => (vec![*from, *to], combine.map(|_| *to)),
            Kind::Combine { rank, reads, writes, .. } => {
                let lanes = [*rank].into_iter().chain(reads.iter().chain(writes).copied());
                (lanes.collect(), Some(*rank))
            }
            Kind::Reach { rank, dst, src } => {
                (vec![src.peer.unwrap_or(*rank), dst.peer.unwrap_or(*rank)], None)
            }
            Kind::Copy { rank, .. } | Kind::Post { rank } | Kind::Wait { rank, .. } => {
                (vec![*rank], Some(*rank))
            }
        }
    }
}

/// All lanes from the leftmost to the rightmost of `lanes`.
pub(super) fn hull(lanes: &[Rank]) -> RangeInclusive<Rank> {
    lanes.iter().copied().min().unwrap_or(0)..=lanes.iter().copied().max().unwrap_or(0)
}
