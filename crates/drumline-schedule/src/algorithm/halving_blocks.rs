//! Sums of a block for every rank, along a [cube](super::cube) of hosts: each host talks to few others, however many
//! there are.

use std::collections::BTreeMap;

use super::carriers::{Seat, Waits};
use super::cost::Cost;
use super::cube::{Cube, EARLY, Next, Part, Turn};
use super::cube_census::{self, Posts};
use super::hierarchical::largest;
use super::hierarchical_blocks::{Sums, lay_out};
use super::ring;
use crate::schedule::Shelves;
use crate::step::{Buffer, Loc, Rank, Span, Step};
use crate::topology::Topology;

/// Several hosts that may add their own ranks first, one of them with several ranks.
pub(super) fn serves(topology: &Topology) -> bool {
    ring::serves(topology) && topology.sums_by_placement()
}

/// Halving in a stream. A host sums the blocks of one host after another. What it has for host `d` it sends to the
/// corner that differs from its own in the lowest bit in which its own differs from `d`; before, it adds what corners
/// that differ in lower bits have sent it for `d`. So sums for `d` meet along the tree, and end at `d`.
///
/// ```text
///   for the ranks of host    host 0      host 1      host 2      host 3
///   own ^ 3                  3 -> 1      2 -> 0      1 -> 3      0 -> 2
///   own ^ 2                  2+ -> 2     3+ -> 3     0+ -> 0     1+ -> 1     + adds what has come
///   own ^ 1                  1 -> 1      0 -> 0      3 -> 3      2 -> 2
///   own                      0++         1++         2++         3++
/// ```
///
/// See [`reduce_scatter_cost`]. In each round a rank sends one message and gets one, and no message waits for more than
/// one round. Scratch holds a block for each level of the tree, and those that are being sent.
pub(super) fn reduce_scatter(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let seat = Seat::of(topology, rank);
    let mut waits = Waits::of(&seat);
    let mut stream = Stream::new(&seat, Loc::slot);
    let mut round = 0;
    let mut steps = vec![];
    for turn in Cube::of(topology).turns(seat.host) {
        if turn.sums_own() {
            round += 1;
            steps.extend(lay_out(&seat, &mut waits, round, turn.destination));
        }
        steps.extend(stream.turn(&turn));
    }
    steps
}

/// For one block of `n` elements each, what the busiest rank does. Where all hosts have several ranks and their number
/// is a power of two: `H` rounds of posts, beside which messages are under way.
pub(super) fn reduce_scatter_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    cube_census::cost(topology, Posts::EachRound, n)
}

/// Where blocks lie in the slots of a [`reduce_scatter`]: those of a host side by side, and two hosts in turn.
pub(super) fn reduce_scatter_shelves(topology: &Topology, rank: Rank) -> Shelves {
    let seat = Seat::of(topology, rank);
    let of_a_host = largest(seat.hosts);
    let own_sums = Cube::of(topology).turns(seat.host).filter(Turn::sums_own);
    let mut shelf_of_host = vec![0; seat.hosts.len()];
    for (round, turn) in own_sums.enumerate() {
        shelf_of_host[turn.destination] = round % 2 * of_a_host;
    }
    let shelf = |owner: Rank| shelf_of_host[topology.host_of(owner)] + seat.seat_of(owner);
    Shelves::shared((0..topology.world_size).map(shelf), 2 * of_a_host)
}

/// The same where neighbours read each other's inputs, which are registered.
///
/// See [`reduce_scatter_pull_cost`].
pub(super) fn reduce_scatter_pull(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let seat = Seat::of(topology, rank);
    let mut stream = Stream::new(&seat, Loc::input);
    let mut steps: Vec<Step> = seat.post_and_wait(1).collect();
    for turn in Cube::of(topology).turns(seat.host) {
        steps.extend(stream.turn(&turn));
    }
    steps.extend(seat.post_and_wait(2));
    steps
}

/// Like [`reduce_scatter_cost`], but with two rounds of posts.
pub(super) fn reduce_scatter_pull_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    cube_census::cost(topology, Posts::AtBothEnds, n)
}

/// The sums of one rank.
struct Stream<'a> {
    seat: &'a Seat<'a>,
    sums: Sums<'a>,
    cube: Cube,
    /// Where a sum lies that is kept for a corner and a block.
    kept: BTreeMap<(usize, Rank), Loc>,
}

