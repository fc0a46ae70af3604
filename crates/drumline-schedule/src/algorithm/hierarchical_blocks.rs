//! A block for every rank, between hosts: whatever crosses a line crosses it once for a host.
//!
//! Messages go between a rank and its [carriers](super::carriers) only. Neighbours move data on their host.

use super::carriers::{Seat, Waits, busiest};
use super::cost::Cost;
use super::direct::DIRECT_MAX_RANKS;
use super::hierarchical::largest;
use super::seats::slices;
use crate::schedule::Shelves;
use crate::step::{Loc, Rank, Span, Step};
use crate::topology::Topology;
use crate::tree::Node;

/// Several hosts, one of them with several ranks, and few enough that every host may send to every host.
pub(super) fn serves(topology: &Topology) -> bool {
    let hosts = topology.ranks_by_host();
    (2..=DIRECT_MAX_RANKS).contains(&hosts.len()) && largest(hosts) > 1
}

/// The same, where hosts may add their own ranks first.
pub(super) fn serves_sums(topology: &Topology) -> bool {
    serves(topology) && topology.sums_by_placement()
}

/// Every rank sends its block to its carriers. Then hosts share out what has come, one other host after another.
///
/// ```text
///   host 0   rank 0   a        a . c .        a b c .        a b c d
///            rank 1   b   ->   . b . d   ->   a b . d   ->   a b c d
///   host 1   rank 2   c        a . c .        a . c d        a b c d
///            rank 3   d        . b . d        . b c d        a b c d
/// ```
///
/// See [`all_gather_cost`]. A slot has shelves for the rank's own block and for what it has got from two hosts: while
/// neighbours read from one shelf, the next host's data goes to the other.
pub(super) fn all_gather(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let seat = Seat::of(topology, rank);
    let mut waits = Waits::of(&seat);
    let mut steps = seat.sends_of_input();
    steps.push(Step::Copy { dst: Loc::data(seat.block(rank)), src: Loc::input(Span::WHOLE) });
    for (round, host) in (1..).zip(seat.hosts_before()) {
        let place = |owner: &Rank| Loc::data(seat.block(*owner));
        let carried: Vec<Rank> = seat.carried_by(seat.seat, host).collect();
        steps.extend(carried.iter().map(|from| Step::Recv { from: *from, dst: place(from) }));
        steps.extend(share_out(&seat, &mut waits, round, host, &carried));
    }
    steps
}

/// Neighbours get from each other what has come from `host` in this round; in the first round, also their own blocks.
/// `carried` is what this rank has got.
pub(super) fn share_out(
    seat: &Seat<'_>,
    waits: &mut Waits,
    round: usize,
    host: usize,
    carried: &[Rank],
) -> Vec<Step> {
    let mut steps = vec![];
    if seat.has_peers() {
        if !carried.is_empty() {
            steps.extend(waits.before_reuse(round));
        }
        let own = (round == 1).then(|| Step::Copy {
            dst: Loc::slot(seat.block(seat.rank())),
            src: Loc::input(Span::WHOLE),
        });
        let of_others = carried.iter().map(|owner| {
            let block = seat.block(*owner);
            Step::Copy { dst: Loc::slot(block), src: Loc::data(block) }
        });
        steps.extend(own.into_iter().chain(of_others));
    }
    steps.push(Step::Post);
    for (peer_seat, peer) in seat.peers() {
        let of_peer = (round == 1).then_some(peer).into_iter();
        let blocks = of_peer.chain(seat.carried_by(peer_seat, host)).map(|it| seat.block(it));
        let fetch: Vec<Step> = blocks
            .map(|it| Step::Copy { dst: Loc::data(it), src: Loc::slot(it).of(peer) })
            .collect();
        if !fetch.is_empty() {
            steps.extend(waits.until(peer, round));
        }
        steps.extend(fetch);
    }
    steps
}

