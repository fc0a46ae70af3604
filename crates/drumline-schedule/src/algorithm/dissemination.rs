//! The dissemination barrier.

use super::cost::{Cost, doublings};
use crate::step::{Loc, Rank, Span, Step};
use crate::topology::Topology;

/// At distance 1, 2, 4, .. around the circle every rank sends an empty message to the rank above it. After
/// the message from distance `d` a rank knows that the `2 d` ranks up to itself have entered.
///
/// See [`barrier_cost`].
pub(super) fn barrier(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let p = topology.world_size;
    let nothing = Loc::data(Span::EMPTY);
    let mut steps = vec![];
    let mut distance = 1;
    while distance < p {
        steps.push(Step::Send { to: (rank + distance) % p, src: nothing });
        steps.push(Step::Recv { from: (rank + p - distance) % p, dst: nothing });
        distance *= 2;
    }
    steps
}

/// `ceil(log2 p)` rounds of one empty message.
pub(super) fn barrier_cost(topology: &Topology, _root: Rank, _elements: usize) -> Cost {
    let rounds = doublings(topology.world_size);
    Cost { rounds, messages: rounds, ..Cost::default() }
}
