//! Through memory that the ranks of one host share: operations with a root, and the barrier.

use super::Cost;
use super::shared::{leaves, wait_for_others};
use crate::step::{Loc, Rank, Span, Step};
use crate::topology::Topology;

const DATA: Loc = Loc::data(Span::WHOLE);
const SLOT: Loc = Loc::slot(Span::WHOLE);

/// The root lays its data out, and the others fetch it.
///
/// See [`broadcast_cost`]. The others post too, to say that they are here: the root begins the
/// next operation only when all have, and so is never so far ahead that it comes back to a slot
/// which is still being read.
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

/// The others lay their data out, and the root sums it.
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

/// Everyone says that it is here, and waits for all others to have said so.
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
