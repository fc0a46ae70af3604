//! Through memory that the ranks of one host share: collectives with a root, and barriers.

use super::cost::Cost;
use super::shared::{leaves, others, wait_for_others};
use crate::step::{Loc, Rank, Span, Step};
use crate::topology::Topology;

const DATA: Loc = Loc::data(Span::WHOLE);
const SLOT: Loc = Loc::slot(Span::WHOLE);

/// The root copies its data to its slot, and the others copy it from there.
///
/// See [`broadcast_cost`]. The others post too, to say that they have entered. The root begins the next call
/// only when all have, so it never comes back to a slot that others still read.
pub(super) fn broadcast(topology: &Topology, rank: Rank, root: Rank) -> Vec<Step> {
    match (topology.world_size, rank == root) {
        (1, _) => vec![],
        (_, true) => vec![Step::Copy { dst: SLOT, src: DATA }, Step::Post],
        (_, false) => vec![
            Step::Post,
            Step::Wait { peer: root, upto: 1 },
            Step::Copy { dst: DATA, src: SLOT.of(root) },
        ],
    }
}

/// 1 round. A rank reads `n` elements.
pub(super) fn broadcast_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    match topology.world_size {
        1 => Cost::default(),
        _ => Cost { rounds: 1, shared_elements: n, ..Cost::default() },
    }
}

/// The others copy their data to their slots, and the root sums the slots.
///
/// See [`reduce_cost`].
pub(super) fn reduce(topology: &Topology, rank: Rank, root: Rank) -> Vec<Step> {
    let p = topology.world_size;
    if p == 1 {
        return vec![];
    }
    if rank != root {
        return vec![Step::Copy { dst: SLOT, src: DATA }, Step::Post];
    }
    let mut steps = vec![Step::Post];
    steps.extend(wait_for_others(p, rank, 1));
    steps.push(Step::ReduceTree {
        dsts: vec![DATA],
        srcs: leaves(p, |peer| if peer == rank { DATA } else { SLOT.of(peer) }),
        finish: true,
    });
    steps
}

/// 1 round. The root reads the `n` elements of each of its `p - 1` peers, and combines them.
pub(super) fn reduce_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let p = topology.world_size;
    let of_peers = (p - 1) * n;
    let rounds = usize::from(p > 1);
    Cost { rounds, combined: of_peers, shared_elements: of_peers, ..Cost::default() }
}

/// The others copy their input to their slots, and the root copies it from there.
///
/// See [`gather_cost`].
pub(super) fn gather(topology: &Topology, rank: Rank, root: Rank) -> Vec<Step> {
    let p = topology.world_size;
    let input = Loc::input(Span::WHOLE);
    if rank != root {
        return vec![Step::Copy { dst: SLOT, src: input }, Step::Post];
    }
    let block = |peer| Loc::data(Span::block(peer, p));
    let mut steps: Vec<Step> = (p > 1).then_some(Step::Post).into_iter().collect();
    steps.push(Step::Copy { dst: block(rank), src: input });
    for peer in others(p, rank) {
        steps.push(Step::Wait { peer, upto: 1 });
        steps.push(Step::Copy { dst: block(peer), src: SLOT.of(peer) });
    }
    steps
}

/// 1 round. The root reads the `n` elements of each of its `p - 1` peers.
pub(super) fn gather_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let p = topology.world_size;
    Cost { rounds: usize::from(p > 1), shared_elements: (p - 1) * n, ..Cost::default() }
}

/// The root copies the blocks for the others to its slot, and each rank copies its block from there.
///
/// See [`scatter_cost`]. The others post for the same reason as in a [`broadcast`].
pub(super) fn scatter(topology: &Topology, rank: Rank, root: Rank) -> Vec<Step> {
    let p = topology.world_size;
    let block = |peer| Span::block(peer, p);
    if rank != root {
        return vec![
            Step::Post,
            Step::Wait { peer: root, upto: 1 },
            Step::Copy { dst: DATA, src: Loc::slot(block(rank)).of(root) },
        ];
    }
    let lay_out = |peer| Step::Copy { dst: Loc::slot(block(peer)), src: Loc::input(block(peer)) };
    let mut steps: Vec<Step> = others(p, rank).map(lay_out).collect();
    if p > 1 {
        steps.push(Step::Post);
    }
    steps.push(Step::Copy { dst: DATA, src: Loc::input(block(rank)) });
    steps
}

/// 1 round. A rank reads its block of `n` elements.
pub(super) fn scatter_cost(topology: &Topology, root: Rank, n: usize) -> Cost {
    broadcast_cost(topology, root, n)
}

/// Every rank posts, and waits for the post of every other rank.
///
/// See [`barrier_cost`].
pub(super) fn barrier(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let p = topology.world_size;
    let post = (p > 1).then_some(Step::Post);
    post.into_iter().chain(wait_for_others(p, rank, 1)).collect()
}

/// 1 round.
pub(super) fn barrier_cost(topology: &Topology, _root: Rank, _elements: usize) -> Cost {
    Cost { rounds: usize::from(topology.world_size > 1), ..Cost::default() }
}
