//! Through memory that the ranks of one host share: a block for every rank.
//!
//! Steps name the blocks of such buffers one by one. So an executor with short slots can run a schedule on
//! one window of each block after another, and blocks may have different lengths.

use super::cost::Cost;
use super::shared::{leaves, others, wait_for_others};
use crate::schedule::Shelves;
use crate::step::{Loc, Rank, Span, Step};
use crate::topology::Topology;

/// Every rank copies its contribution to its slot, and copies the others' contributions from their slots.
///
/// See [`all_gather_cost`].
pub(super) fn all_gather(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let p = topology.world_size;
    let input = Loc::input(Span::WHOLE);
    let block = |peer| Span::block(peer, p);
    let mut steps = vec![];
    if p > 1 {
        steps.push(Step::Copy { dst: Loc::slot(block(rank)), src: input });
        steps.push(Step::Post);
    }
    steps.push(Step::Copy { dst: Loc::data(block(rank)), src: input });
    for peer in others(p, rank) {
        let (dst, src) = (Loc::data(block(peer)), Loc::slot(block(peer)).of(peer));
        steps.push(Step::Wait { peer, upto: 1 });
        steps.push(Step::Copy { dst, src });
    }
    steps
}

/// A slot of an [`all_gather`] holds nothing but the block of its owner.
pub(super) fn one_shelf(topology: &Topology, _rank: Rank) -> Shelves {
    Shelves::shared(vec![0; topology.world_size], 1)
}

/// 1 round. A rank reads the `n` elements of each of its `p - 1` peers.
pub(super) fn all_gather_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let p = topology.world_size;
    Cost { rounds: usize::from(p > 1), shared_elements: (p - 1) * n, ..Cost::default() }
}

/// Every rank copies the blocks for others to its slot, and sums its block over all slots.
///
/// ```text
///   rank 0   .  a1 a2 |            | a0 + b0 + c0 -> data
///   rank 1   b0 .  b2 | post, wait | a1 + b1 + c1 -> data
///   rank 2   c0 c1 .  |            | a2 + b2 + c2 -> data
/// ```
///
/// See [`reduce_scatter_cost`].
pub(super) fn reduce_scatter(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let p = topology.world_size;
    let data = Loc::data(Span::WHOLE);
    let own = Span::block(rank, p);
    if p == 1 {
        return vec![Step::Copy { dst: data, src: Loc::input(own) }];
    }
    let mut steps = lay_out_for_others(p, rank);
    steps.push(Step::Post);
    steps.extend(wait_for_others(p, rank, 1));
    steps.push(Step::ReduceTree {
        dsts: vec![data],
        srcs: leaves(p, |peer| match peer == rank {
            true => Loc::input(own),
            false => Loc::slot(own).of(peer),
        }),
        finish: true,
    });
    steps
}

/// 1 round. A rank reads a block of `n` elements from each of its `p - 1` peers, and combines
/// them.
pub(super) fn reduce_scatter_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let p = topology.world_size;
    let of_peers = (p - 1) * n;
    let rounds = usize::from(p > 1);
    Cost { rounds, combined: of_peers, shared_elements: of_peers, ..Cost::default() }
}

/// Every rank copies the blocks for others to its slot, and copies its block from each slot.
///
/// See [`all_to_all_cost`].
pub(super) fn all_to_all(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let p = topology.world_size;
    let own = Span::block(rank, p);
    let mut steps = lay_out_for_others(p, rank);
    if p > 1 {
        steps.push(Step::Post);
    }
    steps.push(Step::Copy { dst: Loc::data(own), src: Loc::input(own) });
    for peer in others(p, rank) {
        let dst = Loc::data(Span::block(peer, p));
        steps.push(Step::Wait { peer, upto: 1 });
        steps.push(Step::Copy { dst, src: Loc::slot(own).of(peer) });
    }
    steps
}

/// 1 round. A rank reads a block of `n` elements from each of its `p - 1` peers.
pub(super) fn all_to_all_cost(topology: &Topology, root: Rank, n: usize) -> Cost {
    all_gather_cost(topology, root, n)
}

fn lay_out_for_others(p: usize, rank: Rank) -> Vec<Step> {
    let blocks = others(p, rank).map(|peer| Span::block(peer, p));
    blocks.map(|block| Step::Copy { dst: Loc::slot(block), src: Loc::input(block) }).collect()
}