/// With `H` hosts: `H` rounds, one of them between hosts. A rank sends its `n` elements to each of its `H - 1`
/// carriers. It reads from neighbours all blocks but its own and those that it carries.
pub(super) fn all_gather_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let hosts = topology.ranks_by_host().len();
    let read = busiest(topology, |seat| match seat.has_peers() {
        true => topology.world_size - 1 - seat.all_carried(),
        false => 0,
    });
    let peers = hosts - 1;
    Cost {
        rounds: hosts,
        messages: peers,
        elements: peers * n,
        shared_elements: read * n,
        ..Cost::default()
    }
}

/// Where blocks lie in the slots of an [`all_gather`]: the owner's first, then those of two hosts.
pub(super) fn all_gather_shelves(topology: &Topology, rank: Rank) -> Shelves {
    let seat = Seat::of(topology, rank);
    alternating_shelves(&seat, |owner| seat.round_before(owner))
}

/// A shelf for the block of the slot's owner, and then shelves for the blocks that it gets in two rounds. The blocks of
/// its own host have the round 0.
pub(super) fn alternating_shelves(seat: &Seat<'_>, round_of: impl Fn(Rank) -> usize) -> Shelves {
    // Of one host, the largest number of ranks with the same carrier.
    let of_a_host = largest(seat.hosts).div_ceil(slices(seat.hosts));
    let shelf = |owner: Rank| match round_of(owner) {
        0 => 0,
        round => {
            1 + (round - 1) % 2 * of_a_host + seat.seat_of(owner) / seat.hosts[seat.host].len()
        }
    };
    Shelves::shared((0..seat.topology.world_size).map(shelf), 1 + seat.alternating() * of_a_host)
}

/// The same in registered data: a rank writes its own block and those that it carries to the data of its neighbours.
///
/// See [`all_gather_push_cost`].
pub(super) fn all_gather_push(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let seat = Seat::of(topology, rank);
    let mut steps = seat.sends_of_input();
    steps.extend(hand_out_own(&seat));
    for from in seat.hosts_before().flat_map(|host| seat.carried_by(seat.seat, host)) {
        let block = Loc::data(seat.block(from));
        steps.push(Step::Recv { from, dst: block });
        steps.extend(hand_out(&seat, block, block));
    }
    steps.extend(seat.post_and_wait(2));
    steps
}

/// Waits until neighbours have called, and writes the rank's own block to their data.
pub(super) fn hand_out_own(seat: &Seat<'_>) -> Vec<Step> {
    let (own, input) = (Loc::data(seat.block(seat.rank())), Loc::input(Span::WHOLE));
    let mut steps: Vec<Step> = seat.post_and_wait(1).collect();
    steps.push(Step::Copy { dst: own, src: input });
    steps.extend(hand_out(seat, own, input));
    steps
}

/// Writes a block to the data of all neighbours.
pub(super) fn hand_out(seat: &Seat<'_>, dst: Loc, src: Loc) -> impl Iterator<Item = Step> {
    seat.peers().map(move |(_, peer)| Step::Copy { dst: dst.of(peer), src })
}

/// 2 rounds, and messages as in [`all_gather_cost`]. A rank writes its block and those that it carries to each of its
/// neighbours.
pub(super) fn all_gather_push_cost(topology: &Topology, root: Rank, n: usize) -> Cost {
    let written = busiest(topology, |seat| (1 + seat.all_carried()) * seat.peers().count());
    Cost { rounds: 2, shared_elements: written * n, ..all_gather_cost(topology, root, n) }
}

