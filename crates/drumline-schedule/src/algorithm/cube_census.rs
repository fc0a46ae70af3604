//! What sums along a cube of hosts cost.

use std::collections::BTreeMap;

use super::cost::Cost;
use super::cube::{Cube, Next, Part, Turn};
use super::direct::DIRECT_MAX_RANKS;
use crate::topology::Topology;

/// When the ranks of a host post.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Posts {
    /// When they have laid out their blocks for a host.
    EachRound,
    /// Before and after everything else.
    AtBothEnds,
}

/// The cost of the busiest rank with blocks of `n` elements. Among more than 256 hosts it may have fewer rounds, where
/// hosts differ or their number is no power of two: they are not counted, because that would take long.
pub(super) fn cost(topology: &Topology, posts: Posts, n: usize) -> Cost {
    let cube = Cube::of(topology);
    let rounds = match (posts, cube.hosts) {
        (_, ..=DIRECT_MAX_RANKS) => Chains::of(topology, posts).longest(),
        (Posts::AtBothEnds, _) => hops(topology) + 2,
        (Posts::EachRound, hosts) if cube.is_full() => hosts,
        (Posts::EachRound, _) => cube.corners() - 1,
    };
    let sizes: Vec<usize> = topology.ranks_by_host().iter().map(Vec::len).collect();
    let mut weights: BTreeMap<usize, Weights> = BTreeMap::new();
    let loads = sizes.iter().enumerate().map(|(host, size)| {
        let weights = weights.entry(*size).or_insert_with(|| Weights::new(cube, &sizes, *size));
        (weights.load(host), size - 1)
    });
    loads.fold(Cost { rounds, ..Cost::default() }, |cost, (load, peers)| Cost {
        messages: cost.messages.max(load.messages),
        elements: cost.elements.max(load.messages * n),
        combined: cost.combined.max((load.own_sums * peers + load.parts) * n),
        shared_elements: cost.shared_elements.max(load.own_sums * peers * n),
        ..cost
    })
}

/// The longest chain of messages, or one more.
pub(super) fn hops(topology: &Topology) -> usize {
    Cube::of(topology).corners() / 2
}

/// The blocks of hosts that the first rank of a host of some size carries. It carries the most.
struct Weights {
    cube: Cube,
    /// By level: the blocks of all hosts whose lowest `level` bits are the index.
    of_nodes: Vec<Vec<usize>>,
}

/// What the first rank of a host does.
#[derive(Default)]
struct Load {
    messages: usize,
    /// Sums over its host.
    own_sums: usize,
    /// Sums of other corners that are added.
    parts: usize,
}

impl Weights {
    fn new(cube: Cube, sizes: &[usize], own: usize) -> Weights {
        let of_level = |level: usize| {
            let mut blocks = vec![0; 1 << level];
            for (host, size) in sizes.iter().enumerate() {
                blocks[host & ((1 << level) - 1)] += size.div_ceil(own);
            }
            blocks
        };
        Weights { cube, of_nodes: (0..=cube.dimensions).map(of_level).collect() }
    }

    /// The blocks for hosts that differ from a corner in no bit below `level`.
    fn of(&self, corner: usize, level: usize) -> usize {
        self.of_nodes[level][corner & ((1 << level) - 1)]
    }

    fn load(&self, host: usize) -> Load {
        let corners = self.cube.corners_of(host);
        corners.fold(Load { own_sums: self.of(host, 0), ..Load::default() }, |load, corner| {
            let sums = self.of(corner, self.lowest_with_host(corner));
            // Of an empty corner the first part is not added to anything.
            let not_added = if corner == host { 0 } else { sums };
            Load {
                messages: load.messages + sums - self.not_sent(host, corner),
                parts: load.parts + self.parts(corner) - not_added,
                ..load
            }
        })
    }

    /// The parts that a corner gets: of each level, for each host that differs from it in higher bits only.
    fn parts(&self, corner: usize) -> usize {
        let levels = 0..self.cube.dimensions;
        let levels = levels.filter(|level| self.cube.has_host(corner ^ 1 << level, *level));
        levels.map(|level| self.of(corner, level + 1)).sum()
    }

    /// A result, and sums that the host keeps for another of its corners.
    fn not_sent(&self, host: usize, corner: usize) -> usize {
        let Weights { cube, .. } = *self;
        let is_empty = |corner: usize| corner >= cube.hosts;
        match corner == host {
            true if is_empty(host ^ 1) => 1 + self.of(host ^ 1, 1),
            true => 1,
            false => usize::from(corner ^ 1 != host),
        }
    }

    /// The lowest level at which the node of a corner has a host.
    fn lowest_with_host(&self, corner: usize) -> usize {
        let mut levels = 0..self.cube.dimensions;
        levels.find(|level| self.cube.has_host(corner, *level)).unwrap_or(self.cube.dimensions)
    }
}

/// The longest chain of messages and posts that each rank has seen, turn by turn.
struct Chains {
    cube: Cube,
    posts: Posts,
    /// The ranks of each host that are counted.
    ranks: Vec<Vec<Chain>>,
    /// Whether one host stands for all.
    alike: bool,
    /// The number of own sums of each host.
    rounds: Vec<usize>,
    /// The chain that ends with a message. See [`Chains::message`].
    under_way: Vec<usize>,
}

