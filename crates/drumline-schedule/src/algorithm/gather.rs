//! All-reduce by gathering: every rank receives all contributions and sums them itself.

use super::cost::{Cost, doublings};
use crate::step::{Loc, Rank, Span, Step};
use crate::topology::Topology;
use crate::tree::Node;

/// Ranks gather all contributions as [`bruck`](super::bruck) does: a rank that holds `h` of them, from its
/// own upwards, receives the next `h` from the rank `h` above. Then it sums.
///
/// See [`all_reduce_cost`]. Only contributions travel. Scratch holds them one after another, the rank's own
/// first, so that elements which travel together lie together.
pub(super) fn all_reduce(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let p = topology.world_size;
    if p == 1 {
        return vec![];
    }
    let held_at = |first, count| Loc::scratch(0, Span { first, count, of: 1 });

    let mut steps = vec![Step::Copy { dst: held_at(0, 1), src: Loc::data(Span::WHOLE) }];
    let mut held = 1;
    while held < p {
        let count = held.min(p - held);
        steps.push(Step::Send { to: (rank + p - held) % p, src: held_at(0, count) });
        steps.push(Step::Recv { from: (rank + held) % p, dst: held_at(held, count) });
        held += count;
    }
    let value_of = |peer: Rank| (Node::leaf(peer), held_at((peer + p - rank) % p, 1));
    let srcs = (0..p).map(value_of).collect();
    steps.push(Step::ReduceTree { dsts: vec![Loc::data(Span::WHOLE)], srcs, finish: true });
    steps
}

/// `ceil(log2 p)` rounds of one message; `(p - 1) n` elements are sent in total, and then combined.
pub(super) fn all_reduce_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let p = topology.world_size;
    let elements = (p - 1) * n;
    Cost {
        rounds: doublings(p),
        messages: doublings(p),
        elements,
        combined: elements,
        ..Cost::default()
    }
}
