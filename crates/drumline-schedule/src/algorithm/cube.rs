//! The hypercube of hosts, along which sums of a block for every rank meet.
//!
//! The tree of sums over hosts is a cube whose corners are hosts: at level `i` the sums of two nodes of `2^i` corners
//! meet. Where the number of hosts is no power of two, the corners above the last host are empty, and another host
//! acts for each of them.

use super::cost::doublings;
use crate::step::Side;
use crate::topology::Topology;

/// The hypercube. Its corners are numbers; those below `hosts` are hosts.
#[derive(Clone, Copy)]
pub(super) struct Cube {
    pub(super) hosts: usize,
    pub(super) dimensions: usize,
}

/// What a host does at one time as one corner.
#[derive(Clone, Copy)]
pub(super) struct Turn {
    pub(super) cube: Cube,
    /// The host that does it.
    pub(super) host: usize,
    /// 0: as its own corner. 1: as an empty corner for which it stands in.
    pub(super) role: usize,
    pub(super) corner: usize,
    /// The place in the order of [`Cube::difference_at`].
    pub(super) at: usize,
    /// In which bits the corner differs from the host whose blocks are summed.
    pub(super) difference: usize,
    /// That host, if there is one of this number.
    pub(super) destination: usize,
}

/// A sum that a corner gets from another one.
#[derive(Clone, Copy)]
pub(super) struct Part {
    /// Of its sender, as [`Turn::difference`].
    pub(super) difference: usize,
    /// The host whose blocks are summed.
    pub(super) destination: usize,
    pub(super) level: usize,
    pub(super) side: Side,
    /// The host that has it.
    pub(super) from: usize,
}

/// What becomes of a sum.
pub(super) enum Next {
    /// It is the result.
    Result,
    /// The host keeps it for another corner, which it stands in for.
    Corner(usize),
    Host(usize),
}

impl Cube {
    pub(super) fn of(topology: &Topology) -> Cube {
        let hosts = topology.ranks_by_host().len();
        Cube { hosts, dimensions: doublings(hosts) }
    }

    pub(super) fn corners(self) -> usize {
        1 << self.dimensions
    }

    pub(super) fn is_full(self) -> bool {
        self.hosts == self.corners()
    }

    /// The host that acts for a corner: itself, its neighbour of the lowest level, or its neighbour of the highest one.
    pub(super) fn actor(self, corner: usize) -> usize {
        match corner {
            _ if corner < self.hosts => corner,
            _ if corner ^ 1 < self.hosts => corner ^ 1,
            _ => corner - self.corners() / 2,
        }
    }

    /// The corners for which a host acts, its own first.
    pub(super) fn corners_of(self, host: usize) -> impl Iterator<Item = usize> {
        let others = [host ^ 1, host + self.corners() / 2].into_iter();
        let is_empty = move |corner: &usize| (self.hosts..self.corners()).contains(corner);
        let others = others.filter(is_empty).filter(move |corner| self.actor(*corner) == host);
        [host].into_iter().chain(others)
    }

    /// Whether the node of `2^level` corners around a given corner has a host.
    pub(super) fn has_host(self, corner: usize, level: usize) -> bool {
        corner >> level << level < self.hosts
    }

    /// The order in which sums are made. What a corner sends at difference `d` its receiver needs at `d` without the
    /// lowest bit, and that comes later. If some corners are empty, both halves of the cube take turns, since one of
    /// them has less to do.
    pub(super) fn difference_at(self, at: usize) -> usize {
        let left = self.corners() - 1 - at;
        match self.is_full() {
            true => left,
            false => left / 2 + left % 2 * self.corners() / 2,
        }
    }

    /// How much later the receiver needs what is sent at this difference.
    pub(super) fn delay(self, difference: usize) -> usize {
        let level = difference.trailing_zeros() as usize;
        match self.is_full() {
            true => 1 << level,
            // The two halves take turns.
            false if level + 1 == self.dimensions => 1,
            false => 2 << level,
        }
    }

    /// Whether the receiver takes it only when it needs it: before it would come early.
    pub(super) fn is_prompt(self, difference: usize) -> bool {
        self.delay(difference) <= EARLY
    }

    /// All that a host does, in order.
    pub(super) fn turns(self, host: usize) -> impl Iterator<Item = Turn> {
        (0..self.corners()).flat_map(move |at| self.turns_at(at, host))
    }

    /// What a host does at one time: a turn for each of its corners.
    pub(super) fn turns_at(self, at: usize, host: usize) -> impl Iterator<Item = Turn> {
        let difference = self.difference_at(at);
        self.corners_of(host).enumerate().map(move |(role, corner)| Turn {
            cube: self,
            host,
            role,
            corner,
            at,
            difference,
            destination: corner ^ difference,
        })
    }

    /// What a corner gets from its neighbour at the lowest bit of the sender's difference. `None`: nothing.
    pub(super) fn part(self, corner: usize, difference: usize) -> Option<Part> {
        let level = difference.trailing_zeros() as usize;
        let sender = corner ^ 1 << level;
        let destination = sender ^ difference;
        let side = if sender < corner { Side::Left } else { Side::Right };
        let part = Part { difference, destination, level, side, from: self.actor(sender) };
        (destination < self.hosts && self.has_host(sender, level)).then_some(part)
    }
}

/// A message is taken this number of turns after it was sent, or when it is needed.
pub(super) const EARLY: usize = 2;

impl Turn {
    pub(super) fn has_destination(&self) -> bool {
        self.destination < self.cube.hosts
    }

    /// Whether the host adds what its own ranks have.
    pub(super) fn sums_own(&self) -> bool {
        self.role == 0 && self.has_destination()
    }

    /// What comes early at this time, to be added later.
    pub(super) fn early(&self) -> Option<Part> {
        let difference = self.cube.difference_at(self.at.checked_sub(EARLY)?);
        match self.cube.is_prompt(difference) {
            true => None,
            false => self.cube.part(self.corner, difference),
        }
    }

    /// The sums of other corners that are added at this time, from the lowest level up.
    pub(super) fn parts(&self) -> impl Iterator<Item = Part> {
        let Turn { cube, corner, difference, .. } = *self;
        let levels = match difference {
            0 => cube.dimensions,
            _ => difference.trailing_zeros() as usize,
        };
        let levels = 0..if self.has_destination() { levels } else { 0 };
        levels.filter_map(move |level| cube.part(corner, difference | 1 << level))
    }

    /// Whether there is anything to sum.
    pub(super) fn sums(&self) -> bool {
        self.sums_own() || self.parts().next().is_some()
    }

    /// The corner that needs the sum, if it is no result.
    pub(super) fn receiver(&self) -> usize {
        self.corner ^ 1 << self.difference.trailing_zeros()
    }

    pub(super) fn next(&self) -> Next {
        if self.difference == 0 {
            return Next::Result;
        }
        let corner = self.receiver();
        match self.cube.actor(corner) {
            host if host == self.host => Next::Corner(corner),
            host => Next::Host(host),
        }
    }
}
