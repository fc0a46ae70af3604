//! The ranks of other hosts that a rank talks to.
//!
//! Every rank has a *carrier* on every other host: the rank on its own seat there, or, where that host is smaller, on
//! the seat that is left when seats are counted round. A carrier gets, adds or passes on what its host has for that
//! rank, or from it.

use super::seats::Seats;
use super::shared::others;
use crate::step::{Loc, Rank, Span, Step};
use crate::topology::Topology;

/// For which posts of its neighbours a rank has waited.
pub(super) struct Waits {
    until: Vec<(Rank, usize)>,
}

impl Waits {
    pub(super) fn of(seat: &Seat<'_>) -> Waits {
        Waits { until: seat.peers().map(|(_, peer)| (peer, 0)).collect() }
    }

    /// Waits for post `upto` of a neighbour, if it has not waited yet.
    pub(super) fn until(&mut self, peer: Rank, upto: usize) -> Option<Step> {
        let known = self.until.iter_mut().find(|it| it.0 == peer && it.1 < upto)?;
        known.1 = upto;
        Some(Step::Wait { peer, upto })
    }

    /// Waits until nobody reads any more what was laid out two rounds ago.
    pub(super) fn before_reuse(&mut self, round: usize) -> Vec<Step> {
        let peers: Vec<Rank> = self.until.iter().map(|it| it.0).collect();
        match round {
            ..3 => vec![],
            _ => peers.into_iter().filter_map(|peer| self.until(peer, round - 1)).collect(),
        }
    }
}

/// A rank's place among hosts.
pub(super) struct Seat<'a> {
    pub(super) topology: &'a Topology,
    pub(super) hosts: &'a [Vec<Rank>],
    /// The index of the rank's host.
    pub(super) host: usize,
    /// The rank's index among the ranks of its host.
    pub(super) seat: usize,
}

impl Seat<'_> {
    pub(super) fn of(topology: &Topology, rank: Rank) -> Seat<'_> {
        let host = topology.host_of(rank);
        let hosts = topology.ranks_by_host();
        let Seats { seat, .. } = Seats::of(hosts, host, rank);
        Seat { topology, hosts, host, seat }
    }

    pub(super) fn rank(&self) -> Rank {
        self.hosts[self.host][self.seat]
    }

    pub(super) fn block(&self, owner: Rank) -> Span {
        Span::block(owner, self.topology.world_size)
    }

    pub(super) fn has_peers(&self) -> bool {
        self.hosts[self.host].len() > 1
    }

    /// The other ranks of the host, and their seats.
    pub(super) fn peers(&self) -> impl Iterator<Item = (usize, Rank)> {
        let ranks = &self.hosts[self.host];
        others(ranks.len(), self.seat).map(|seat| (seat, ranks[seat]))
    }

    /// The other hosts, from the next one on.
    pub(super) fn hosts_after(&self) -> impl Iterator<Item = usize> + use<> {
        others(self.hosts.len(), self.host)
    }

    /// The other hosts, from the one before on: where each sends to the hosts after it in turn, this is the order in
    /// which a host gets something.
    pub(super) fn hosts_before(&self) -> impl Iterator<Item = usize> + use<> {
        let (hosts, host) = (self.hosts.len(), self.host);
        (1..hosts).map(move |distance| (host + hosts - distance) % hosts)
    }

    /// The place of a rank's host in [`Seat::hosts_before`], from 1. 0: it is this host.
    pub(super) fn round_before(&self, rank: Rank) -> usize {
        let hosts = self.hosts.len();
        (self.host + hosts - self.topology.host_of(rank)) % hosts
    }

    /// The place of a rank's host in [`Seat::hosts_after`], from 1; this host is the last.
    pub(super) fn round_after(&self, rank: Rank) -> usize {
        let hosts = self.hosts.len();
        (self.topology.host_of(rank) + hosts - self.host - 1) % hosts + 1
    }

    /// How many other hosts take turns on shelves.
    pub(super) fn alternating(&self) -> usize {
        (self.hosts.len() - 1).min(2)
    }

    /// The seat of any rank on its own host.
    pub(super) fn seat_of(&self, rank: Rank) -> usize {
        self.topology.neighbours(rank).partition_point(|&other| other < rank)
    }

    /// The carrier of a rank on any host.
    pub(super) fn carrier_on(&self, host: usize, rank: Rank) -> Rank {
        self.hosts[host][self.seat_of(rank) % self.hosts[host].len()]
    }

    /// The seat on this host of the carrier of a rank. A rank of this host carries itself.
    pub(super) fn carrier_here(&self, rank: Rank) -> usize {
        self.seat_of(rank) % self.hosts[self.host].len()
    }

    /// The ranks of another host whose carrier has this seat on this host.
    pub(super) fn carried_by(&self, seat: usize, host: usize) -> impl Iterator<Item = Rank> {
        self.hosts[host].iter().skip(seat).step_by(self.hosts[self.host].len()).copied()
    }

    /// The number of ranks that this rank carries.
    pub(super) fn all_carried(&self) -> usize {
        self.hosts_after().map(|host| self.carried_by(self.seat, host).count()).sum()
    }

    /// Sends the input to the carriers of this rank.
    pub(super) fn sends_of_input(&self) -> Vec<Step> {
        let carrier = |host: usize| self.hosts[host][self.seat % self.hosts[host].len()];
        let send = |host| Step::Send { to: carrier(host), src: Loc::input(Span::WHOLE) };
        self.hosts_after().map(send).collect()
    }

    pub(super) fn post_and_wait(&self, upto: usize) -> impl Iterator<Item = Step> {
        let waits = self.peers().map(move |(_, peer)| Step::Wait { peer, upto });
        [Step::Post].into_iter().chain(waits)
    }
}

/// The maximum of a figure over all ranks.
pub(super) fn busiest(topology: &Topology, of: impl Fn(&Seat<'_>) -> usize) -> usize {
    (0..topology.world_size).map(|rank| of(&Seat::of(topology, rank))).max().unwrap_or(0)
}
