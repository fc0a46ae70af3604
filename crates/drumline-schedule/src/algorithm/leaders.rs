//! One rank of each host adds for all of them, and only these leaders talk between hosts.

use super::cost::Cost;
use super::{binomial, dissemination, doubling};
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

/// The root speaks for its host, and the lowest rank of every other host for that one. The data goes from speaker to
/// speaker along a tree of hosts, and then through slots to the other ranks.
///
/// ```text
///   host 0   rank 0 (root)   a     a -> rank 2, slot
///            rank 1                             slot of 0 -> data
///   host 1   rank 2                a -> slot
///            rank 3                             slot of 2 -> data
/// ```
///
/// See [`broadcast_cost`]. For short data: one message for each host, and one post.
pub(super) fn broadcast(topology: &Topology, rank: Rank, root: Rank) -> Vec<Step> {
    let speakers = Speakers { topology, root };
    let speaker = speakers.of(topology.host_of(rank));
    if rank != speaker {
        let fetch = Step::Copy { dst: DATA, src: SLOT.of(speaker) };
        return vec![Step::Post, Step::Wait { peer: speaker, upto: 1 }, fetch];
    }
    let mut steps = speakers.among(rank, DATA, binomial::broadcast);
    steps.extend([Step::Copy { dst: SLOT, src: DATA }, Step::Post]);
    steps
}

/// The rounds and messages of a [binomial tree](binomial::broadcast_cost) over hosts, and one round on the host after
/// them. A rank reads the `n` elements.
pub(super) fn broadcast_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let hosts = Topology::flat(topology.ranks_by_host().len());
    let among = binomial::broadcast_cost(&hosts, 0, n);
    Cost { rounds: among.rounds + 1, shared_elements: n, ..among }
}

/// Speakers as in [`broadcast`] sum the slots of their host. Then they sum [towards the root](binomial::reduce_sums), as
/// if hosts were ranks.
///
/// See [`reduce_cost`]. For short data: one message for each host, and one post.
pub(super) fn reduce(topology: &Topology, rank: Rank, root: Rank) -> Vec<Step> {
    let speakers = Speakers { topology, root };
    let host = topology.host_of(rank);
    if rank != speakers.of(host) {
        return vec![Step::Copy { dst: SLOT, src: DATA }, Step::Post];
    }
    // The data of other ranks stays as it is.
    let sum = if rank == root { DATA } else { Loc::scratch(0, Span::WHOLE) };
    let ranks = topology.neighbours(rank);
    let others = ranks.iter().filter(|peer| **peer != rank);
    let mut steps = vec![Step::Post];
    steps.extend(others.map(|&peer| Step::Wait { peer, upto: 1 }));
    let laid_out = ranks.iter().map(|&peer| if peer == rank { DATA } else { SLOT.of(peer) });
    steps.push(Step::ReduceTree {
        dsts: vec![sum],
        srcs: laid_out.enumerate().map(|(seat, src)| (Node::leaf(seat), src)).collect(),
        finish: false,
    });
    let climb = |hosts: &Topology, host, root| binomial::reduce_sums(hosts.world_size, host, root);
    steps.extend(speakers.among(rank, sum, climb));
    steps
}

/// The rounds of the [tree](binomial::reduce_sums_rounds) over hosts, and one on the host before them. A speaker reads and
/// combines the data of its host, and then the sums of other hosts.
pub(super) fn reduce_cost(topology: &Topology, root: Rank, n: usize) -> Cost {
    let (hosts, root) = (topology.ranks_by_host(), topology.host_of(root));
    let others = |host: usize| hosts[host].len() - 1;
    let combined =
        (0..hosts.len()).map(|host| others(host) + binomial::received(hosts.len(), host, root));
    Cost {
        rounds: binomial::reduce_sums_rounds(hosts.len(), root) + 1,
        messages: 1,
        elements: n,
        combined: combined.max().unwrap_or(0) * n,
        shared_elements: (0..hosts.len()).map(others).max().unwrap_or(0) * n,
    }
}

/// The ranks that speak for their hosts where there is a root.
struct Speakers<'a> {
    topology: &'a Topology,
    root: Rank,
}

impl Speakers<'_> {
    fn of(&self, host: usize) -> Rank {
        match host == self.topology.host_of(self.root) {
            true => self.root,
            false => self.topology.ranks_by_host()[host][0],
        }
    }

    /// What a speaker does in an algorithm among hosts that count as ranks. Its data lies in `data`.
    fn among(
        &self,
        rank: Rank,
        data: Loc,
        generate: impl Fn(&Topology, Rank, Rank) -> Vec<Step>,
    ) -> Vec<Step> {
        let hosts = Topology::flat(self.topology.ranks_by_host().len());
        let [host, root] = [rank, self.root].map(|rank| self.topology.host_of(rank));
        let steps = generate(&hosts, host, root).into_iter();
        steps.map(|step| step.moved(|host| self.of(host), |_| data)).collect()
    }
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
