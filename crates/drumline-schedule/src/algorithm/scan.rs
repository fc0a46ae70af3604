//! Scans: every rank gets the sum of the ranks up to itself, or of those below it.
//!
//! The canonical tree over ranks `0..m` consists of nodes that all larger trees have too. For `m` = 11,
//! binary `1011`, they are the sum of the first 8 ranks, the sum of the next 2, and the last rank, added from
//! the right. So each rank of a scan adds in the tree over the ranks that it sums.

use super::cost::{Cost, doublings};
use crate::step::{Loc, Rank, Span, Step};
use crate::topology::Topology;
use crate::tree::Node;

const DATA: Loc = Loc::data(Span::WHOLE);
const SLOT: Loc = Loc::slot(Span::WHOLE);

/// Every rank sends its data to all ranks above it, and sums what it receives.
///
/// ```text
///   rank 0   a             a
///   rank 1   b    a        a + b
///   rank 2   c    a b      (a + b) + c
/// ```
///
/// See [`direct_scan_cost`]. Contributions travel, but no partial sums. Scratch holds the data of
/// every rank below.
pub(super) fn direct_scan(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    direct(topology, rank, true)
}

/// 1 round. Rank 0 sends `p - 1` messages of `n` elements, and the last rank combines as many.
pub(super) fn direct_scan_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let peers = topology.world_size - 1;
    Cost {
        rounds: peers.min(1),
        messages: peers,
        elements: peers * n,
        combined: peers * n,
        ..Cost::default()
    }
}

/// Like [`direct_scan`], but without the rank's own data.
pub(super) fn direct_exclusive_scan(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    direct(topology, rank, false)
}

/// That of [`direct_scan`], and one combination less.
pub(super) fn direct_exclusive_scan_cost(topology: &Topology, root: Rank, n: usize) -> Cost {
    one_less(direct_scan_cost(topology, root, n), n)
}

fn direct(topology: &Topology, rank: Rank, inclusive: bool) -> Vec<Step> {
    let p = topology.world_size;
    let value_of = |peer: Rank| Loc::scratch(peer, Span::WHOLE);
    let mut steps: Vec<Step> = (rank + 1..p).map(|to| Step::Send { to, src: DATA }).collect();
    steps.extend((0..rank).map(|from| Step::Recv { from, dst: value_of(from) }));
    steps.extend(sum(rank, inclusive, (0..rank).map(|peer| (Node::leaf(peer), value_of(peer)))));
    steps
}

/// In round `k` blocks of `2^k` ranks form pairs. A rank of the left block swaps the sum of its block with
/// the rank in the same place of the right block. So both know both sums. The sum from the left is a node of
/// the tree that the right rank sums in the end.
///
/// ```text
///   rank       0    1    2    3    4
///   round 0    <---->    <---->            rank 1 keeps [0], rank 3 keeps [2]
///   round 1    <--------->                 ranks 2 and 3 keep [0, 1]
///                   ---------->
///   round 2    ------------------->        rank 4 keeps [0, 1, 2, 3]
/// ```
///
/// See [`doubling_scan_cost`]. A rank less than `2^k` below the last rank has no partner in round
/// `k`. Scratch holds the sum of the rank's own block, and for every round the sum of the other block.
pub(super) fn doubling_scan(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    doubling(topology, rank, true)
}

/// `ceil(log2 p)` rounds. Rank 0 sends a message of `n` elements in each. A rank sums blocks on its
/// way, and in the end as many nodes as its number has bits.
pub(super) fn doubling_scan_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let p = topology.world_size;
    let combined = (0..p).map(|rank| joins(p, rank) + rank.count_ones() as usize);
    let messages = doublings(p);
    Cost {
        rounds: messages,
        messages,
        elements: messages * n,
        combined: combined.max().unwrap_or(0) * n,
        ..Cost::default()
    }
}

/// Like [`doubling_scan`], but without the rank's own data.
pub(super) fn doubling_exclusive_scan(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    doubling(topology, rank, false)
}

/// That of [`doubling_scan`], and one combination less for all ranks but 0.
pub(super) fn doubling_exclusive_scan_cost(topology: &Topology, root: Rank, n: usize) -> Cost {
    let p = topology.world_size;
    let at_the_end = |rank: Rank| (rank.count_ones() as usize).saturating_sub(1);
    let combined = (0..p).map(|rank| joins(p, rank) + at_the_end(rank));
    Cost { combined: combined.max().unwrap_or(0) * n, ..doubling_scan_cost(topology, root, n) }
}

