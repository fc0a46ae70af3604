//! Binomial trees: the number of ranks that have sent, or that know, doubles every round.

use std::ops::Range;

use super::{Cost, doublings};
use crate::step::{Loc, Rank, Side, Span, Step};
use crate::topology::Topology;
use crate::tree::Node;

const DATA: Loc = Loc::data(Span::WHOLE);

/// The sum climbs to rank 0 and the result comes down again.
///
/// See [`all_reduce_cost`]. Few messages in all, but rank 0 handles the whole data `log2 p` times.
pub(super) fn all_reduce(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let mut steps = climb(topology.world_size, rank, DATA);
    steps.extend(broadcast(topology, rank, 0));
    steps
}

/// `2 floor(log2 p)` rounds. Rank 0 sends `ceil(log2 p)` messages of `n` elements, and combines
/// as many.
pub(super) fn all_reduce_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let p = topology.world_size;
    let elements = doublings(p) * n;
    Cost {
        rounds: 2 * longest_chain(p),
        messages: doublings(p),
        elements,
        combined: elements,
        ..Cost::default()
    }
}

/// The sum climbs to rank 0, which hands it on to the root. The tree of sums is tied to rank 0,
/// so another root costs one message more. Ranks other than the root add in scratch.
///
/// See [`reduce_cost`].
pub(super) fn reduce(topology: &Topology, rank: Rank, root: Rank) -> Vec<Step> {
    let p = topology.world_size;
    let sum = if rank == root { DATA } else { Loc::scratch(0, Span::WHOLE) };
    let mut steps = climb(p, rank, sum);
    if root != 0 && rank == 0 {
        steps.push(Step::Send { to: root, src: sum });
    }
    if root != 0 && rank == root {
        steps.push(Step::Recv { from: 0, dst: DATA });
    }
    steps
}

/// `floor(log2 p)` rounds, and one more unless the root is 0. A rank sends at most one message
/// of `n` elements; rank 0 combines `ceil(log2 p)`.
pub(super) fn reduce_cost(topology: &Topology, root: Rank, n: usize) -> Cost {
    let p = topology.world_size;
    let messages = usize::from(p > 1);
    let rounds = longest_chain(p) + usize::from(root != 0);
    Cost { rounds, messages, elements: messages * n, combined: doublings(p) * n, ..Cost::default() }
}

/// At distance 1, 2, 4, .. every other rank that is still in the game sends its sum to the rank
/// that far below it, which adds it on the right. These are exactly the nodes of the canonical
/// tree.
///
/// ```text
///   0   1   2   3   4
///   |<--'   |<--'   |
///   |<------'       |
///   |<--------------'
/// ```
///
/// The sums of this rank are kept in `sum`.
fn climb(p: usize, rank: Rank, sum: Loc) -> Vec<Step> {
    let mut own = DATA;
    let mut steps = vec![];
    let mut distance = 1;
    while distance < p {
        if rank & distance != 0 {
            steps.push(Step::Send { to: rank - distance, src: own });
            break;
        }
        if rank + distance < p {
            // Only rank 0 is still here when the distance is about to pass the last rank.
            let finish = 2 * distance >= p;
            let from = rank + distance;
            if own == sum {
                steps.push(Step::RecvReduce { from, dst: sum, side: Side::Right, finish });
            } else {
                let srcs = vec![(Node::leaf(rank), own), (Node::leaf(from), sum)];
                steps.push(Step::Recv { from, dst: sum });
                steps.push(Step::ReduceTree { dsts: vec![sum], srcs, finish });
                own = sum;
            }
        }
        distance *= 2;
    }
    steps
}

/// The reduction's picture upside down, with ranks counted from the root. A rank gets the data
/// from the one whose number lacks its lowest set bit, and serves those that differ from it in
/// a lower bit; the farthest first, because it has the most ranks to serve.
///
/// See [`broadcast_cost`].
pub(super) fn broadcast(topology: &Topology, rank: Rank, root: Rank) -> Vec<Step> {
    let p = topology.world_size;
    let place = (rank + p - root) % p;
    let rank_at = |place: usize| (place + root) % p;

    let mut steps = vec![];
    let mut distance = match place {
        0 => p.next_power_of_two(),
        _ => 1 << place.trailing_zeros(),
    };
    if place != 0 {
        steps.push(Step::Recv { from: rank_at(place - distance), dst: DATA });
    }
    while distance > 1 {
        distance /= 2;
        if place + distance < p {
            steps.push(Step::Send { to: rank_at(place + distance), src: DATA });
        }
    }
    steps
}