#[derive(Clone, Copy, Default)]
struct Chain {
    seen: usize,
    /// The chain that ends with its last post.
    posted: usize,
}

impl Chains {
    fn of(topology: &Topology, posts: Posts) -> Chains {
        let mut chains = Chains::new(topology, posts);
        if posts == Posts::AtBothEnds {
            chains.post_and_wait();
        }
        let hosts = if chains.alike { 1 } else { chains.cube.hosts };
        for at in 0..chains.cube.corners() {
            for host in 0..hosts {
                chains.cube.turns_at(at, host).for_each(|turn| chains.turn(&turn));
            }
        }
        if posts == Posts::AtBothEnds {
            chains.post_and_wait();
        }
        chains
    }

    fn new(topology: &Topology, posts: Posts) -> Chains {
        let cube = Cube::of(topology);
        let sizes: Vec<usize> = topology.ranks_by_host().iter().map(Vec::len).collect();
        let equal = sizes.iter().all(|size| *size == sizes[0]);
        let alike = equal && cube.is_full();
        // The ranks of equal hosts do the same, and two of them wait for each other.
        let counted = |size: &usize| if equal { *size.min(&2) } else { *size };
        let ranks: Vec<Vec<Chain>> =
            sizes.iter().map(|size| vec![Chain::default(); counted(size)]).collect();
        let owners = sizes.iter().map(counted).max().unwrap_or(1);
        let corners = if alike { 1 } else { cube.corners() };
        let under_way = vec![0; corners * 2 * cube.dimensions * owners];
        Chains { cube, posts, rounds: vec![0; sizes.len()], ranks, alike, under_way }
    }

    fn longest(&self) -> usize {
        self.ranks.iter().flatten().map(|chain| chain.seen).max().unwrap_or(0)
    }

    fn turn(&mut self, turn: &Turn) {
        if turn.sums_own() && self.posts == Posts::EachRound {
            self.lay_out(turn);
        }
        if let Some(part) = turn.early() {
            (0..self.ranks[part.destination].len()).for_each(|owner| self.take(turn, part, owner));
        }
        if turn.sums() {
            (0..self.ranks[turn.destination].len()).for_each(|owner| self.sum(turn, owner));
        }
    }

    fn lay_out(&mut self, turn: &Turn) {
        let Turn { host, destination, .. } = *turn;
        self.rounds[host] += 1;
        let (seats, owners) = (self.ranks[host].len(), self.ranks[destination].len());
        if seats == 1 {
            return;
        }
        let carried = |seat: usize| owners.saturating_sub(seat).div_ceil(seats);
        if self.rounds[host] > 2 {
            let lay_out = (0..seats).filter(|seat| carried(*seat) < owners);
            lay_out.for_each(|seat| self.wait(host, seat));
        }
        self.post(host);
        (0..seats).filter(|seat| carried(*seat) > 0).for_each(|seat| self.wait(host, seat));
    }

    fn post(&mut self, host: usize) {
        self.ranks[host].iter_mut().for_each(|rank| rank.posted = rank.seen + 1);
    }

    /// A rank sees the last posts of its neighbours.
    fn wait(&mut self, host: usize, seat: usize) {
        let others = self.ranks[host].iter().enumerate().filter(|(other, _)| *other != seat);
        let last = others.map(|(_, rank)| rank.posted).max().unwrap_or(0);
        self.see(host, seat, last);
    }

    fn see(&mut self, host: usize, seat: usize, chain: usize) {
        let rank = &mut self.ranks[host][seat];
        rank.seen = rank.seen.max(chain);
    }

    fn post_and_wait(&mut self) {
        for host in 0..self.ranks.len() {
            let seats = self.ranks[host].len();
            if seats > 1 {
                self.post(host);
                (0..seats).for_each(|seat| self.wait(host, seat));
            }
        }
    }

    fn sum(&mut self, turn: &Turn, owner: usize) {
        for part in turn.parts() {
            if part.from != turn.host && self.cube.is_prompt(part.difference) {
                self.take(turn, part, owner);
            }
        }
        if let Next::Host(_) = turn.next() {
            let ranks = &self.ranks[turn.host];
            let chain = ranks[owner % ranks.len()].seen + 1;
            let message = self.message(turn.receiver(), turn.difference, owner);
            self.under_way[message] = chain;
        }
    }

    /// A rank gets a message.
    fn take(&mut self, turn: &Turn, part: Part, owner: usize) {
        let chain = self.under_way[self.message(turn.corner, part.difference, owner)];
        self.see(turn.host, owner % self.ranks[turn.host].len(), chain);
    }

    /// The place of a message, by the corner that gets it, the difference of its sender, and the seat of the rank whose
    /// block it sums.
    fn message(&self, corner: usize, difference: usize, owner: usize) -> usize {
        let Cube { dimensions, .. } = self.cube;
        let (corner, corners) = if self.alike { (0, 1) } else { (corner, self.cube.corners()) };
        let half = usize::from(difference >= self.cube.corners() / 2);
        let place = (2 * corner + half) * dimensions + difference.trailing_zeros() as usize;
        place * (self.under_way.len() / (2 * corners * dimensions)) + owner
    }
}
