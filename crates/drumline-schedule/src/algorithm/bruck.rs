//! Bruck's all-gather.

use super::cost::{Cost, doublings};
use crate::step::{Loc, Rank, Span, Step};
use crate::topology::Topology;

/// Block `i` of the data belongs to rank `i`. A rank that holds `h` blocks, from its own upwards, receives
/// the next `h` from the rank `h` above, until it has all blocks.
///
/// ```text
///   rank    0       1       2       3       4
///   h = 1   0....   .1...   ..2..   ...3.   ....4
///   h = 2   01...   .12..   ..23.   ...34   0...4
///   h = 4   0123.   .1234   0.234   01.34   012.4
///           01234   01234   01234   01234   01234
/// ```
///
/// See [`all_gather_cost`]. It needs no scratch: blocks arrive in their place, and a run of
/// blocks that wraps past the last one travels as two messages.
pub(super) fn all_gather(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let p = topology.world_size;
    let mut steps =
        vec![Step::Copy { dst: Loc::data(Span::block(rank, p)), src: Loc::input(Span::WHOLE) }];
    let mut held = 1;
    while held < p {
        let count = held.min(p - held);
        let to = (rank + p - held) % p;
        let from = (rank + held) % p;
        steps.extend(runs(rank, count, p).map(|run| Step::Send { to, src: Loc::data(run) }));
        steps.extend(runs(from, count, p).map(|run| Step::Recv { from, dst: Loc::data(run) }));
        held += count;
    }
    steps
}

/// `count` blocks from `first` on, counted around the circle of `p`.
fn runs(first: usize, count: usize, p: usize) -> impl Iterator<Item = Span> {
    let before_the_end = count.min(p - first);
    let runs = [
        Span { first, count: before_the_end, of: p },
        Span { first: 0, count: count - before_the_end, of: p },
    ];
    runs.into_iter().filter(|run| run.count > 0)
}

/// `ceil(log2 p)` rounds and `(p - 1) n` elements, `n` being one rank's contribution. The last
/// rank wraps in every round in which more than one block travels: in all but the first, and but
/// the last when `p = 2^k + 1`.
pub(super) fn all_gather_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let p = topology.world_size;
    let rounds = doublings(p);
    let wraps = rounds.saturating_sub(1) - usize::from(p > 2 && (p - 1).is_power_of_two());
    Cost { rounds, messages: rounds + wraps, elements: (p - 1) * n, ..Cost::default() }
}
