//! In registered buffers, which all ranks of one host can access, without slots.
//!
//! A rank posts when others may access its buffer, and again when it has finished with the buffers of others.
//! Between the two posts each rank works on a part of its own, in all buffers.
//!
//! The [collective](crate::Collective::registered_buffer) says which buffer others access. Scatter has no
//! algorithm here: only its root brings data, so the root would have to make all copies.

use super::cost::Cost;
use super::shared::{leaves, others, wait_for_others};
use crate::step::{Loc, Rank, Span, Step};
use crate::topology::Topology;
use crate::tree::Node;

/// Block `i` belongs to rank `i`, which reads it from the data of all ranks, sums it, and writes it to the
/// data of all ranks, in one pass.
///
/// ```text
///   rank 0   a0 a1 a2 |            | rank 0 sums a0, b0, c0 into all |            | s0 s1 s2
///   rank 1   b0 b1 b2 | post, wait | rank 1 sums a1, b1, c1 into all | post, wait | s0 s1 s2
///   rank 2   c0 c1 c2 |            | rank 2 sums a2, b2, c2 into all |            | s0 s1 s2
/// ```
///
/// See [`all_reduce_cost`].
pub(super) fn all_reduce(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let part = Part::of(topology, rank);
    let dsts = (0..part.ranks).map(|owner| part.in_data_of(owner)).collect();
    let srcs = part.leaves(part.ranks);
    part.between_posts(vec![Step::ReduceTree { dsts, srcs, finish: true }])
}

/// 2 rounds. A rank reads its block from each of its `p - 1` peers, combines it and writes it to
/// each of them; the largest block has `ceil(n / p)` elements.
pub(super) fn all_reduce_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let peers = topology.world_size - 1;
    cost(topology, n, peers, |_| 2 * peers)
}

/// Like [`all_reduce`], but a sum stays with the rank that it belongs to. Ranks wait until all sums are there.
///
/// See [`reduce_slices_cost`].
pub(super) fn reduce_slices(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let part = Part::of(topology, rank);
    part.between_posts(vec![part.sum_into(rank, part.ranks)])
}

/// 2 rounds. A rank reads its block from each of its `p - 1` peers, and combines it.
pub(super) fn reduce_slices_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let peers = topology.world_size - 1;
    cost(topology, n, peers, |_| peers)
}

/// Like [`all_reduce`], but only the root's data gets the result.
///
/// See [`reduce_cost`].
pub(super) fn reduce(topology: &Topology, rank: Rank, root: Rank) -> Vec<Step> {
    let part = Part::of(topology, rank);
    part.between_posts(vec![part.sum_into(root, part.ranks)])
}

/// 2 rounds. A rank reads its block from each of its `p - 1` peers, combines it and writes it to
/// the root.
pub(super) fn reduce_cost(topology: &Topology, root: Rank, n: usize) -> Cost {
    let peers = topology.world_size - 1;
    cost(topology, n, peers, |rank| peers + usize::from(rank != root))
}

/// Block `i` belongs to rank `i`, which copies it from the root's data to the data of all ranks.
///
/// See [`broadcast_cost`].
pub(super) fn broadcast(topology: &Topology, rank: Rank, root: Rank) -> Vec<Step> {
    let part = Part::of(topology, rank);
    let fetch = Step::Copy { dst: part.own, src: part.in_data_of(root) };
    let hand_out = others(part.ranks, rank)
        .filter(|peer| *peer != root)
        .map(|peer| Step::Copy { dst: part.own.of(peer), src: part.own });
    part.between_posts((rank != root).then_some(fetch).into_iter().chain(hand_out).collect())
}

/// 2 rounds. A rank reads its block from the root, and writes it to all other peers.
pub(super) fn broadcast_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let peers = topology.world_size - 1;
    cost(topology, n, 0, |_| peers)
}

/// Every rank copies its input to the data of all ranks.
///
/// See [`all_gather_cost`].
pub(super) fn all_gather(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let p = topology.world_size;
    let (own, input) = (Loc::data(Span::block(rank, p)), Loc::input(Span::WHOLE));
    let mut steps = vec![Step::Copy { dst: own, src: input }];
    steps.extend(others(p, rank).map(|peer| Step::Copy { dst: own.of(peer), src: input }));
    between_posts(p, rank, steps)
}

/// 2 rounds. A rank writes its `n` elements to each of its `p - 1` peers.
pub(super) fn all_gather_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    match topology.world_size {
        1 => Cost::default(),
        p => Cost { rounds: 2, shared_elements: (p - 1) * n, ..Cost::default() },
    }
}