/// The carrier of a rank sums that rank's block over its host, and sends it the sum. The rank sums what it gets, and its
/// block over its own host.
///
/// ```text
///   host 0   rank 0   a0 a1 a2 a3   the carrier of 2 sums a2 + b2 = A2       s0 = A0 + C0
///            rank 1   b0 b1 b2 b3                    of 3 sums a3 + b3 = A3  s1 = A1 + C1
///   host 1   rank 2   c0 c1 c2 c3   the carrier of 0 sums c0 + d0 = C0       s2 = A2 + C2
///            rank 3   d0 d1 d2 d3                    of 1 sums c1 + d1 = C1  s3 = A3 + C3
/// ```
///
/// See [`reduce_scatter_cost`]. Hosts add for one other host after another, and for themselves last. A slot has shelves
/// for the blocks of two hosts. Scratch holds a block for
/// every other host, and one that is sent to it: so a rank need not wait until others have taken its sums.
pub(super) fn reduce_scatter(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let seat = Seat::of(topology, rank);
    let mut waits = Waits::of(&seat);
    let sums = Sums { seat: &seat, from: Loc::slot };
    let mut steps = vec![];
    for (round, host) in (1..).zip(seat.hosts_after().chain([seat.host])) {
        steps.extend(lay_out(&seat, &mut waits, round, host));
        steps.extend(sums.of_round(round));
    }
    steps.push(sums.over_hosts());
    steps
}

/// Ranks lay out their blocks for a host, except for those that they carry, and wait until neighbours have done so.
pub(super) fn lay_out(seat: &Seat<'_>, waits: &mut Waits, round: usize, host: usize) -> Vec<Step> {
    let is_carried = |owner: Rank| seat.carrier_here(owner) == seat.seat;
    let of_others = seat.hosts[host].iter().filter(|owner| !is_carried(**owner));
    let blocks: Vec<Span> = match seat.has_peers() {
        true => of_others.map(|owner| seat.block(*owner)).collect(),
        false => vec![],
    };
    let mut steps = vec![];
    if !blocks.is_empty() {
        steps.extend(waits.before_reuse(round));
    }
    let copy = |block| Step::Copy { dst: Loc::slot(block), src: Loc::input(block) };
    steps.extend(blocks.into_iter().map(copy));
    steps.push(Step::Post);
    if host == seat.host || seat.carried_by(seat.seat, host).next().is_some() {
        steps.extend(seat.peers().flat_map(|(_, peer)| waits.until(peer, round)));
    }
    steps
}

/// With `H` hosts: `H` rounds. A rank sends the blocks that it carries. For each of these, and for its own, it reads and
/// combines the contributions of its neighbours. Then it combines `H` sums.
pub(super) fn reduce_scatter_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let hosts = topology.ranks_by_host().len();
    let of_peers = |seat: &Seat<'_>| (1 + seat.all_carried()) * seat.peers().count();
    let sent = busiest(topology, |seat| seat.all_carried());
    Cost {
        rounds: hosts,
        messages: sent,
        elements: sent * n,
        combined: (busiest(topology, of_peers) + hosts - 1) * n,
        shared_elements: busiest(topology, of_peers) * n,
    }
}

/// Where blocks lie in the slots of a [`reduce_scatter`]: those of a host side by side, and two hosts in turn.
pub(super) fn reduce_scatter_shelves(topology: &Topology, rank: Rank) -> Shelves {
    let seat = Seat::of(topology, rank);
    let of_a_host = largest(seat.hosts);
    let shelf = |owner: Rank| seat.round_after(owner) % 2 * of_a_host + seat.seat_of(owner);
    Shelves::shared((0..topology.world_size).map(shelf), 2 * of_a_host)
}

/// The same where neighbours read each other's inputs, which are registered.
///
/// See [`reduce_scatter_pull_cost`].
pub(super) fn reduce_scatter_pull(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let seat = Seat::of(topology, rank);
    let sums = Sums { seat: &seat, from: Loc::input };
    let mut steps: Vec<Step> = seat.post_and_wait(1).collect();
    steps.extend((1..=seat.hosts.len()).flat_map(|round| sums.of_round(round)));
    steps.extend(seat.post_and_wait(2));
    steps.push(sums.over_hosts());
    steps
}

/// `2 + H / 2` rounds where all hosts have several ranks, since a rank sends after it has got what was sent two rounds
/// before; otherwise as [`reduce_scatter_cost`].
pub(super) fn reduce_scatter_pull_cost(topology: &Topology, root: Rank, n: usize) -> Cost {
    let rounds = reduce_scatter_pull_rounds(topology.ranks_by_host());
    Cost { rounds, ..reduce_scatter_cost(topology, root, n) }
}

