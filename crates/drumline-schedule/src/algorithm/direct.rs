//! Direct exchange: everyone talks to everyone, twice.

use super::Cost;
use crate::step::{Loc, Rank, Span, Step};
use crate::topology::Topology;
use crate::tree::Node;

/// Block `i` of the data belongs to rank `i`. Every rank sends each block to its owner; the owner
/// sums the `p` copies in one pass and sends the result to everyone.
///
/// ```text
///   rank 0   a0 a1 a2          s0  .  .          s0 s1 s2
///   rank 1   b0 b1 b2    ->     . s1  .    ->    s0 s1 s2      si = ai + bi + ci
///   rank 2   c0 c1 c2           .  . s2          s0 s1 s2
/// ```
///
/// See [`all_reduce_cost`]. No rank can send less, and leaves and results travel but never
/// partial sums, so narrow floats stay narrow on the wire. Scratch: a block for every peer.
pub(super) fn all_reduce(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let p = topology.world_size;
    if p == 1 {
        return vec![];
    }
    // Everyone starts with its next neighbour, so that no rank is everybody's first target.
    let receivers = || (1..p).map(|distance| (rank + distance) % p);
    let senders = || (1..p).map(|distance| (rank + p - distance) % p);
    let own = Span::block(rank, p);
    let copy_of = |peer: Rank| match peer == rank {
        true => Loc::data(own),
        false => Loc::scratch(peer, own),
    };

    let mut steps = vec![];
    steps.extend(receivers().map(|to| Step::Send { to, src: Loc::data(Span::block(to, p)) }));
    steps.extend(senders().map(|from| Step::Recv { from, dst: copy_of(from) }));
    steps.push(Step::ReduceTree {
        dsts: vec![Loc::data(own)],
        srcs: (0..p).map(|peer| (Node::leaf(peer), copy_of(peer))).collect(),
        finish: true,
    });
    steps.extend(receivers().map(|to| Step::Send { to, src: Loc::data(own) }));
    steps.extend(senders().map(|from| Step::Recv { from, dst: Loc::data(Span::block(from, p)) }));
    steps
}

/// 2 rounds and `2 (p - 1)` messages. A rank with a block of `b` elements sends `n - b` and then
/// `(p - 1) b`; the largest block has `ceil(n / p)`.
pub(super) fn all_reduce_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    match topology.world_size {
        1 => Cost::default(),
        p => Cost {
            rounds: 2,
            messages: 2 * (p - 1),
            elements: n + (p - 2) * n.div_ceil(p),
            ..Cost::default()
        },
    }
}
