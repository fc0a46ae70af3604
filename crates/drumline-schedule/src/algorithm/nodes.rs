//! Memory nodes of a host add their own ranks first, and only sums of nodes cross between them.
//!
//! This is [`hierarchical`](super::hierarchical) with memory nodes in place of hosts, and shared memory in
//! place of messages. With `q` ranks on each of `K` nodes a rank moves `2 (1 - 1 / K) / q` of the data to and
//! from other nodes: a `q`-th of what an algorithm that ignores nodes moves.

use super::cost::Cost;
use super::seats::{Seats, busiest, slices};
use crate::step::{Loc, Rank, Span, Step};
use crate::topology::Topology;
use crate::tree::Node;

/// Several memory nodes of one host with several ranks each, which may add their own ranks first.
pub(super) fn serves(topology: &Topology) -> bool {
    let nodes = topology.ranks_by_node();
    topology.sums_by_node() && nodes.len() > 1 && nodes.iter().all(|ranks| ranks.len() > 1)
}

/// Every rank copies its data to its slot. The rank on seat `i` of a node sums slice `i` over its node, in
/// its slot. Then it sums its node's part of the slice over all nodes. It copies the other parts from the
/// ranks on the same seat of other nodes, so that its neighbours can read the whole slice.
///
/// ```text
///                laid out      of the node       of all      fetched
///   node 0   0   a0 a1  a2 a3  A0 A1   .  .      s0  .       s0 s1   .  .
///            1   b0 b1  b2 b3   .  .  A2 A3       .  s2       .  .  s2 s3
///   node 1   2   c0 c1  c2 c3  C0 C1   .  .      .  s1       s0 s1   .  .     A = a + b, C = c + d
///            3   d0 d1  d2 d3   .  .  C2 C3       .  s3       .  .  s2 s3     s = A + C
/// ```
///
/// See [`staged_cost`].
pub(super) fn staged(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let seats = seats_of(topology, rank);
    let laid_out = Step::Copy { dst: Loc::slot(Span::WHOLE), src: Loc::data(Span::WHOLE) };
    let of_all = |seats: &Seats<'_>| vec![Loc::slot(seats.part(seats.group))];
    let mut steps = vec![laid_out, Step::Post];
    steps.extend(sums(&seats, Loc::slot, of_all));
    if let Some(slice) = seats.own_slice() {
        for node in seats.other_groups() {
            let (peer, part) = (seats.counterpart(node), Loc::slot(seats.part(node)));
            steps.push(Step::Wait { peer, upto: 3 });
            steps.push(Step::Copy { dst: part, src: part.of(peer) });
        }
        steps.push(Step::Copy { dst: Loc::data(slice), src: Loc::slot(slice) });
    }
    steps.push(Step::Post);
    for (seat, peer) in seats.peers().filter(|&(seat, _)| seat < seats.slices) {
        let slice = seats.slice(seat);
        steps.push(Step::Wait { peer, upto: 4 });
        steps.push(Step::Copy { dst: Loc::data(slice), src: Loc::slot(slice).of(peer) });
    }
    steps
}

/// 4 rounds, with `K` nodes of at most `q` ranks, `L` slices and parts of `n / (K L)` elements. A rank
/// combines its slice over the ranks of its node, and then its part over all nodes. It reads these, the other
/// parts of its slice, and the other slices.
pub(super) fn staged_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let nodes = topology.ranks_by_node();
    let with_slice = busiest(nodes, n, |ranks, slice, part| {
        (ranks - 1) * slice + (nodes.len() - 1) * part + (slice - part) + (n - slice)
    });
    // A rank without a slice copies all of them.
    let without = if nodes.iter().any(|ranks| ranks.len() > slices(nodes)) { n } else { 0 };
    Cost { shared_elements: with_slice.max(without), ..cost(nodes, n) }
}

/// The same in registered data: ranks sum in place, write sums of all nodes to the ranks on the same seat of
/// other nodes, and write their slice to the ranks of their node. See [`push_cost`].
pub(super) fn push(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let seats = seats_of(topology, rank);
    let of_all = |seats: &Seats<'_>| {
        let part = Loc::data(seats.part(seats.group));
        let others = seats.other_groups().map(|node| part.of(seats.counterpart(node)));
        std::iter::once(part).chain(others).collect()
    };
    let mut steps = vec![Step::Post];
    steps.extend(sums(&seats, Loc::data, of_all));
    if let Some(slice) = seats.own_slice() {
        let counterparts = seats.other_groups().map(|node| seats.counterpart(node));
        steps.extend(counterparts.map(|peer| Step::Wait { peer, upto: 3 }));
        let slice = Loc::data(slice);
        steps.extend(seats.peers().map(|(_, peer)| Step::Copy { dst: slice.of(peer), src: slice }));
    }
    steps.push(Step::Post);
    let writers = seats.peers().filter(|&(seat, _)| seat < seats.slices);
    steps.extend(writers.map(|(_, peer)| Step::Wait { peer, upto: 4 }));
    steps
}

/// Rounds and combined elements are those of [`staged_cost`]. A rank reads its slice from the other ranks
/// of its node and writes it to them. It reads and writes its part at the ranks on the same seat of other
/// nodes.
pub(super) fn push_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let nodes = topology.ranks_by_node();
    let touched = |ranks: usize, slice: usize, part: usize| {
        2 * (ranks - 1) * slice + 2 * (nodes.len() - 1) * part
    };
    Cost { shared_elements: busiest(nodes, n, touched), ..cost(nodes, n) }
}

fn seats_of(topology: &Topology, rank: Rank) -> Seats<'_> {
    let nodes = topology.ranks_by_node();
    let node = nodes.iter().position(|ranks| ranks.binary_search(&rank).is_ok());
    Seats::of(nodes, node.unwrap_or(0), rank)
}

fn cost(nodes: &[Vec<Rank>], n: usize) -> Cost {
    let combined =
        |ranks: usize, slice: usize, part: usize| (ranks - 1) * slice + (nodes.len() - 1) * part;
    Cost { rounds: 4, combined: busiest(nodes, n, combined), ..Cost::default() }
}

/// The part that both forms have in common: the sum of the slice over the node, in place, and then the sum of
/// the node's part over all nodes, `to` all places that need it. A post follows each.
fn sums(seats: &Seats<'_>, at: fn(Span) -> Loc, to: impl Fn(&Seats<'_>) -> Vec<Loc>) -> Vec<Step> {
    let Some(slice) = seats.own_slice() else { return vec![Step::Post, Step::Post] };
    let mut steps = seats.sum_of_group(at(slice), at, at(slice), false);
    steps.push(Step::Post);
    let part = at(seats.part(seats.group));
    let counterparts = seats.other_groups().map(|node| seats.counterpart(node));
    steps.extend(counterparts.map(|peer| Step::Wait { peer, upto: 2 }));
    let of_node = |node: usize| match node == seats.group {
        true => part,
        false => part.of(seats.counterpart(node)),
    };
    let srcs = (0..seats.groups.len()).map(|node| (Node::leaf(node), of_node(node))).collect();
    steps.push(Step::ReduceTree { dsts: to(seats), srcs, finish: true });
    steps.push(Step::Post);
    steps
}