impl<'a> Stream<'a> {
    /// `from` says where the contributions of neighbours lie.
    fn new(seat: &'a Seat<'a>, from: fn(Span) -> Loc) -> Stream<'a> {
        let (sums, cube) = (Sums { seat, from }, Cube::of(seat.topology));
        Stream { seat, sums, cube, kept: BTreeMap::new() }
    }

    fn turn(&mut self, turn: &Turn) -> Vec<Step> {
        let early = turn.early().into_iter().flat_map(|part| {
            let owners = self.carried(part.destination).into_iter().enumerate();
            owners.map(move |(at, owner)| (part, at, owner))
        });
        let receive = |(part, at, owner): (Part, usize, Rank)| Step::Recv {
            from: self.seat.carrier_on(part.from, owner),
            dst: self.arrived(turn.role, part, at, owner),
        };
        let mut early: Vec<Step> = early.map(receive).collect();
        let mut steps = vec![];
        if turn.sums() {
            for (at, owner) in self.carried(turn.destination).into_iter().enumerate() {
                steps.extend(self.sum(turn, at, owner, &mut early));
            }
        }
        early.into_iter().chain(steps).collect()
    }

    /// The ranks of a host whose blocks this rank sums: of its own host only itself.
    fn carried(&self, host: usize) -> Vec<Rank> {
        match host == self.seat.host {
            true => vec![self.seat.rank()],
            false => self.seat.carried_by(self.seat.seat, host).collect(),
        }
    }

    /// Sums a block as far as this turn does, and passes the sum on.
    fn sum(&mut self, turn: &Turn, at: usize, owner: Rank, early: &mut Vec<Step>) -> Vec<Step> {
        let block = self.seat.block(owner);
        let mut parts = turn.parts().peekable();
        let mut steps = vec![];
        let sum = match turn.next() {
            Next::Result => Loc::data(Span::WHOLE),
            _ => self.sending(turn, at, owner),
        };
        let sum = match turn.sums_own() {
            true if parts.peek().is_none()
                && !self.seat.has_peers()
                && matches!(turn.next(), Next::Host(_)) =>
            {
                Loc::input(block)
            }
            true => {
                // A message may come while the host adds.
                steps.push(self.sums.over_host(block, sum));
                steps.append(early);
                sum
            }
            false => match parts.next() {
                None => return steps,
                Some(part) => self.first(turn, part, at, owner, sum, &mut steps),
            },
        };
        for part in parts {
            let finish = turn.difference == 0 && part.level + 1 == self.cube.dimensions;
            steps.extend(self.add(turn, part, at, owner, sum, finish));
        }
        match turn.next() {
            Next::Result => {}
            Next::Corner(corner) => {
                self.kept.insert((corner, owner), sum);
            }
            Next::Host(host) => {
                steps.push(Step::Send { to: self.seat.carrier_on(host, owner), src: sum });
            }
        }
        steps
    }

    /// Where the first part of a sum lies, to which others are added.
    fn first(
        &mut self,
        turn: &Turn,
        part: Part,
        at: usize,
        owner: Rank,
        sum: Loc,
        steps: &mut Vec<Step>,
    ) -> Loc {
        if part.from == turn.host {
            return self.take_kept(turn.corner, owner);
        }
        if !self.cube.is_prompt(part.difference) {
            return self.arrived(turn.role, part, at, owner);
        }
        steps.push(Step::Recv { from: self.seat.carrier_on(part.from, owner), dst: sum });
        sum
    }

    /// Adds a part to a sum.
    fn add(
        &mut self,
        turn: &Turn,
        part: Part,
        at: usize,
        owner: Rank,
        dst: Loc,
        finish: bool,
    ) -> Vec<Step> {
        let side = part.side;
        let from = self.seat.carrier_on(part.from, owner);
        let src = match part.from == turn.host {
            true => self.take_kept(turn.corner, owner),
            false => self.arrived(turn.role, part, at, owner),
        };
        let reduce = Step::Reduce { dst, src, side, finish };
        match self.cube.is_prompt(part.difference) && part.from != turn.host {
            false => vec![reduce],
            // An executor takes such a message to scratch, and only the place of scratch says whose block it is.
            true if dst.buffer == Buffer::Data => vec![Step::Recv { from, dst: src }, reduce],
            true => vec![Step::RecvReduce { from, dst, side, finish }],
        }
    }

    fn take_kept(&mut self, corner: usize, owner: Rank) -> Loc {
        let Some(kept) = self.kept.remove(&(corner, owner)) else {
            unreachable!("a corner keeps a sum before another one needs it");
        };
        kept
    }

    /// Where the sum of a turn lies while it is kept and sent. The places are used in turn, so that the rank goes on
    /// meanwhile. One that is kept is sent later.
    fn sending(&self, turn: &Turn, at: usize, owner: Rank) -> Loc {
        let place = match turn.next() {
            Next::Corner(_) => 2 * SENDING + turn.at % KEEPING,
            _ => turn.role * SENDING + turn.at % SENDING,
        };
        self.scratch(at, place, owner)
    }

    /// Where a sum lies that has come early.
    fn arrived(&self, role: usize, part: Part, at: usize, owner: Rank) -> Loc {
        // If the halves of the cube take turns, each has its own places.
        let upper = !self.cube.is_full() && part.difference >= self.cube.corners() / 2;
        let half = usize::from(upper);
        let place = (2 * role + half) * self.cube.dimensions + part.level;
        self.scratch(at, SENT + place, owner)
    }

    /// `at` counts the blocks of a host that this rank carries.
    fn scratch(&self, at: usize, place: usize, owner: Rank) -> Loc {
        let places = SENT + 4 * self.cube.dimensions;
        Loc::scratch(at * places + place, self.seat.block(owner))
    }
}

/// For how many turns a sum is being sent: until its receiver takes it, early.
const SENDING: usize = EARLY + 1;

/// The same for one that is kept before. Half of the turns keep a sum.
const KEEPING: usize = 8;

/// Places for all of these, for both corners of a host.
const SENT: usize = 2 * SENDING + KEEPING;