/// `floor(log2 p)` rounds. The root sends `ceil(log2 p)` messages of `n` elements.
pub(super) fn broadcast_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let p = topology.world_size;
    let elements = doublings(p) * n;
    Cost { rounds: longest_chain(p), messages: doublings(p), elements, ..Cost::default() }
}

/// A place is as many messages away from the root as its number has set bits; below `p` that is
/// at most `floor(log2 p)`.
fn longest_chain(p: usize) -> usize {
    p.ilog2() as usize
}

/// The broadcast's tree: a rank gets the blocks of all ranks that it serves together with its own,
/// and hands them on.
///
/// See [`scatter_cost`]. Scratch: those blocks, its own first. The root's blocks lie by rank, so a
/// run of them that wraps past the last rank travels as two messages.
pub(super) fn scatter(topology: &Topology, rank: Rank, root: Rank) -> Vec<Step> {
    let p = topology.world_size;
    let place = (rank + p - root) % p;
    let rank_at = |place: usize| (place + root) % p;
    if place == 0 {
        let runs = served(p, 0).flat_map(|child| {
            let to = rank_at(child.start);
            runs_at_root(p, root, child).map(move |run| (to, run))
        });
        let mut steps: Vec<Step> =
            runs.map(|(to, run)| Step::Send { to, src: Loc::input(run) }).collect();
        steps.push(Step::Copy { dst: DATA, src: Loc::input(Span::block(rank, p)) });
        return steps;
    }
    let distance = 1 << place.trailing_zeros();
    let parent = place - distance;
    let held = place..p.min(place + distance);
    let in_scratch = |range: Range<usize>| {
        Loc::scratch(0, Span { first: range.start - place, count: range.len(), of: 1 })
    };
    let from = rank_at(parent);
    if held.len() == 1 {
        return vec![Step::Recv { from, dst: DATA }];
    }
    let mut steps = vec![];
    let mut next = place;
    let run_lengths: Vec<usize> = match parent {
        0 => runs_at_root(p, root, held).map(|run| run.count).collect(),
        _ => vec![held.len()],
    };
    for len in run_lengths {
        steps.push(Step::Recv { from, dst: in_scratch(next..next + len) });
        next += len;
    }
    let children = served(p, place);
    steps.extend(
        children.map(|child| Step::Send { to: rank_at(child.start), src: in_scratch(child) }),
    );
    steps.push(Step::Copy { dst: DATA, src: in_scratch(place..place + 1) });
    steps
}

/// `floor(log2 p)` rounds. The root sends `(p - 1) n` elements, to `ceil(log2 p)` ranks, in one
/// message each or two where the run wraps.
pub(super) fn scatter_cost(topology: &Topology, root: Rank, n: usize) -> Cost {
    let p = topology.world_size;
    let messages = served(p, 0).map(|child| runs_at_root(p, root, child).count()).sum();
    Cost { rounds: longest_chain(p), messages, elements: (p - 1) * n, ..Cost::default() }
}

/// The places that the one at `place` serves, each with those that it serves in turn; the farthest
/// first.
fn served(p: usize, place: usize) -> impl Iterator<Item = Range<usize>> {
    let reach = if place == 0 { p.next_power_of_two() } else { 1 << place.trailing_zeros() };
    let distances = (0..usize::ilog2(reach)).rev().map(|log2| 1 << log2);
    let children = distances.map(move |distance| place + distance..p.min(place + 2 * distance));
    children.filter(|child| !child.is_empty())
}

/// The blocks of these places as they lie at the root, by rank.
fn runs_at_root(p: usize, root: Rank, places: Range<usize>) -> impl Iterator<Item = Span> {
    let first = (places.start + root) % p;
    let before_the_end = places.len().min(p - first);
    let runs = [
        Span { first, count: before_the_end, of: p },
        Span { first: 0, count: places.len() - before_the_end, of: p },
    ];
    runs.into_iter().filter(|run| run.count > 0)
}
