//! A block for every rank, around a ring of hosts: each host talks to two others, however many there are.

use super::carriers::{Seat, Waits};
use super::cost::Cost;
use super::direct::DIRECT_MAX_RANKS;
use super::hierarchical::largest;
use super::hierarchical_blocks::{alternating_shelves, hand_out, hand_out_own, share_out};
use crate::schedule::Shelves;
use crate::step::{Loc, Rank, Span, Step};
use crate::topology::Topology;

/// Several hosts, one of them with several ranks.
pub(super) fn serves(topology: &Topology) -> bool {
    let hosts = topology.ranks_by_host();
    hosts.len() > 1 && largest(hosts) > 1
}

/// The carriers of a rank's block pass it on from host to host, in both directions around the ring, until it has come
/// to every host. In each round a host shares out what has come from one other host.
///
/// ```text
///   host          0       1       2       3       4
///   own           0....   .1...   ..2..   ...3.   ....4
///   from left     0...4   01...   .12..   ..23.   ...34
///   from right    01..4   012..   .123.   ..234   0..34
///   from left     01.34   012.4   0123.   .1234   0.234
///   from right    01234   01234   01234   01234   01234
/// ```
///
/// See [`all_gather_cost`]. While a block is under way in one direction, the host works on one from the other. A slot
/// has shelves for the rank's own block and for what it has got in two rounds.
pub(super) fn all_gather(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let seat = Seat::of(topology, rank);
    let mut waits = Waits::of(&seat);
    let ring = Ring::of(&seat);
    let mut steps = ring.sends_of_input(&seat);
    steps.push(Step::Copy { dst: Loc::data(seat.block(rank)), src: Loc::input(Span::WHOLE) });
    for (round, arrival) in (1..).zip(ring.arrivals()) {
        let carried: Vec<Rank> = seat.carried_by(seat.seat, arrival.of).collect();
        steps.extend(arrival.pass_on(&seat, &carried));
        steps.extend(share_out(&seat, &mut waits, round, arrival.of, &carried));
    }
    steps
}

/// With `H` hosts: `H` rounds, or fewer where a host has one rank; `H / 2` are between hosts. A rank sends its own block in
/// both directions, and the blocks that it carries in one, but those that end at its host. It reads from neighbours all blocks but its own
/// and those that it carries.
pub(super) fn all_gather_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let hosts = topology.ranks_by_host();
    let read = read_from_neighbours(topology);
    Cost { rounds: rounds(topology), shared_elements: read * n, ..messages(hosts, n) }
}

/// Where blocks lie in the slots of an [`all_gather`].
pub(super) fn all_gather_shelves(topology: &Topology, rank: Rank) -> Shelves {
    let seat = Seat::of(topology, rank);
    let ring = Ring::of(&seat);
    alternating_shelves(&seat, |owner| ring.round_of(topology.host_of(owner)))
}

/// The same in registered data: a rank writes its own block and those that it carries to the data of its neighbours.
///
/// See [`all_gather_push_cost`].
pub(super) fn all_gather_push(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let seat = Seat::of(topology, rank);
    let ring = Ring::of(&seat);
    let mut steps = ring.sends_of_input(&seat);
    steps.extend(hand_out_own(&seat));
    for arrival in ring.arrivals() {
        let carried: Vec<Rank> = seat.carried_by(seat.seat, arrival.of).collect();
        steps.extend(arrival.pass_on(&seat, &carried));
        let blocks = carried.iter().map(|owner| Loc::data(seat.block(*owner)));
        steps.extend(blocks.flat_map(|block| hand_out(&seat, block, block)));
    }
    steps.extend(seat.post_and_wait(2));
    steps
}

/// `H / 2 + 1` rounds, and messages as in [`all_gather_cost`]. A rank writes its block and those that it carries to each
/// of its neighbours.
pub(super) fn all_gather_push_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let hosts = topology.ranks_by_host();
    // The first rank of a host carries the most, and its own block is one of those of its host.
    let written = Carried::of(hosts).most(|host, carried| (hosts[host].len() - 1) * carried.first);
    Cost { rounds: hosts.len() / 2 + 1, shared_elements: written * n, ..messages(hosts, n) }
}

/// The messages that a block takes to the farthest host.
pub(super) fn hops(topology: &Topology) -> usize {
    topology.ranks_by_host().len() / 2
}

