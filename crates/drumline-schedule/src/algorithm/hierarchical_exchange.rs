//! All hosts talk to all hosts: one message from each to each other.
//!
//! Every pair of hosts has an *agent* on either side, which sends and gets what goes between the two. The other hosts are
//! dealt out to the seats of a host, so that its ranks share the work. An agent collects the blocks of its host in
//! scratch, as they travel: in an all-to-all ordered by sender, and then by receiver.

use super::cost::Cost;
use super::hierarchical::largest;
use super::hierarchical_gather::{block_in, blocks_in};
use super::seats::{Seats, slices};
use super::shared::others;
use crate::schedule::Shelves;
use crate::step::{Loc, Rank, Span, Step};
use crate::topology::Topology;

/// Ranks lay out their blocks for others. Agents collect those for one host, and send them. Then they lay out what they
/// get, in slots from which they have read.
///
/// ```text
///   host 0   rank 0   a0 a1 a2 a3   a2 a3 b2 b3 -> rank 2     a0 b0 c0 d0
///            rank 1   b0 b1 b2 b3   -> slot                   a1 b1 c1 d1
///   host 1   rank 2   c0 c1 c2 c3   c0 c1 d0 d1 -> rank 0     a2 b2 c2 d2
///            rank 3   d0 d1 d2 d3   -> slot                   a3 b3 c3 d3
/// ```
///
/// See [`all_to_all_cost`]. No rank reads its own slot, because two ranks that are alone on a host swap slots: so a block
/// for a rank waits in the slot of the rank after it.
pub(super) fn all_to_all(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let seat = Exchange::of(topology, rank);
    let mut steps = seat.lay_out();
    steps.push(Step::Post);
    steps.extend(seat.peers().map(|peer| Step::Wait { peer, upto: 1 }));
    steps.extend(seat.own_hosts().flat_map(|host| seat.send(host)));
    // What stays on the host, while messages are under way.
    let own = seat.block(rank);
    steps.push(Step::Copy { dst: Loc::data(own), src: Loc::input(own) });
    let from =
        |peer: Rank| Step::Copy { dst: Loc::data(seat.block(peer)), src: Loc::slot(own).of(peer) };
    steps.extend(seat.peers().map(from));
    steps.extend(seat.own_hosts().map(|host| seat.receive(host)));
    steps.extend(seat.own_hosts().flat_map(|host| seat.hand_out(host)));
    steps.push(Step::Post);
    steps.extend(seat.fetch(|from, _| seat.kept_for(seat.seat, from)));
    steps
}

/// 1 round between hosts, and one before and after it on the hosts that have several ranks. With `H` hosts, a rank is the
/// agent for at most `ceil((H - 1) / q)` others, if its host has `q` ranks: it sends them one message each. It reads the
/// blocks of its neighbours, and lays out blocks for them.
pub(super) fn all_to_all_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let hosts = topology.ranks_by_host();
    let (sent, shared) = loads(topology, |q, carried, _| {
        let fetched = q - 1 + topology.world_size - q - carried;
        // An agent collects blocks of all neighbours. Those for one of them it lays out in its own slot.
        (q * carried, if q == 1 { 0 } else { fetched + carried * (q - 1) + carried * (q - 2) })
    });
    Cost {
        rounds: 1 + hosts.iter().filter(|ranks| ranks.len() > 1).take(2).count(),
        messages: (hosts.len() - 1).div_ceil(slices(hosts)),
        elements: sent * n,
        shared_elements: shared * n,
        ..Cost::default()
    }
}

