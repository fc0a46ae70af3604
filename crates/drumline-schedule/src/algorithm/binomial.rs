//! Binomial trees: the number of ranks that have sent, or that know, doubles every round.

use super::{Cost, doublings};
use crate::step::{Loc, Rank, Side, Span, Step};
use crate::topology::Topology;

const DATA: Loc = Loc::data(Span::WHOLE);

/// The sum climbs to rank 0 and the result comes down again.
///
/// See [`all_reduce_cost`]. Few messages in all, but rank 0 handles the whole data `log2 p` times.
pub(super) fn all_reduce(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let mut steps = reduce_to_zero(topology.world_size, rank);
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
/// so another root costs one message more.
///
/// See [`reduce_cost`].
pub(super) fn reduce(topology: &Topology, rank: Rank, root: Rank) -> Vec<Step> {
    let mut steps = reduce_to_zero(topology.world_size, rank);
    if root != 0 && rank == 0 {
        steps.push(Step::Send { to: root, src: DATA });
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
fn reduce_to_zero(p: usize, rank: Rank) -> Vec<Step> {
    let mut steps = vec![];
    let mut distance = 1;
    while distance < p {
        if rank & distance != 0 {
            steps.push(Step::Send { to: rank - distance, src: DATA });
            break;
        }
        if rank + distance < p {
            // Only rank 0 is still here when the distance is about to pass the last rank.
            let finish = 2 * distance >= p;
            let from = rank + distance;
            steps.push(Step::RecvReduce { from, dst: DATA, side: Side::Right, finish });
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