/// The messages of the busiest rank: the first of a host.
fn messages(hosts: &[Vec<Rank>], n: usize) -> Cost {
    let sent = Carried::of(hosts).most(|host, carried| {
        let ring = Ring { hosts: hosts.len(), host };
        let ends_here = ring.ends().map(|of| hosts[of].len().div_ceil(hosts[host].len()));
        // Of its own host it carries itself.
        carried.first - 1 + ring.directions() - ends_here.sum::<usize>()
    });
    Cost { messages: sent, elements: sent * n, ..Cost::default() }
}

/// If all hosts have several ranks, two of each get something in every round, and wait for each other. Otherwise there
/// may be fewer rounds, which are not counted among many hosts, because that would take long.
fn rounds(topology: &Topology) -> usize {
    let hosts = topology.ranks_by_host();
    let alike = hosts.iter().all(|ranks| ranks.len() > 1);
    match alike || hosts.len() > DIRECT_MAX_RANKS {
        true => hosts.len(),
        false => Rounds::of(topology).count(),
    }
}

/// Counts the messages and posts that each rank has seen in a chain, round by round.
struct Rounds<'a> {
    topology: &'a Topology,
    /// The longest chain that each rank has seen, and the one that ends with its last post.
    seen: Vec<usize>,
    posted: Vec<usize>,
    /// The chain that ends with the message that has the block of a rank, in each direction.
    under_way: [Vec<usize>; 2],
}

impl Rounds<'_> {
    fn of(topology: &Topology) -> Rounds<'_> {
        let (none, first) = (vec![0; topology.world_size], vec![1; topology.world_size]);
        Rounds { topology, seen: none.clone(), posted: none, under_way: [first.clone(), first] }
    }

    fn count(mut self) -> usize {
        let hosts = self.topology.ranks_by_host().len();
        let arrivals: Vec<Vec<usize>> = (0..hosts)
            .map(|host| Ring { hosts, host }.arrivals().map(|arrival| arrival.of).collect())
            .collect();
        for round in 0..hosts - 1 {
            for (host, of) in arrivals.iter().enumerate() {
                self.receive(host, of[round], round);
            }
        }
        self.seen.into_iter().max().unwrap_or(0)
    }

    /// A host shares out what has come from another, in a round that is counted from 0.
    fn receive(&mut self, host: usize, of: usize, round: usize) {
        let hosts = self.topology.ranks_by_host();
        let (ranks, owners) = (&hosts[host], &hosts[of]);
        let carrier = |at: usize| ranks[at % ranks.len()];
        let under_way = &mut self.under_way[round % 2];
        for (at, owner) in owners.iter().enumerate() {
            self.seen[carrier(at)] = self.seen[carrier(at)].max(under_way[*owner]);
        }
        for (at, owner) in owners.iter().enumerate() {
            under_way[*owner] = self.seen[carrier(at)] + 1;
        }
        if ranks.len() == 1 {
            return;
        }
        let carriers = &ranks[..owners.len().min(ranks.len())];
        if round > 1 {
            carriers.iter().for_each(|rank| self.wait(*rank, ranks));
        }
        ranks.iter().for_each(|rank| self.posted[*rank] = self.seen[*rank] + 1);
        // In the first round all ranks have something: their own blocks.
        let givers = if round == 0 { &ranks[..] } else { carriers };
        ranks.iter().for_each(|rank| self.wait(*rank, givers));
    }

    /// A rank sees the last posts of others.
    fn wait(&mut self, rank: Rank, others: &[Rank]) {
        let posts = others.iter().filter(|other| **other != rank).map(|other| self.posted[*other]);
        self.seen[rank] = posts.fold(self.seen[rank], usize::max);
    }
}

/// The blocks that a rank reads from neighbours. The last rank of a host carries the fewest, and reads the most.
fn read_from_neighbours(topology: &Topology) -> usize {
    let hosts = topology.ranks_by_host();
    Carried::of(hosts).most(|host, carried| match hosts[host].len() {
        1 => 0,
        _ => topology.world_size - carried.last,
    })
}

/// Of all hosts, its own included: the blocks that the first rank of a host carries, and the last.
#[derive(Clone, Copy)]
struct Carried {
    first: usize,
    last: usize,
}