/// Agents send the blocks of their host, side by side. Then they lay out what they get.
///
/// ```text
///   host 0   rank 0   a -> slot   a b -> rank 2   c d -> slot   a b c d
///            rank 1   b -> slot                                 a b c d
///   host 1   rank 2   c -> slot   c d -> rank 0   a b -> slot   a b c d
///            rank 3   d -> slot                                 a b c d
/// ```
///
/// See [`all_gather_cost`].
pub(super) fn all_gather(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let seat = Exchange::of(topology, rank);
    let input = Loc::input(Span::WHOLE);
    let (own, peers) = (seat.block(rank), seat.ranks().len() > 1);
    let lay_out = peers.then_some(Step::Copy { dst: Loc::slot(own), src: input });
    let mut steps: Vec<Step> = lay_out.into_iter().collect();
    steps.extend([Step::Post, Step::Copy { dst: Loc::data(own), src: input }]);
    for peer in seat.peers() {
        let block = seat.block(peer);
        steps.push(Step::Wait { peer, upto: 1 });
        steps.push(Step::Copy { dst: Loc::data(block), src: Loc::slot(block).of(peer) });
    }
    let hosts: Vec<usize> = seat.own_hosts().collect();
    // The blocks of a host lie apart in the data, if its ranks are not consecutive.
    let here = seat.hosts.len();
    let mut sent = input;
    if peers && !hosts.is_empty() {
        let blocks = seat.ranks().iter().map(|rank| Loc::data(seat.block(*rank))).enumerate();
        steps.extend(blocks.map(|(at, src)| Step::Copy { dst: block_in(here, at), src }));
        sent = blocks_in(here, seat.ranks().len());
    }
    steps.extend(hosts.iter().map(|host| Step::Send { to: seat.agent_of(*host), src: sent }));
    steps.extend(hosts.iter().map(|&host| Step::Recv {
        from: seat.agent_of(host),
        dst: blocks_in(host, seat.hosts[host].len()),
    }));
    for &host in &hosts {
        for (at, from) in seat.hosts[host].iter().enumerate() {
            let (block, src) = (seat.block(*from), block_in(host, at));
            steps.push(Step::Copy { dst: Loc::data(block), src });
            steps.extend(peers.then_some(Step::Copy { dst: Loc::slot(block), src }));
        }
    }
    steps.push(Step::Post);
    steps.extend(seat.fetch(|from, agent| Loc::slot(seat.block(from)).of(agent)));
    steps
}

/// Rounds and messages are those of [`all_to_all_cost`]. A rank reads the blocks of all ranks but those that it gets as an
/// agent, and its own.
pub(super) fn all_gather_cost(topology: &Topology, root: Rank, n: usize) -> Cost {
    let loads = loads(topology, |q, carried, hosts| {
        (q * hosts, if q == 1 { 0 } else { topology.world_size - 1 - carried })
    });
    let (sent, shared) = loads;
    Cost { elements: sent * n, shared_elements: shared * n, ..all_to_all_cost(topology, root, n) }
}

/// Where blocks lie in the slots of an [`all_gather`]: the owner's first, and then those of each host for which it is the
/// agent.
pub(super) fn all_gather_shelves(topology: &Topology, rank: Rank) -> Shelves {
    let Exchange { hosts, host, .. } = Exchange::of(topology, rank);
    let of_a_host = largest(hosts);
    let shelf = |owner: Rank| match distance(hosts, host, topology.host_of(owner)) {
        0 => 0,
        distance => {
            let seat = hosts[topology.host_of(owner)].partition_point(|other| *other < owner);
            1 + (distance - 1) / hosts[host].len() * of_a_host + seat
        }
    };
    let count = 1 + (hosts.len() - 1).div_ceil(slices(hosts)) * of_a_host;
    Shelves::shared((0..topology.world_size).map(shelf), count)
}

/// What one rank does.
struct Exchange<'a> {
    topology: &'a Topology,
    hosts: &'a [Vec<Rank>],
    /// The index of the rank's host.
    host: usize,
    /// The rank's index among the ranks of its host.
    seat: usize,
}

