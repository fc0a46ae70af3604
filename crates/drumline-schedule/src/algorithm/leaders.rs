//! One rank of each host adds for all of them, and only these leaders talk between hosts.

use super::cost::Cost;
use super::{dissemination, doubling};
use crate::step::{Loc, Rank, Span, Step};
use crate::topology::Topology;
use crate::tree::Node;

const DATA: Loc = Loc::data(Span::WHOLE);
const SLOT: Loc = Loc::slot(Span::WHOLE);

/// Several hosts with several ranks each.
pub(super) fn serves_any(topology: &Topology) -> bool {
    let hosts = topology.ranks_by_host();
    hosts.len() > 1 && hosts.iter().all(|ranks| ranks.len() > 1)
}

/// The same, where hosts may add their own ranks first.
pub(super) fn serves(topology: &Topology) -> bool {
    topology.sums_by_placement() && serves_any(topology)
}

/// A leader enters a [dissemination] barrier of all leaders when its host has entered, and its host leaves with it.
///
/// See [`barrier_cost`].
pub(super) fn barrier(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let (leader, others) = match topology.neighbours(rank) {
        [leader, others @ ..] => (*leader, others),
        [] => return vec![],
    };
    if rank != leader {
        return vec![Step::Post, Step::Wait { peer: leader, upto: 1 }];
    }
    let hosts = topology.ranks_by_host();
    let leaders = Topology::flat(hosts.len());
    let between = dissemination::barrier(&leaders, topology.host_of(rank), 0);
    let mut steps: Vec<Step> = others.iter().map(|&peer| Step::Wait { peer, upto: 1 }).collect();
    steps.extend(between.into_iter().map(|step| step.moved(|host| hosts[host][0], |loc| loc)));
    steps.push(Step::Post);
    steps
}

/// The rounds and messages of a dissemination barrier among as many ranks as there are hosts, and one round on the host
/// before and after it.
pub(super) fn barrier_cost(topology: &Topology, root: Rank, n: usize) -> Cost {
    let leaders = Topology::flat(topology.ranks_by_host().len());
    let among_leaders = dissemination::barrier_cost(&leaders, root, n);
    Cost { rounds: among_leaders.rounds + 2, ..among_leaders }
}

/// The leader is the lowest rank of a host. It sums the slots of its host, takes part in recursive
/// [`doubling`] among all leaders, and copies the result to its slot for the others.
///
/// ```text
///   host 0   rank 0      a + b = A     A + C        -> data, slot
///            rank 1   b -> slot          |             slot of 0 -> data
///                                        |  swapped
///   host 1   rank 2      c + d = C     A + C        -> data, slot
///            rank 3   d -> slot                        slot of 2 -> data
/// ```
///
/// See [`all_reduce_cost`]. No chain of messages between hosts can be shorter, and no host can send fewer
/// messages, so this is for short data. Leaders do all the work, so it is not for long data. Scratch is as
/// long as the data, or twice that where the number of hosts is not a power of two.
pub(super) fn all_reduce(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let (leader, others) = match topology.neighbours(rank) {
        [leader, others @ ..] => (*leader, others),
        [] => return vec![],
    };
    if rank != leader {
        return vec![
            Step::Copy { dst: SLOT, src: DATA },
            Step::Post,
            Step::Wait { peer: leader, upto: 1 },
            Step::Copy { dst: DATA, src: SLOT.of(leader) },
        ];
    }
    let laid_out = others.iter().map(|&other| SLOT.of(other));
    let srcs = std::iter::once(DATA).chain(laid_out);
    let mut steps: Vec<Step> = others.iter().map(|&peer| Step::Wait { peer, upto: 1 }).collect();
    steps.push(Step::ReduceTree {
        dsts: vec![DATA],
        srcs: srcs.enumerate().map(|(seat, src)| (Node::leaf(seat), src)).collect(),
        finish: false,
    });
    steps.extend(among_leaders(topology, topology.host_of(rank)));
    steps.push(Step::Copy { dst: SLOT, src: DATA });
    steps.push(Step::Post);
    steps
}

/// Doubling in which each host counts as a rank.
fn among_leaders(topology: &Topology, host: usize) -> impl Iterator<Item = Step> {
    let hosts = topology.ranks_by_host();
    let doubling = doubling::all_reduce(&Topology::flat(hosts.len()), host, 0);
    doubling.into_iter().map(|step| step.moved(|host| hosts[host][0], |loc| loc))
}

/// The rounds of doubling among as many ranks as there are hosts, one round on the host before them and one
/// after them. A leader combines the slots of its host, and once for each node of the tree over hosts that
/// its host is in. It reads the `n` elements of each other rank of its host.
pub(super) fn all_reduce_cost(topology: &Topology, root: Rank, n: usize) -> Cost {
    let hosts = topology.ranks_by_host();
    let among_leaders = doubling::all_reduce_cost(&Topology::flat(hosts.len()), root, n);
    let others = |host: usize| hosts[host].len() - 1;
    let combined = (0..hosts.len()).map(|host| others(host) + depth(Node::root(hosts.len()), host));
    Cost {
        rounds: among_leaders.rounds + 2,
        combined: combined.max().unwrap_or(0) * n,
        shared_elements: (0..hosts.len()).map(others).max().unwrap_or(0) * n,
        ..among_leaders
    }
}

/// The number of nodes above a leaf.
fn depth(node: Node, leaf: usize) -> usize {
    match node.children() {
        None => 0,
        Some((left, right)) => 1 + depth(if leaf < right.lo { left } else { right }, leaf),
    }
}