/// Every rank reads its block in the inputs of all ranks, and sums it.
///
/// See [`reduce_scatter_cost`].
pub(super) fn reduce_scatter(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let p = topology.world_size;
    let (data, own) = (Loc::data(Span::WHOLE), Loc::input(Span::block(rank, p)));
    if p == 1 {
        return vec![Step::Copy { dst: data, src: own }];
    }
    let srcs = leaves(p, |peer| if peer == rank { own } else { own.of(peer) });
    between_posts(p, rank, vec![Step::ReduceTree { dsts: vec![data], srcs, finish: true }])
}

/// 2 rounds. A rank reads a block of `n` elements from each of its `p - 1` peers, and combines them.
pub(super) fn reduce_scatter_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let of_peers = (topology.world_size - 1) * n;
    Cost { combined: of_peers, ..all_gather_cost(topology, 0, n) }
}

/// The root copies the inputs of all ranks. It posts only when it has done so.
///
/// See [`gather_cost`].
pub(super) fn gather(topology: &Topology, rank: Rank, root: Rank) -> Vec<Step> {
    let p = topology.world_size;
    let input = Loc::input(Span::WHOLE);
    if rank != root {
        return vec![Step::Post, Step::Wait { peer: root, upto: 1 }];
    }
    let block = |owner| Loc::data(Span::block(owner, p));
    let mut steps = vec![Step::Copy { dst: block(root), src: input }];
    for peer in others(p, root) {
        steps.push(Step::Wait { peer, upto: 1 });
        steps.push(Step::Copy { dst: block(peer), src: input.of(peer) });
    }
    steps.extend((p > 1).then_some(Step::Post));
    steps
}

/// 2 rounds. The root reads `n` elements from each of its `p - 1` peers.
pub(super) fn gather_cost(topology: &Topology, root: Rank, n: usize) -> Cost {
    all_gather_cost(topology, root, n)
}

/// Every rank copies block `i` of its input to the data of rank `i`.
///
/// See [`all_to_all_cost`].
pub(super) fn all_to_all(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let p = topology.world_size;
    let own = Loc::data(Span::block(rank, p));
    let brought = |peer| Loc::input(Span::block(peer, p));
    let mut steps = vec![Step::Copy { dst: own, src: brought(rank) }];
    steps.extend(others(p, rank).map(|peer| Step::Copy { dst: own.of(peer), src: brought(peer) }));
    between_posts(p, rank, steps)
}

/// 2 rounds. A rank writes a block of `n` elements to each of its `p - 1` peers.
pub(super) fn all_to_all_cost(topology: &Topology, root: Rank, n: usize) -> Cost {
    all_gather_cost(topology, root, n)
}

/// Block `i` of all data, which rank `i` works on.
struct Part {
    ranks: usize,
    rank: Rank,
    /// In the rank's own data.
    own: Loc,
}

impl Part {
    fn of(topology: &Topology, rank: Rank) -> Part {
        let ranks = topology.world_size;
        Part { ranks, rank, own: Loc::data(Span::block(rank, ranks)) }
    }

    fn in_data_of(&self, owner: Rank) -> Loc {
        if owner == self.rank { self.own } else { self.own.of(owner) }
    }

    /// The contributions of the first `count` ranks.
    fn leaves(&self, count: usize) -> Vec<(Node, Loc)> {
        leaves(count, |owner| self.in_data_of(owner))
    }

    /// Sums the contributions of the first `count` ranks, at least one, into the data of `owner`.
    fn sum_into(&self, owner: Rank, count: usize) -> Step {
        let dst = self.in_data_of(owner);
        match count {
            // Nothing is added, so there is nothing to finish.
            1 => Step::Copy { dst, src: self.in_data_of(0) },
            _ => Step::ReduceTree { dsts: vec![dst], srcs: self.leaves(count), finish: true },
        }
    }

    /// A rank alone has nothing to do.
    fn between_posts(&self, steps: Vec<Step>) -> Vec<Step> {
        match self.ranks {
            1 => vec![],
            ranks => between_posts(ranks, self.rank, steps),
        }
    }
}

/// `steps`, between the posts that open and close all buffers.
fn between_posts(p: usize, rank: Rank, steps: Vec<Step>) -> Vec<Step> {
    if p == 1 {
        return steps;
    }
    let open = [Step::Post].into_iter().chain(wait_for_others(p, rank, 1));
    let done = [Step::Post].into_iter().chain(wait_for_others(p, rank, 2));
    open.chain(steps).chain(done).collect()
}

/// 2 rounds. For each element of its block of `n` a rank makes `combined` combinations, and `shared` accesses
/// to the memory of neighbours.
fn cost(topology: &Topology, n: usize, combined: usize, shared: impl Fn(Rank) -> usize) -> Cost {
    let p = topology.world_size;
    if p == 1 {
        return Cost::default();
    }
    let block = |rank: Rank| Span::block(rank, p).resolve(n).len();
    let shared_elements = (0..p).map(|rank| block(rank) * shared(rank)).max().unwrap_or(0);
    Cost { rounds: 2, combined: combined * n.div_ceil(p), shared_elements, ..Cost::default() }
}
