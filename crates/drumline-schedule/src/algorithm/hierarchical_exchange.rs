//! An all-to-all between hosts: one message from each host to each other host.
//!
//! Every pair of hosts has an *agent* on either side, which sends and gets what goes between the two. The other hosts are
//! dealt out to the seats of a host, so that its ranks share the work. An agent collects the blocks of its host in
//! scratch, as they travel: ordered by sender, and then by receiver.

use super::cost::Cost;
use super::hierarchical_gather::{block_in, blocks_in};
use super::seats::{Seats, slices};
use super::shared::others;
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
    steps.extend(seat.fetch());
    steps
}

/// 1 round between hosts, and one before and after it on the hosts that have several ranks. With `H` hosts, a rank is the
/// agent for at most `ceil((H - 1) / q)` others, if its host has `q` ranks: it sends them one message each. It reads the
/// blocks of its neighbours, and lays out blocks for them.
pub(super) fn all_to_all_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let hosts = topology.ranks_by_host();
    let loads = hosts.iter().enumerate().flat_map(|(host, ranks)| {
        let q = ranks.len();
        let load = move |carried| {
            let fetched = q - 1 + topology.world_size - q - carried;
            // An agent collects blocks of all neighbours. Those for one of them it lays out in its own slot.
            let shared = if q == 1 { 0 } else { fetched + carried * (q - 1) + carried * (q - 2) };
            (q * carried, shared)
        };
        carried(hosts, host).into_iter().map(load)
    });
    // On equal hosts ranks do the same.
    let equal = hosts.iter().all(|ranks| ranks.len() == hosts[0].len());
    let loads = loads.take(if equal { hosts[0].len() } else { topology.world_size });
    let (sent, shared) = loads.fold((0, 0), |most, load| (most.0.max(load.0), most.1.max(load.1)));
    Cost {
        rounds: 1 + hosts.iter().filter(|ranks| ranks.len() > 1).take(2).count(),
        messages: (hosts.len() - 1).div_ceil(slices(hosts)),
        elements: sent * n,
        shared_elements: shared * n,
        ..Cost::default()
    }
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

    /// Fetches what other agents have got for this rank.
    fn fetch(&self) -> Vec<Step> {
        let mut steps = vec![];
        let mut known = vec![false; self.ranks().len()];
        for host in self.hosts_of_others() {
            let agent = self.agent_for(host);
            if !std::mem::replace(&mut known[agent], true) {
                steps.push(Step::Wait { peer: self.ranks()[agent], upto: 2 });
            }
            steps.extend(self.hosts[host].iter().map(|from| Step::Copy {
                dst: Loc::data(self.block(*from)),
                src: self.kept_for(self.seat, *from),
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

/// For each seat of a host, the number of ranks of the hosts for which it is the agent.
fn carried(hosts: &[Vec<Rank>], host: usize) -> Vec<usize> {
    let mut carried = vec![0; hosts[host].len()];
    for other in others(hosts.len(), host) {
        carried[agent(hosts, host, other)] += hosts[other].len();
    }
    carried
}

/// The seat of the agent of a host for another one. The other hosts are dealt out from the next one on.
fn agent(hosts: &[Vec<Rank>], of: usize, to: usize) -> usize {
    let distance = (to + hosts.len() - of) % hosts.len();
    (distance - 1) % hosts[of].len()
}
