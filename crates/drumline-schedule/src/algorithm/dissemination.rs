//! The dissemination barrier.

use super::{Cost, doublings};
use crate::step::{Loc, Rank, Span, Step};
use crate::topology::Topology;

/// At distance 1, 2, 4, .. around the circle every rank tells the one above it that it is here.
/// After a message from distance `d` a rank knows of the `2 d` ranks up to itself.
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