impl Carried {
    /// By host. It counts once for each size of hosts, so it is fast where hosts are alike.
    fn of(hosts: &[Vec<Rank>]) -> Every {
        let mut sizes: Vec<usize> = hosts.iter().map(Vec::len).collect();
        sizes.sort_unstable();
        let runs: Vec<(usize, usize)> =
            sizes.chunk_by(|a, b| a == b).map(|run| (run[0], run.len())).collect();
        let sum = |of: &dyn Fn(usize) -> usize| {
            runs.iter().map(|(size, count)| of(*size) * count).sum::<usize>()
        };
        let of_size = |own: usize| Carried {
            first: sum(&|size| size.div_ceil(own)),
            last: sum(&|size| size / own),
        };
        let by_size: Vec<(usize, Carried)> =
            runs.iter().map(|(size, _)| (*size, of_size(*size))).collect();
        Every { sizes: hosts.iter().map(Vec::len).collect(), by_size }
    }
}

struct Every {
    sizes: Vec<usize>,
    by_size: Vec<(usize, Carried)>,
}

impl Every {
    /// The maximum of a figure over all hosts.
    fn most(&self, of: impl Fn(usize, Carried) -> usize) -> usize {
        let carried = |size: usize| {
            let at = self.by_size.partition_point(|known| known.0 < size);
            self.by_size[at].1
        };
        let hosts = self.sizes.iter().enumerate();
        hosts.map(|(host, size)| of(host, carried(*size))).max().unwrap_or(0)
    }
}

/// A host's place in the ring.
struct Ring {
    hosts: usize,
    host: usize,
}

/// The blocks of one host come to another.
struct Arrival {
    /// Whose blocks.
    of: usize,
    /// The host that passes them on.
    from: usize,
    /// The host to which this host passes them on, if they have not come to every host.
    to: Option<usize>,
}

impl Ring {
    fn of(seat: &Seat<'_>) -> Ring {
        Ring { hosts: seat.hosts.len(), host: seat.host }
    }

    /// How far blocks go to the right, to the hosts after their own.
    fn to_right(&self) -> usize {
        self.hosts / 2
    }

    fn to_left(&self) -> usize {
        (self.hosts - 1) / 2
    }

    /// To how many hosts a rank sends its own block.
    fn directions(&self) -> usize {
        1 + self.to_left().min(1)
    }

    fn right(&self, distance: usize) -> usize {
        (self.host + distance) % self.hosts
    }

    fn left(&self, distance: usize) -> usize {
        (self.host + self.hosts - distance) % self.hosts
    }

    /// The other hosts, in the order in which their blocks come.
    fn arrivals(&self) -> impl Iterator<Item = Arrival> {
        let (to_right, to_left) = (self.to_right(), self.to_left());
        (1..=to_right).flat_map(move |distance| {
            let from_left = Arrival {
                of: self.left(distance),
                from: self.left(1),
                to: (distance < to_right).then(|| self.right(1)),
            };
            let from_right = (distance <= to_left).then(|| Arrival {
                of: self.right(distance),
                from: self.right(1),
                to: (distance < to_left).then(|| self.left(1)),
            });
            [from_left].into_iter().chain(from_right)
        })
    }

    /// The place of a host in [`Ring::arrivals`], from 1. 0: it is this host.
    fn round_of(&self, host: usize) -> usize {
        let distance = (self.host + self.hosts - host) % self.hosts;
        match distance {
            0 => 0,
            _ if distance <= self.to_right() => 2 * distance - 1,
            _ => 2 * (self.hosts - distance),
        }
    }

    /// The hosts whose blocks this host does not pass on.
    fn ends(&self) -> impl Iterator<Item = usize> {
        let of_left = (self.to_left() > 0).then(|| self.right(self.to_left()));
        [self.left(self.to_right())].into_iter().chain(of_left)
    }

    /// Sends the input to the carriers on the next hosts.
    fn sends_of_input(&self, seat: &Seat<'_>) -> Vec<Step> {
        let next = [self.right(1), self.left(1)].into_iter().take(self.directions());
        let to = |host| seat.carrier_on(host, seat.rank());
        next.map(|host| Step::Send { to: to(host), src: Loc::input(Span::WHOLE) }).collect()
    }
}

impl Arrival {
    /// Gets the blocks that the rank carries, and passes them on.
    fn pass_on(&self, seat: &Seat<'_>, carried: &[Rank]) -> Vec<Step> {
        let place = |owner: Rank| Loc::data(seat.block(owner));
        let get = carried.iter().map(|&owner| Step::Recv {
            from: seat.carrier_on(self.from, owner),
            dst: place(owner),
        });
        let give = self.to.into_iter().flat_map(|to| {
            let send = move |&owner: &Rank| Step::Send {
                to: seat.carrier_on(to, owner),
                src: place(owner),
            };
            carried.iter().map(send)
        });
        get.chain(give).collect()
    }
}
