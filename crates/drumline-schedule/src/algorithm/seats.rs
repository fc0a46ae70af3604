//! The seat of a rank in algorithms in which the ranks of a host, or of a memory node, add first.

use super::shared::others;
use crate::step::{Loc, Rank, Span, Step};
use crate::tree::Node;

/// The seat of a rank in its group: its host, or its memory node. The data has as many slices as the smallest
/// group has ranks. The ranks on seat `i` of all groups work on slice `i`, and each has a part of it.
pub(super) struct Seats<'a> {
    /// The ranks of each group, ascending.
    pub(super) groups: &'a [Vec<Rank>],
    /// The number of slices.
    pub(super) slices: usize,
    /// The group of the rank.
    pub(super) group: usize,
    /// Its index among the ranks of its group.
    pub(super) seat: usize,
}

impl Seats<'_> {
    /// The seat of `rank` in its group.
    pub(super) fn of(groups: &[Vec<Rank>], group: usize, rank: Rank) -> Seats<'_> {
        let seat = groups[group].partition_point(|&other| other < rank);
        Seats { groups, slices: slices(groups), group, seat }
    }

    pub(super) fn slice(&self, seat: usize) -> Span {
        Span::block(seat, self.slices)
    }

    /// Empty where smaller groups have no such seat.
    pub(super) fn own_slice(&self) -> Option<Span> {
        (self.seat < self.slices).then(|| self.slice(self.seat))
    }

    /// The part of the rank's slice that belongs to a group.
    pub(super) fn part(&self, group: usize) -> Span {
        let groups = self.groups.len();
        Span::block(self.seat * groups + group, self.slices * groups)
    }

    /// The rank on this seat of another group.
    pub(super) fn counterpart(&self, group: usize) -> Rank {
        self.groups[group][self.seat]
    }

    /// The other groups.
    pub(super) fn other_groups(&self) -> impl Iterator<Item = usize> + use<> {
        others(self.groups.len(), self.group)
    }

    /// The other ranks of the group, and their seats.
    pub(super) fn peers(&self) -> impl Iterator<Item = (usize, Rank)> {
        let ranks = &self.groups[self.group];
        others(ranks.len(), self.seat).map(|seat| (seat, ranks[seat]))
    }

    /// Sums the rank's slice over its group, into `dst`. `own` is the contribution of this rank; `from` says where those
    /// of others lie. The rank reads them when their owners have posted once.
    pub(super) fn sum_of_group(
        &self,
        own: Loc,
        from: fn(Span) -> Loc,
        dst: Loc,
        finish: bool,
    ) -> Vec<Step> {
        let ranks = &self.groups[self.group];
        let mut steps: Vec<Step> =
            self.peers().map(|(_, peer)| Step::Wait { peer, upto: 1 }).collect();
        if ranks.len() > 1 {
            let of_seat = |seat: usize| match seat == self.seat {
                true => own,
                false => from(own.span).of(ranks[seat]),
            };
            let srcs = (0..ranks.len()).map(|seat| (Node::leaf(seat), of_seat(seat))).collect();
            steps.push(Step::ReduceTree { dsts: vec![dst], srcs, finish });
        }
        steps
    }
}

/// The number of slices: as many as the smallest group has ranks.
pub(super) fn slices(groups: &[Vec<Rank>]) -> usize {
    groups.iter().map(Vec::len).min().unwrap_or(1)
}

/// The maximum of a figure over all ranks that have a slice. The figure depends on the number of ranks of the
/// group, the elements of the slice, and the elements of the group's part of it. The data has `n` elements.
pub(super) fn busiest(
    groups: &[Vec<Rank>],
    n: usize,
    of: impl Fn(usize, usize, usize) -> usize,
) -> usize {
    let slices = slices(groups);
    let len = |block: usize, blocks: usize| Span::block(block, blocks).resolve(n).len();
    let of_seat = |group: usize, seat: usize| {
        let part = len(seat * groups.len() + group, slices * groups.len());
        of(groups[group].len(), len(seat, slices), part)
    };
    let seats = (0..groups.len()).flat_map(|group| (0..slices).map(move |seat| (group, seat)));
    seats.map(|(group, seat)| of_seat(group, seat)).max().unwrap_or(0)
}
