//! Recursive doubling on the canonical tree.

use super::{Cost, doublings};
use crate::step::{Loc, Rank, Side, Span, Step};
use crate::topology::Topology;
use crate::tree::Node;

/// From the leaves of the tree to its root, every rank of a node gets the node's sum: the ranks
/// of its two children swap theirs. When the right child has fewer ranks, each of them serves
/// several ranks on the left, so every world size works without extra rounds.
///
/// ```text
///   rank       0      1      2      3      4
///              a      b      c      d      e
///   0-1 2-3    ab     ab     cd     cd     e
///   0-2 1-3    abcd   abcd   abcd   abcd   e
///   0-4, and   abcde  abcde  abcde  abcde  abcde
///   4 to 1..=3
/// ```
///
/// See [`all_reduce_cost`]. No chain of messages can be shorter, so this is for short data.
/// Scratch: the length of the data. A message cannot be combined into the data as it arrives,
/// because the data is still being sent.
pub(super) fn all_reduce(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let mut steps = vec![];
    climb(Node::root(topology.world_size), rank, true, &mut steps);
    steps
}

/// Leaves the sum of `node` in the data of `rank`, which is one of its ranks.
fn climb(node: Node, rank: Rank, finish: bool, steps: &mut Vec<Step>) {
    let Some(Meeting { own, other, seat, side }) = Meeting::at(node, rank) else { return };
    climb(own, rank, false, steps);

    let data = Loc::data(Span::WHOLE);
    let incoming = Loc::scratch(0, Span::WHOLE);
    let served = (other.lo + seat..other.lo + other.len).step_by(own.len);
    steps.extend(served.map(|to| Step::Send { to, src: data }));
    steps.push(Step::Recv { from: other.lo + seat % other.len, dst: incoming });
    steps.push(Step::Reduce { dst: data, src: incoming, side, finish });
}

/// `ceil(log2 p)` rounds. At each node above it, the rank on seat `s` of a child of `own` ranks
/// serves the seats `s, s + own, s + 2 own, ..` of the other child. For powers of two that is
/// one message a round, `log2 p` in all; the worst world sizes are a little above (at `2^k + 1`
/// the last rank sends `2^k`). Each message has `n` elements.
pub(super) fn all_reduce_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let p = topology.world_size;
    let messages_of = |rank: Rank| {
        let mut messages = 0;
        let mut node = Node::root(p);
        while let Some(Meeting { own, other, seat, .. }) = Meeting::at(node, rank) {
            messages += other.len.saturating_sub(seat).div_ceil(own.len);
            node = own;
        }
        messages
    };
    let messages = (0..p).map(messages_of).max().unwrap_or(0);
    Cost { rounds: doublings(p), messages, elements: messages * n, ..Cost::default() }
}

/// How a rank meets the other half of a node.
struct Meeting {
    /// The child that the rank belongs to.
    own: Node,
    other: Node,
    /// Which of the ranks of `own` it is.
    seat: usize,
    /// Where the sum of `other` stands.
    side: Side,
}

impl Meeting {
    fn at(node: Node, rank: Rank) -> Option<Meeting> {
        let (left, right) = node.children()?;
        Some(match rank < right.lo {
            true => Meeting { own: left, other: right, seat: rank - left.lo, side: Side::Right },
            false => Meeting { own: right, other: left, seat: rank - right.lo, side: Side::Left },
        })
    }
}