/// A rank that is alone on its host does not wait for posts. So the rounds are counted as they pass.
fn reduce_scatter_pull_rounds(hosts: &[Vec<Rank>]) -> usize {
    let posts = |host: usize| usize::from(hosts[host].len() > 1);
    let mut known: Vec<usize> = (0..hosts.len()).map(posts).collect();
    let mut sent_before = known.clone();
    for round in 1..=hosts.len() {
        let sent: Vec<usize> = known.iter().map(|rounds| rounds + 1).collect();
        if round > 1 {
            let from = |host: usize| (host + hosts.len() + 1 - round) % hosts.len();
            let got = (0..hosts.len()).map(|host| known[host].max(sent_before[from(host)]));
            known = got.collect();
        }
        sent_before = sent;
    }
    (0..hosts.len()).map(|host| known[host] + posts(host)).max().unwrap_or(0)
}

/// The sums of a reduce_scatter that one rank makes.
pub(super) struct Sums<'a> {
    pub(super) seat: &'a Seat<'a>,
    /// Where the contributions of neighbours lie.
    pub(super) from: fn(Span) -> Loc,
}

impl Sums<'_> {
    /// Sums the blocks that this rank carries for the host of a round, and sends the sums. Then it gets what was sent to
    /// it in the round before. So a sum is made while the last one is sent.
    fn of_round(&self, round: usize) -> Vec<Step> {
        let Seat { hosts, host, seat, .. } = *self.seat;
        let to_host = (host + round) % hosts.len();
        let mut steps = vec![];
        if to_host == host {
            let (block, data) = (self.seat.block(hosts[host][seat]), Loc::data(Span::WHOLE));
            steps.push(self.over_host(block, data));
        } else {
            let carried = self.seat.carried_by(seat, to_host).enumerate();
            steps.extend(carried.flat_map(|(at, to)| self.send(round, at, to)));
        }
        steps.extend((round > 1).then(|| {
            let from_host = (host + hosts.len() + 1 - round) % hosts.len();
            let from = hosts[from_host][seat % hosts[from_host].len()];
            Step::Recv { from, dst: self.scratch(from_host) }
        }));
        steps
    }

    /// Sends to a rank the sum of its block. A rank that is alone on its host sends the block itself.
    fn send(&self, round: usize, at: usize, to: Rank) -> Vec<Step> {
        let block = self.seat.block(to);
        if !self.seat.has_peers() {
            return vec![Step::Send { to, src: Loc::input(block) }];
        }
        let hosts = self.seat.hosts.len();
        let sum = Loc::scratch((at + 1) * hosts + round, block);
        vec![self.over_host(block, sum), Step::Send { to, src: sum }]
    }

    /// Sums a block over the rank's host.
    pub(super) fn over_host(&self, block: Span, dst: Loc) -> Step {
        let Seat { hosts, host, seat, .. } = *self.seat;
        if !self.seat.has_peers() {
            return Step::Copy { dst, src: Loc::input(block) };
        }
        let srcs = hosts[host].iter().enumerate().map(|(at, &neighbour)| match at == seat {
            true => (Node::leaf(at), Loc::input(block)),
            false => (Node::leaf(at), (self.from)(block).of(neighbour)),
        });
        Step::ReduceTree { dsts: vec![dst], srcs: srcs.collect(), finish: false }
    }

    /// Where the sum of another host for this rank lies.
    fn scratch(&self, host: usize) -> Loc {
        let Seat { hosts, host: own, seat, .. } = *self.seat;
        Loc::scratch(host, self.seat.block(hosts[own][seat]))
    }

    /// Adds the sums of all hosts. That of the own host lies in the data.
    fn over_hosts(&self) -> Step {
        let data = Loc::data(Span::WHOLE);
        let sum_of = |host: usize| match host == self.seat.host {
            true => data,
            false => self.scratch(host),
        };
        let srcs = (0..self.seat.hosts.len()).map(|host| (Node::leaf(host), sum_of(host)));
        Step::ReduceTree { dsts: vec![data], srcs: srcs.collect(), finish: true }
    }
}