fn doubling(topology: &Topology, rank: Rank, inclusive: bool) -> Vec<Step> {
    let (mut steps, kept) = climb(topology.world_size, rank, DATA);
    steps.extend(sum(rank, inclusive, kept.into_iter()));
    steps
}

/// The rounds of doubling among `p` ranks, for a rank that brings `own`. Also returns the sums that it keeps: they are
/// those of all ranks below it, in their order.
pub(super) fn climb(p: usize, rank: Rank, mut own: Loc) -> (Vec<Step>, Vec<(Node, Loc)>) {
    let block_sum = Loc::scratch(0, Span::WHOLE);
    let mut kept = vec![];
    let mut steps = vec![];
    for round in 0..doublings(p) {
        let len = 1 << round;
        let (peer, is_right) = (rank ^ len, rank & len != 0);
        let block = Node { lo: rank >> round << round, len };
        let other = Node { lo: peer >> round << round, len };
        let of_other = Loc::scratch(round + 1, Span::WHOLE);
        if has_use(p, rank, len) {
            steps.push(Step::Send { to: peer, src: own });
        }
        if is_right || has_use(p, rank, 2 * len) {
            steps.push(Step::Recv { from: peer, dst: of_other });
        }
        if is_right {
            kept.push((other, of_other));
        }
        if has_use(p, rank, 2 * len) {
            let mut srcs = vec![(block, own), (other, of_other)];
            srcs.sort_by_key(|(node, _)| node.lo);
            steps.push(Step::ReduceTree { dsts: vec![block_sum], srcs, finish: false });
            own = block_sum;
        }
    }
    kept.reverse();
    (steps, kept)
}

/// Whether a rank needs the sum of its block of `len` ranks.
///
/// A rank in a left block needs it if the rank in the same place of the right block exists. A rank in a right
/// block needs it if the pair, as a block, needs its own sum; and so on, up to a block that is a left one.
/// Adding `len` carries through exactly these bits.
pub(super) fn has_use(p: usize, rank: Rank, len: usize) -> bool {
    rank + len < p
}

/// The number of times that a rank sums two blocks.
pub(super) fn joins(p: usize, rank: Rank) -> usize {
    (1..=doublings(p)).filter(|round| has_use(p, rank, 1 << round)).count()
}

/// Every rank copies its data to its slot, and sums the slots of the ranks below it.
///
/// See [`shared_scan_cost`].
pub(super) fn shared_scan(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    shared(topology, rank, true)
}

/// 1 round. The last rank reads the `n` elements of each of its `p - 1` peers, and combines them.
pub(super) fn shared_scan_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let peers = topology.world_size - 1;
    Cost {
        rounds: peers.min(1),
        combined: peers * n,
        shared_elements: peers * n,
        ..Cost::default()
    }
}

/// Like [`shared_scan`], but without the rank's own data.
pub(super) fn shared_exclusive_scan(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    shared(topology, rank, false)
}

/// That of [`shared_scan`], and one combination less.
pub(super) fn shared_exclusive_scan_cost(topology: &Topology, root: Rank, n: usize) -> Cost {
    one_less(shared_scan_cost(topology, root, n), n)
}

fn shared(topology: &Topology, rank: Rank, inclusive: bool) -> Vec<Step> {
    let p = topology.world_size;
    if p == 1 {
        return vec![];
    }
    let mut steps = vec![];
    // No rank reads the data of the last rank.
    if rank + 1 < p {
        steps.push(Step::Copy { dst: SLOT, src: DATA });
    }
    steps.push(Step::Post);
    steps.extend((0..rank).rev().map(|peer| Step::Wait { peer, upto: 1 }));
    steps.extend(sum(rank, inclusive, (0..rank).map(|peer| (Node::leaf(peer), SLOT.of(peer)))));
    steps
}

/// Sums the contributions of the ranks below, followed by the rank's own, into the data.
pub(super) fn sum(
    rank: Rank,
    inclusive: bool,
    below: impl Iterator<Item = (Node, Loc)>,
) -> Option<Step> {
    let own = inclusive.then_some((Node::leaf(rank), DATA));
    let srcs: Vec<(Node, Loc)> = below.chain(own).collect();
    match srcs[..] {
        [] | [(_, DATA)] => None,
        // Nothing is added, so there is nothing to finish.
        [(Node { len: 1, .. }, src)] => Some(Step::Copy { dst: DATA, src }),
        _ => Some(Step::ReduceTree { dsts: vec![DATA], srcs, finish: true }),
    }
}

fn one_less(cost: Cost, n: usize) -> Cost {
    Cost { combined: cost.combined.saturating_sub(n), ..cost }
}
