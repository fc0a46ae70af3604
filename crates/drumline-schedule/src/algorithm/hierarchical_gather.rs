//! A root with a block for every rank, and several hosts: one message for each host.
//!
//! Where data is short, a message costs more than what is in it. So the lowest rank of a host, its *leader*, speaks with
//! the root for all ranks of the host. The blocks of a host lie side by side in scratch, as they travel.

use super::cost::Cost;
use super::hierarchical::largest;
use super::shared::others;
use crate::schedule::Shelves;
use crate::step::{Loc, Rank, Span, Step};
use crate::topology::Topology;

const DATA: Loc = Loc::data(Span::WHOLE);
const INPUT: Loc = Loc::input(Span::WHOLE);
const SLOT: Loc = Loc::slot(Span::WHOLE);

/// Ranks lay their input out. The leader of a host collects it, and sends it to the root, which has read the slots of its
/// own host.
///
/// ```text
///   host 0   rank 0 (root)   a                               a b c d
///            rank 1          b -> slot   -> rank 0
///   host 1   rank 2          c                c d -> rank 0
///            rank 3          d -> slot   -> rank 2
/// ```
///
/// See [`gather_cost`]. Scratch of the root holds the blocks of all other hosts.
pub(super) fn gather(topology: &Topology, rank: Rank, root: Rank) -> Vec<Step> {
    if rank == root {
        return gather_at_root(topology, root);
    }
    let ranks = topology.neighbours(rank);
    if topology.host_of(rank) == topology.host_of(root) || rank != ranks[0] {
        return vec![Step::Copy { dst: SLOT, src: INPUT }, Step::Post];
    }
    let mut steps = vec![Step::Post];
    if ranks.len() == 1 {
        steps.push(Step::Send { to: root, src: INPUT });
        return steps;
    }
    steps.push(Step::Copy { dst: block_in(0, 0), src: INPUT });
    for (seat, peer) in (1..).zip(&ranks[1..]) {
        steps.push(Step::Wait { peer: *peer, upto: 1 });
        steps.push(Step::Copy { dst: block_in(0, seat), src: SLOT.of(*peer) });
    }
    steps.push(Step::Send { to: root, src: blocks_in(0, ranks.len()) });
    steps
}

fn gather_at_root(topology: &Topology, root: Rank) -> Vec<Step> {
    let (hosts, own) = (topology.ranks_by_host(), topology.host_of(root));
    let block = |rank| Loc::data(Span::block(rank, topology.world_size));
    let mut steps = vec![Step::Post, Step::Copy { dst: block(root), src: INPUT }];
    for &peer in hosts[own].iter().filter(|rank| **rank != root) {
        steps.push(Step::Wait { peer, upto: 1 });
        steps.push(Step::Copy { dst: block(peer), src: SLOT.of(peer) });
    }
    let others = || others(hosts.len(), own).map(|host| (host, &hosts[host][..]));
    steps.extend(others().map(|(host, ranks)| match ranks {
        [alone] => Step::Recv { from: *alone, dst: block(*alone) },
        _ => Step::Recv { from: ranks[0], dst: blocks_in(host, ranks.len()) },
    }));
    for (host, ranks) in others().filter(|(_, ranks)| ranks.len() > 1) {
        let blocks = ranks.iter().enumerate();
        steps.extend(
            blocks.map(|(seat, rank)| Step::Copy { dst: block(*rank), src: block_in(host, seat) }),
        );
    }
    steps
}

/// 1 round between hosts, and one before it on a host that sends for several ranks. A leader sends the `n` elements of
/// each rank of its host in one message. It reads those of its neighbours, as the root does.
pub(super) fn gather_cost(topology: &Topology, root: Rank, n: usize) -> Cost {
    let ranks = largest_but(topology, root);
    Cost {
        rounds: 1 + usize::from(ranks > 1),
        messages: 1,
        elements: ranks * n,
        shared_elements: (largest(topology.ranks_by_host()) - 1) * n,
        ..Cost::default()
    }
}

