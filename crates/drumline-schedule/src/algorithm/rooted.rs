//! Messages between the root and each other rank, without forwarding.

use super::cost::Cost;
use crate::step::{Loc, Rank, Span, Step};
use crate::topology::Topology;

const DATA: Loc = Loc::data(Span::WHOLE);
const INPUT: Loc = Loc::input(Span::WHOLE);

/// Every rank sends its contribution to the root.
///
/// See [`gather_cost`].
pub(super) fn gather(topology: &Topology, rank: Rank, root: Rank) -> Vec<Step> {
    let p = topology.world_size;
    if rank != root {
        return vec![Step::Send { to: root, src: INPUT }];
    }
    let block = |peer| Loc::data(Span::block(peer, p));
    let mut steps = vec![Step::Copy { dst: block(rank), src: INPUT }];
    steps.extend(others(p, root).map(|from| Step::Recv { from, dst: block(from) }));
    steps
}

/// 1 round, 1 message of `n` elements. The root receives `p - 1` of them.
pub(super) fn gather_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let messages = usize::from(topology.world_size > 1);
    Cost { rounds: messages, messages, elements: messages * n, ..Cost::default() }
}

/// The root sends every rank its block.
///
/// See [`scatter_cost`].
pub(super) fn scatter(topology: &Topology, rank: Rank, root: Rank) -> Vec<Step> {
    let p = topology.world_size;
    if rank != root {
        return vec![Step::Recv { from: root, dst: DATA }];
    }
    let block = |peer| Loc::input(Span::block(peer, p));
    let mut steps: Vec<Step> =
        others(p, root).map(|to| Step::Send { to, src: block(to) }).collect();
    steps.push(Step::Copy { dst: DATA, src: block(rank) });
    steps
}

/// 1 round. The root sends `p - 1` messages of `n` elements each.
pub(super) fn scatter_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let peers = topology.world_size - 1;
    Cost { rounds: peers.min(1), messages: peers, elements: peers * n, ..Cost::default() }
}

fn others(p: usize, root: Rank) -> impl Iterator<Item = Rank> {
    (1..p).map(move |distance| (root + distance) % p)
}
