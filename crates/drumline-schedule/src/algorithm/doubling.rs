//! Recursive doubling on the canonical tree.

use super::cost::{Cost, doublings};
use crate::step::{Loc, Rank, Side, Span, Step};
use crate::topology::Topology;
use crate::tree::Node;

const DATA: Loc = Loc::data(Span::WHOLE);
/// Where the sum of a partner arrives. It is added to the data once the data has been sent: until then the
/// data must not change.
const INCOMING: Loc = Loc::scratch(0, Span::WHOLE);
/// Where the sum of a smaller right child waits until the left child has its sum.
const CARRY: Loc = Loc::scratch(1, Span::WHOLE);

/// A rank of the right child sends the child's sum to at most this number of ranks of the left child. If the
/// left child has more ranks for it, these forward the sum.
const SERVED: usize = 4;

/// From the leaves of the tree to its root, every rank of a node gets the sum of the node: the ranks of its
/// two children swap their sums.
///
/// ```text
///   rank       0      1      2      3      4
///              a      b      c      d      e
///   0-1 2-3    ab     ab     cd     cd     e      4 sends e to 0..=3
///   0-2 1-3    abcd   abcd   abcd   abcd   e
///   0-4        abcde  abcde  abcde  abcde  abcde
/// ```
///
/// A right child that is smaller than the left child has its sum early. Its ranks send the sum to ranks of
/// the left child. These forward it beside their own exchange, and their number doubles every round.
///
/// See [`all_reduce_cost`]. No chain of messages can be shorter, so this is for short data. Scratch is as
/// long as the data, or twice that where a child is smaller.
pub(super) fn all_reduce(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let mut steps = vec![];
    climb(Node::root(topology.world_size), rank, true, &mut steps);
    steps
}

/// Leaves the sum of `node` in the data of `rank`, which is one of its ranks.
fn climb(node: Node, rank: Rank, finish: bool, steps: &mut Vec<Step>) {
    let Some((left, right)) = node.children() else { return };
    if node.len.is_power_of_two() {
        swaps(node, rank, finish, steps);
    } else if rank < right.lo {
        climb_left(left, right, rank, finish, steps);
    } else {
        climb(right, rank, false, steps);
        let seat = rank - right.lo;
        let served = (seat..Fed::by(left, right).first).step_by(right.len);
        steps.extend(served.map(|to| Step::Send { to: left.lo + to, src: DATA }));
        steps.push(Step::Recv { from: left.lo + seat, dst: INCOMING });
        steps.push(Step::Reduce { dst: DATA, src: INCOMING, side: Side::Left, finish });
    }
}

/// In a node of `2^k` ranks every rank has a partner at every distance.
fn swaps(node: Node, rank: Rank, finish: bool, steps: &mut Vec<Step>) {
    for round in 0..doublings(node.len) {
        let finish = finish && round + 1 == doublings(node.len);
        let (peer, side) = partner(node, rank, round);
        steps.push(Step::Send { to: peer, src: DATA });
        steps.push(Step::Recv { from: peer, dst: INCOMING });
        steps.push(Step::Reduce { dst: DATA, src: INCOMING, side, finish });
    }
}

fn partner(node: Node, rank: Rank, round: usize) -> (Rank, Side) {
    let seat = rank - node.lo;
    let peer = seat ^ 1 << round;
    (node.lo + peer, if peer < seat { Side::Left } else { Side::Right })
}

/// A rank of the left child swaps within its own block, and meanwhile receives and forwards the sum of the
/// right child.
fn climb_left(left: Node, right: Node, rank: Rank, finish: bool, steps: &mut Vec<Step>) {
    let seat = rank - left.lo;
    let fed = Fed::by(left, right);
    for round in 0..=doublings(left.len) {
        let swap = (round < doublings(left.len)).then(|| partner(left, rank, round));
        if let Some((peer, _)) = swap {
            steps.push(Step::Send { to: peer, src: DATA });
        } else if seat < right.len {
            steps.push(Step::Send { to: right.lo + seat, src: DATA });
        }
        let informed = fed.before(round);
        if seat < informed && seat + informed < left.len {
            steps.push(Step::Send { to: rank + informed, src: CARRY });
        }
        if let Some((peer, _)) = swap {
            steps.push(Step::Recv { from: peer, dst: INCOMING });
        }
        if (informed..fed.before(round + 1)).contains(&seat) {
            let from = if informed == 0 { right.lo + seat % right.len } else { rank - informed };
            steps.push(Step::Recv { from, dst: CARRY });
        }
        if let Some((_, side)) = swap {
            steps.push(Step::Reduce { dst: DATA, src: INCOMING, side, finish: false });
        }
    }
    steps.push(Step::Reduce { dst: DATA, src: CARRY, side: Side::Right, finish });
}

/// How the sum of a right child spreads over the larger left one.
struct Fed {
    /// Rounds until the right child has its sum.
    ready: usize,
    /// Ranks of the left child that receive it from the right child: a power of two.
    first: usize,
    /// Ranks of the left child.
    all: usize,
}

impl Fed {
    fn by(left: Node, right: Node) -> Fed {
        let most = 1 << (SERVED * right.len).ilog2();
        Fed { ready: doublings(right.len), first: left.len.min(most), all: left.len }
    }

    /// The number of ranks of the left child, from its lowest on, that have it before this round.
    fn before(&self, round: usize) -> usize {
        match round.checked_sub(self.ready + 1) {
            None => 0,
            Some(doublings) => self.all.min(self.first << doublings),
        }
    }
}

/// `ceil(log2 p)` rounds, with one message a round for powers of two. Otherwise a rank of the smaller child
/// of a node sends to up to 4 ranks, and a rank of the larger child may forward the other child's sum beside
/// its own: of 5 ranks each sends up to 4 messages, of 33 ranks 9, and of 16,385 ranks 27. Each message has
/// `n` elements. A rank combines once a round.
///
/// The lowest rank of each block of `2^k` ranks sends the most: higher ranks of the block serve fewer.
pub(super) fn all_reduce_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let p = topology.world_size;
    let mut most = 0;
    // The ranks that the lowest rank of the node serves in the nodes above, and the places before it there.
    let mut node = Node::root(p);
    let mut above: Vec<(Node, Node)> = vec![];
    loop {
        let served = above.iter().map(|&(left, right)| {
            let seat = node.lo - right.lo;
            Fed::by(left, right).first.saturating_sub(seat).div_ceil(right.len)
        });
        let served: usize = served.sum();
        let Some((left, right)) = node.children().filter(|_| !node.len.is_power_of_two()) else {
            most = most.max(served + doublings(node.len));
            break;
        };
        let handed_on = doublings(left.len) - doublings(Fed::by(left, right).first);
        most = most.max(served + doublings(left.len) + 1 + handed_on);
        above.push((left, right));
        node = right;
    }
    let combined = doublings(p) * n;
    Cost { rounds: doublings(p), messages: most, elements: most * n, combined, ..Cost::default() }
}