/// The root sends the leader of each other host the blocks of that host. Leaders lay them out, as the root does on its
/// own host.
///
/// ```text
///   host 0   rank 0 (root)   a b c d   b -> slot, c d -> rank 2     a
///            rank 1                    slot of 0 -> data            b
///   host 1   rank 2                    c d, d -> slot               c
///            rank 3                    slot of 2 -> data            d
/// ```
///
/// See [`scatter_cost`]. Scratch of the root holds the blocks of all other hosts.
pub(super) fn scatter(topology: &Topology, rank: Rank, root: Rank) -> Vec<Step> {
    if rank == root {
        return scatter_at_root(topology, root);
    }
    let ranks = topology.neighbours(rank);
    let is_at_root = topology.host_of(rank) == topology.host_of(root);
    let giver = if is_at_root { root } else { ranks[0] };
    let block = |rank| Loc::slot(Span::block(rank, topology.world_size));
    if rank != giver {
        return vec![
            Step::Post,
            Step::Wait { peer: giver, upto: 1 },
            Step::Copy { dst: DATA, src: block(rank).of(giver) },
        ];
    }
    if ranks.len() == 1 {
        return vec![Step::Recv { from: root, dst: DATA }, Step::Post];
    }
    let mut steps = vec![Step::Recv { from: root, dst: blocks_in(0, ranks.len()) }];
    let peers = (1..).zip(&ranks[1..]);
    steps
        .extend(peers.map(|(seat, peer)| Step::Copy { dst: block(*peer), src: block_in(0, seat) }));
    steps.extend([Step::Post, Step::Copy { dst: DATA, src: block_in(0, 0) }]);
    steps
}

fn scatter_at_root(topology: &Topology, root: Rank) -> Vec<Step> {
    let (hosts, own) = (topology.ranks_by_host(), topology.host_of(root));
    let block = |rank| Span::block(rank, topology.world_size);
    let mut steps = vec![];
    for host in others(hosts.len(), own) {
        let ranks = &hosts[host];
        if let [alone] = ranks[..] {
            steps.push(Step::Send { to: alone, src: Loc::input(block(alone)) });
            continue;
        }
        let blocks = ranks.iter().map(|rank| Loc::input(block(*rank))).enumerate();
        steps.extend(blocks.map(|(seat, src)| Step::Copy { dst: block_in(host, seat), src }));
        steps.push(Step::Send { to: ranks[0], src: blocks_in(host, ranks.len()) });
    }
    let peers = hosts[own].iter().filter(|rank| **rank != root).map(|rank| block(*rank));
    steps.extend(peers.map(|it| Step::Copy { dst: Loc::slot(it), src: Loc::input(it) }));
    steps.extend([Step::Post, Step::Copy { dst: DATA, src: Loc::input(block(root)) }]);
    steps
}

/// 1 round between hosts, and one after it on a host that gets blocks for several ranks. The root sends one message to
/// each other host, with the `n` elements of each rank there. A rank reads its block.
pub(super) fn scatter_cost(topology: &Topology, root: Rank, n: usize) -> Cost {
    let elsewhere = topology.world_size - topology.neighbours(root).len();
    Cost {
        rounds: 1 + usize::from(largest_but(topology, root) > 1),
        messages: topology.ranks_by_host().len() - 1,
        elements: elsewhere * n,
        shared_elements: n,
        ..Cost::default()
    }
}

/// Where blocks lie in the slots of a [`scatter`]: a slot holds those of one host.
pub(super) fn scatter_shelves(topology: &Topology, _rank: Rank) -> Shelves {
    let seat = |rank: Rank| topology.neighbours(rank).partition_point(|other| *other < rank);
    let count = largest(topology.ranks_by_host());
    Shelves::shared((0..topology.world_size).map(seat), count)
}

/// Ranks of the largest host that is not the root's.
fn largest_but(topology: &Topology, root: Rank) -> usize {
    let (hosts, own) = (topology.ranks_by_host(), topology.host_of(root));
    others(hosts.len(), own).map(|host| hosts[host].len()).max().unwrap_or(0)
}

/// The block of one seat in the scratch of a host.
pub(super) fn block_in(host: usize, seat: usize) -> Loc {
    Loc::scratch(host, Span { first: seat, count: 1, of: 1 })
}

/// The first blocks there.
pub(super) fn blocks_in(host: usize, count: usize) -> Loc {
    Loc::scratch(host, Span { first: 0, count, of: 1 })
}