impl Exchange<'_> {
    fn of(topology: &Topology, rank: Rank) -> Exchange<'_> {
        let (hosts, host) = (topology.ranks_by_host(), topology.host_of(rank));
        let Seats { seat, .. } = Seats::of(hosts, host, rank);
        Exchange { topology, hosts, host, seat }
    }

    /// Blocks for neighbours, and those for other hosts if another rank is the agent.
    fn lay_out(&self) -> Vec<Step> {
        let elsewhere = self.hosts_of_others().flat_map(|host| self.hosts[host].iter().copied());
        let blocks = self.peers().chain(elsewhere).map(|rank| self.block(rank));
        blocks.map(|it| Step::Copy { dst: Loc::slot(it), src: Loc::input(it) }).collect()
    }

    /// Collects the blocks for a host, and sends them.
    fn send(&self, host: usize) -> Vec<Step> {
        let (here, there) = (self.ranks(), &self.hosts[host]);
        let mut steps = vec![];
        for (seat, rank) in here.iter().enumerate() {
            for (place, to) in there.iter().enumerate() {
                let src = match seat == self.seat {
                    true => Loc::input(self.block(*to)),
                    false => Loc::slot(self.block(*to)).of(*rank),
                };
                let dst = block_in(2 * host, seat * there.len() + place);
                steps.push(Step::Copy { dst, src });
            }
        }
        let src = blocks_in(2 * host, here.len() * there.len());
        steps.push(Step::Send { to: self.agent_of(host), src });
        steps
    }

    fn receive(&self, host: usize) -> Step {
        let dst = blocks_in(2 * host + 1, self.ranks().len() * self.hosts[host].len());
        Step::Recv { from: self.agent_of(host), dst }
    }

    /// Lays out what a host has sent.
    fn hand_out(&self, host: usize) -> Vec<Step> {
        let (here, there) = (self.ranks(), &self.hosts[host]);
        let mut steps = vec![];
        for (place, from) in there.iter().enumerate() {
            for seat in 0..here.len() {
                let dst = match seat == self.seat {
                    true => Loc::data(self.block(*from)),
                    false => self.kept_for(seat, *from),
                };
                let src = block_in(2 * host + 1, place * here.len() + seat);
                steps.push(Step::Copy { dst, src });
            }
        }
        steps
    }

    /// Fetches what other agents have got for this rank. `kept` says where the block of a rank is, by its agent.
    fn fetch(&self, kept: impl Fn(Rank, Rank) -> Loc) -> Vec<Step> {
        let mut steps = vec![];
        let mut known = vec![false; self.ranks().len()];
        for host in self.hosts_of_others() {
            let seat = self.agent_for(host);
            let agent = self.ranks()[seat];
            if !std::mem::replace(&mut known[seat], true) {
                steps.push(Step::Wait { peer: agent, upto: 2 });
            }
            steps.extend(self.hosts[host].iter().map(|from| Step::Copy {
                dst: Loc::data(self.block(*from)),
                src: kept(*from, agent),
            }));
        }
        steps
    }

    /// Where the block of a rank of another host waits for a rank of this host: in the slot of the next rank, in place of
    /// what that rank has sent to the same rank.
    fn kept_for(&self, seat: usize, from: Rank) -> Loc {
        let next = (seat + 1) % self.ranks().len();
        let slot = Loc::slot(self.block(from));
        if next == self.seat { slot } else { slot.of(self.ranks()[next]) }
    }

    fn block(&self, rank: Rank) -> Span {
        Span::block(rank, self.topology.world_size)
    }

    /// The ranks of this host.
    fn ranks(&self) -> &[Rank] {
        &self.hosts[self.host]
    }

    /// The other ranks of this host.
    fn peers(&self) -> impl Iterator<Item = Rank> {
        others(self.ranks().len(), self.seat).map(|seat| self.ranks()[seat])
    }

    /// The hosts for which this rank is the agent.
    fn own_hosts(&self) -> impl Iterator<Item = usize> {
        others(self.hosts.len(), self.host).filter(|host| self.agent_for(*host) == self.seat)
    }

    /// The other hosts for which another rank of this host is the agent.
    fn hosts_of_others(&self) -> impl Iterator<Item = usize> {
        others(self.hosts.len(), self.host).filter(|host| self.agent_for(*host) != self.seat)
    }

    /// The seat on this host of the agent for another host.
    fn agent_for(&self, host: usize) -> usize {
        agent(self.hosts, self.host, host)
    }

    /// The agent of another host for this host.
    fn agent_of(&self, host: usize) -> Rank {
        self.hosts[host][agent(self.hosts, host, self.host)]
    }
}

/// The maximum of two figures over all ranks. They depend on the number of ranks of the host, and on the number of ranks
/// and of hosts for which a rank is the agent.
fn loads(
    topology: &Topology,
    of: impl Fn(usize, usize, usize) -> (usize, usize),
) -> (usize, usize) {
    let hosts = topology.ranks_by_host();
    // On equal hosts ranks do the same.
    let equal = hosts.iter().all(|ranks| ranks.len() == hosts[0].len());
    let mut most = (0, 0);
    for host in 0..if equal { 1 } else { hosts.len() } {
        let mut carried = vec![(0, 0); hosts[host].len()];
        for other in others(hosts.len(), host) {
            let (ranks, hosts_of) = &mut carried[agent(hosts, host, other)];
            *ranks += hosts[other].len();
            *hosts_of += 1;
        }
        for (ranks, hosts_of) in carried {
            let load = of(hosts[host].len(), ranks, hosts_of);
            most = (most.0.max(load.0), most.1.max(load.1));
        }
    }
    most
}

/// The seat of the agent of a host for another one. The other hosts are dealt out from the next one on.
fn agent(hosts: &[Vec<Rank>], of: usize, to: usize) -> usize {
    (distance(hosts, of, to) - 1) % hosts[of].len()
}

fn distance(hosts: &[Vec<Rank>], of: usize, to: usize) -> usize {
    (to + hosts.len() - of) % hosts.len()
}
