//! All-reduce through memory that the ranks of one host share.
//!
//! In every algorithm here and beside it (`shared_rooted`, `shared_blocks`, `registered`) each rank posts
//! equally often, as [`step`](crate::step) demands.

use super::cost::Cost;
use crate::step::{Loc, Rank, Span, Step};
use crate::topology::Topology;
use crate::tree::Node;

const DATA: Loc = Loc::data(Span::WHOLE);
const SLOT: Loc = Loc::slot(Span::WHOLE);

/// Every rank copies its data to its slot, and sums all slots.
///
/// ```text
///   rank 0   a -> slot |            | a + b + c -> data
///   rank 1   b -> slot | post, wait | a + b + c -> data
///   rank 2   c -> slot |            | a + b + c -> data
/// ```
///
/// See [`oneshot_cost`]. It takes one round, so it is for short data. Every rank computes the
/// whole sum, so it is not for long data.
pub(super) fn oneshot(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let p = topology.world_size;
    if p == 1 {
        return vec![];
    }
    let mut steps = vec![Step::Copy { dst: SLOT, src: DATA }, Step::Post];
    steps.extend(wait_for_others(p, rank, 1));
    steps.push(Step::ReduceTree {
        dsts: vec![DATA],
        srcs: leaves(p, |peer| if peer == rank { DATA } else { SLOT.of(peer) }),
        finish: true,
    });
    steps
}

/// 1 round. A rank reads the `n` elements of each of its `p - 1` peers, and combines them.
pub(super) fn oneshot_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let p = topology.world_size;
    let of_peers = (p - 1) * n;
    let rounds = usize::from(p > 1);
    Cost { rounds, combined: of_peers, shared_elements: of_peers, ..Cost::default() }
}

/// Block `i` belongs to rank `i`. Every rank copies the blocks of other ranks to its slot. It sums its own
/// block with the copies in the slots of the others, stores the sum in its slot, and copies the sums of the
/// others from their slots.
///
/// ```text
///   rank 0    . a1 a2 |            | s0 a1 a2 |            | s0 s1 s2
///   rank 1   b0  . b2 | post, wait | b0 s1 b2 | post, wait | s0 s1 s2    si = ai + bi + ci
///   rank 2   c0 c1  . |            | c0 c1 s2 |            | s0 s1 s2
/// ```
///
/// See [`twoshot_cost`]. Between the posts only rank `i` accesses block `i` of the slots. Ranks
/// read sums from others instead of writing them to others, because sums in slots must be copied anyway.
pub(super) fn twoshot(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let p = topology.world_size;
    if p == 1 {
        return vec![];
    }
    let own = Span::block(rank, p);
    let below = Span { first: 0, count: rank, of: p };
    let above = Span { first: rank + 1, count: p - rank - 1, of: p };
    let of_others = [below, above].into_iter().filter(|span| span.count > 0);
    let lay_out = |span| Step::Copy { dst: Loc::slot(span), src: Loc::data(span) };
    let own_of = |peer: Rank| if peer == rank { Loc::data(own) } else { Loc::slot(own).of(peer) };

    let mut steps: Vec<Step> = of_others.map(lay_out).collect();
    steps.push(Step::Post);
    steps.extend(wait_for_others(p, rank, 1));
    steps.push(Step::ReduceTree {
        dsts: vec![Loc::slot(own), Loc::data(own)],
        srcs: leaves(p, own_of),
        finish: true,
    });
    steps.push(Step::Post);
    for peer in others(p, rank) {
        let block = Span::block(peer, p);
        steps.push(Step::Wait { peer, upto: 2 });
        steps.push(Step::Copy { dst: Loc::data(block), src: Loc::slot(block).of(peer) });
    }
    steps
}

/// 2 rounds. A rank with a block of `b` elements reads and combines `(p - 1) b`, and then reads
/// `n - b`; the largest block has `ceil(n / p)`.
pub(super) fn twoshot_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    match topology.world_size {
        1 => Cost::default(),
        p => Cost {
            rounds: 2,
            combined: (p - 1) * n.div_ceil(p),
            shared_elements: n + (p - 2) * n.div_ceil(p),
            ..Cost::default()
        },
    }
}

/// The other ranks. Each rank starts with the next higher one, so that not all ranks access the same memory
/// first.
pub(super) fn others(p: usize, rank: Rank) -> impl Iterator<Item = Rank> {
    (1..p).map(move |distance| (rank + distance) % p)
}

pub(super) fn wait_for_others(p: usize, rank: Rank, upto: usize) -> impl Iterator<Item = Step> {
    others(p, rank).map(move |peer| Step::Wait { peer, upto })
}

/// The contribution of each of `p` ranks, as leaves of the tree.
pub(super) fn leaves(p: usize, of: impl Fn(Rank) -> Loc) -> Vec<(Node, Loc)> {
    (0..p).map(|rank| (Node::leaf(rank), of(rank))).collect()
}
