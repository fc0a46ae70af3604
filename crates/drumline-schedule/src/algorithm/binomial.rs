//! Binomial trees: every round doubles the number of ranks that have sent, or that have the data.

use std::ops::Range;

use super::cost::{Cost, doublings};
use crate::step::{Loc, Rank, Side, Span, Step};
use crate::topology::Topology;
use crate::tree::Node;

const DATA: Loc = Loc::data(Span::WHOLE);

/// Ranks sum towards rank 0, which then broadcasts the result.
///
/// See [`all_reduce_cost`]. It sends few messages in total, but rank 0 handles all data `log2 p` times.
pub(super) fn all_reduce(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let mut steps = climb(topology.world_size, rank, towards(0), DATA, DATA);
    steps.extend(broadcast(topology, rank, 0));
    steps
}

/// `2 floor(log2 p)` rounds. Rank 0 sends `ceil(log2 p)` messages of `n` elements, and combines
/// as many.
pub(super) fn all_reduce_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let p = topology.world_size;
    let elements = doublings(p) * n;
    Cost {
        rounds: 2 * longest_chain(p),
        messages: doublings(p),
        elements,
        combined: elements,
        ..Cost::default()
    }
}

/// Ranks sum towards rank 0, which forwards the result to the root. So ranks that name different roots hear it from each
/// other's messages; [`reduce_sums`] takes one message less. Ranks other than the root add in scratch.
///
/// See [`reduce_cost`].
pub(super) fn reduce(topology: &Topology, rank: Rank, root: Rank) -> Vec<Step> {
    let sum = if rank == root { DATA } else { Loc::scratch(0, Span::WHOLE) };
    let mut steps = climb(topology.world_size, rank, towards(0), DATA, sum);
    if root != 0 && rank == 0 {
        steps.push(Step::Send { to: root, src: sum });
    }
    if root != 0 && rank == root {
        steps.push(Step::Recv { from: 0, dst: DATA });
    }
    steps
}

/// `floor(log2 p)` rounds, and one more unless the root is 0. A rank sends at most one message
/// of `n` elements; rank 0 combines `ceil(log2 p)`.
pub(super) fn reduce_cost(topology: &Topology, root: Rank, n: usize) -> Cost {
    let p = topology.world_size;
    let messages = usize::from(p > 1);
    let rounds = longest_chain(p) + usize::from(root != 0);
    Cost { rounds, messages, elements: messages * n, combined: doublings(p) * n, ..Cost::default() }
}

/// Ranks sum towards the root. The data is theirs to overwrite.
pub(super) fn reduce_sums(p: usize, rank: Rank, root: Rank) -> Vec<Step> {
    climb(p, rank, towards(root), DATA, DATA)
}

/// The rounds of [`reduce_sums`].
pub(super) fn reduce_sums_rounds(p: usize, root: Rank) -> usize {
    let others = others_on_the_way(p, root);
    others.map(|other| longest_chain(other.len) + 1).max().unwrap_or(0)
}

/// How many sums a rank receives on the way to the root.
pub(super) fn received(p: usize, rank: Rank, root: Rank) -> usize {
    let is_receive = |step: &Step| matches!(step, Step::RecvReduce { .. });
    climb(p, rank, towards(root), DATA, DATA).iter().filter(|step| is_receive(step)).count()
}

/// Ranks sum towards the root, and no rank makes many sums. The data is theirs to overwrite.
///
/// The root sends what it has to the first node that it would be part of, and gets the result. Of two other ranks that
/// have the parts of a sum, a bit of `turn` says which one makes it: bit `k` where the left part is that of `2^k`
/// ranks. So with other turns other ranks do. If each of `2^k` turns has a share of the data, a sum over `2^k` ranks
/// costs each of these as much as one message of the whole data.
///
/// ```text
///   root 0, turn 0b00             root 0, turn 0b01
///   0   1   2   3                 0   1   2   3
///   '-->|   |<--'                 '-->|   '-->|
///       '-->|                         '------>|
///   <-------'                     <-----------'
/// ```
pub(super) fn reduce_in_turn(p: usize, rank: Rank, root: Rank, turn: usize) -> Vec<Step> {
    let holder = |node: Node| in_turn(p, root, turn, node);
    let last = holder(Node::root(p));
    let mut steps = climb(p, rank, holder, DATA, DATA);
    if last != root && rank == last {
        steps.push(Step::Send { to: root, src: DATA });
    }
    if last != root && rank == root {
        steps.push(Step::Recv { from: last, dst: DATA });
    }
    steps
}

/// The rounds of [`reduce_in_turn`], and how many sums each rank makes.
pub(super) fn reduce_in_turn_cost(p: usize, root: Rank, turn: usize) -> (usize, Vec<usize>) {
    /// The rounds until the holder of the node has it.
    fn visit(node: Node, holder: &impl Fn(Node) -> Rank, made: &mut [usize]) -> usize {
        let Some((left, right)) = node.children() else { return 0 };
        let by = holder(node);
        made[by] += 1;
        let arrives = |part: Node, after: usize| after + usize::from(holder(part) != by);
        let [left_after, right_after] = [left, right].map(|part| visit(part, holder, made));
        arrives(left, left_after).max(arrives(right, right_after))
    }
    let holder = |node: Node| in_turn(p, root, turn, node);
    let mut made = vec![0; p];
    let rounds = visit(Node::root(p), &holder, &mut made);
    (rounds + usize::from(holder(Node::root(p)) != root), made)
}

/// Which rank makes the sum of a node, in [`reduce_in_turn`].
fn in_turn(p: usize, root: Rank, turn: usize, node: Node) -> Rank {
    let Some((left, right)) = node.children() else { return node.lo };
    let part = match [left, right].map(|part| contains(part, root)) {
        [false, false] => [left, right][(turn >> left.len.ilog2()) & 1],
        // The root makes the last sum if it needs no other for it.
        [true, false] if node.len == p && left.len == 1 => left,
        [false, true] if node.len == p && right.len == 1 => right,
        [has_root, _] => [left, right][usize::from(has_root)],
    };
    in_turn(p, root, turn, part)
}

/// A sum is made by the root, if it has a part of it, or else by the lower of the two ranks that have its parts.
fn towards(root: Rank) -> impl Fn(Node) -> Rank {
    move |node| if contains(node, root) { root } else { node.lo }
}

fn contains(node: Node, rank: Rank) -> bool {
    (node.lo..node.lo + node.len).contains(&rank)
}

/// Each sum of the canonical tree is made by one of the two ranks that have its parts: by its `holder`. The other sends
/// its part and is done. With a holder [`towards`] the root:
///
/// ```text
///   root 0                    root 3
///   0   1   2   3   4         0   1   2   3   4
///   |<--'   |<--'   |         |<--'   '-->|   |
///   |<------'       |         '---------->|   |
///   |<--------------'                     |<--'
/// ```
///
/// This rank brings `own`, and keeps its sums in `sum`.
fn climb(p: usize, rank: Rank, holder: impl Fn(Node) -> Rank, mut own: Loc, sum: Loc) -> Vec<Step> {
    let mut steps = vec![];
    let mut held = Node::leaf(rank);
    for other in others_on_the_way(p, rank) {
        let (left, right) = if held.lo < other.lo { (held, other) } else { (other, held) };
        let node = Node { lo: left.lo, len: left.len + right.len };
        let holders = [node, other].map(&holder);
        if holders[0] != rank {
            steps.push(Step::Send { to: holders[0], src: own });
            break;
        }
        let peer = holders[1];
        let finish = node.len == p;
        let side = if held == left { Side::Right } else { Side::Left };
        if own == sum {
            steps.push(Step::RecvReduce { from: peer, dst: sum, side, finish });
        } else {
            let loc_of = |part: Node| if part == held { own } else { sum };
            let srcs = [left, right].map(|part| (part, loc_of(part))).to_vec();
            steps.push(Step::Recv { from: peer, dst: sum });
            steps.push(Step::ReduceTree { dsts: vec![sum], srcs, finish });
            own = sum;
        }
        held = node;
    }
    steps
}

/// The nodes with which the leaf of a rank is combined on the way to the top of the tree over `p` ranks, from below.
fn others_on_the_way(p: usize, rank: Rank) -> impl Iterator<Item = Node> {
    let mut node = Node::root(p);
    let mut others = vec![];
    while let Some((left, right)) = node.children() {
        let is_right = rank >= right.lo;
        others.push(if is_right { left } else { right });
        node = if is_right { right } else { left };
    }
    others.into_iter().rev()
}

/// The picture of the reduction upside down. A rank's place is its distance above the root, around the
/// circle of ranks. A rank receives the data from the place without its own lowest set bit. It then sends
/// to the places that differ from its own in a lower bit. The farthest one comes first, because it has the
/// most ranks to serve.
///
/// See [`broadcast_cost`].
pub(super) fn broadcast(topology: &Topology, rank: Rank, root: Rank) -> Vec<Step> {
    let p = topology.world_size;
    let place = (rank + p - root) % p;
    let rank_at = |place: usize| (place + root) % p;

    let mut steps = vec![];
    let mut distance = match place {
        0 => p.next_power_of_two(),
        _ => 1 << place.trailing_zeros(),
    };
    if place != 0 {
        steps.push(Step::Recv { from: rank_at(place - distance), dst: DATA });
    }
    while distance > 1 {
        distance /= 2;
        if place + distance < p {
            steps.push(Step::Send { to: rank_at(place + distance), src: DATA });
        }
    }
    steps
}

/// `floor(log2 p)` rounds. The root sends `ceil(log2 p)` messages of `n` elements.
pub(super) fn broadcast_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let p = topology.world_size;
    let elements = doublings(p) * n;
    Cost { rounds: longest_chain(p), messages: doublings(p), elements, ..Cost::default() }
}

/// Rounds until all places have the data. A place with `b` set bits is `b` messages away from the root,
/// and a place below `p` has at most `floor(log2 p)` set bits.
fn longest_chain(p: usize) -> usize {
    p.ilog2() as usize
}

/// The tree of the broadcast. A rank receives its own block and the blocks of all ranks that it serves, and
/// forwards the latter.
///
/// See [`scatter_cost`]. Scratch holds these blocks, the rank's own first. The root's blocks lie in the order
/// of ranks, so a run that wraps past the last rank travels as two messages.
pub(super) fn scatter(topology: &Topology, rank: Rank, root: Rank) -> Vec<Step> {
    let p = topology.world_size;
    let place = (rank + p - root) % p;
    let rank_at = |place: usize| (place + root) % p;
    if place == 0 {
        let runs = served(p, 0).flat_map(|child| {
            let to = rank_at(child.start);
            runs_at_root(p, root, child).map(move |run| (to, run))
        });
        let mut steps: Vec<Step> =
            runs.map(|(to, run)| Step::Send { to, src: Loc::input(run) }).collect();
        steps.push(Step::Copy { dst: DATA, src: Loc::input(Span::block(rank, p)) });
        return steps;
    }
    let distance = 1 << place.trailing_zeros();
    let parent = place - distance;
    let held = place..p.min(place + distance);
    let in_scratch = |range: Range<usize>| {
        Loc::scratch(0, Span { first: range.start - place, count: range.len(), of: 1 })
    };
    let from = rank_at(parent);
    if held.len() == 1 {
        return vec![Step::Recv { from, dst: DATA }];
    }
    let mut steps = vec![];
    let mut next = place;
    let run_lengths: Vec<usize> = match parent {
        0 => runs_at_root(p, root, held).map(|run| run.count).collect(),
        _ => vec![held.len()],
    };
    for len in run_lengths {
        steps.push(Step::Recv { from, dst: in_scratch(next..next + len) });
        next += len;
    }
    let children = served(p, place);
    steps.extend(
        children.map(|child| Step::Send { to: rank_at(child.start), src: in_scratch(child) }),
    );
    steps.push(Step::Copy { dst: DATA, src: in_scratch(place..place + 1) });
    steps
}

/// `floor(log2 p)` rounds. The root sends `(p - 1) n` elements, to `ceil(log2 p)` ranks, in one
/// message each or two where the run wraps.
pub(super) fn scatter_cost(topology: &Topology, root: Rank, n: usize) -> Cost {
    let p = topology.world_size;
    let messages = served(p, 0).map(|child| runs_at_root(p, root, child).count()).sum();
    Cost { rounds: longest_chain(p), messages, elements: (p - 1) * n, ..Cost::default() }
}

/// The places that `place` sends to, the farthest first. Each comes as the range of places that it serves.
fn served(p: usize, place: usize) -> impl Iterator<Item = Range<usize>> {
    let reach = if place == 0 { p.next_power_of_two() } else { 1 << place.trailing_zeros() };
    let distances = (0..usize::ilog2(reach)).rev().map(|log2| 1 << log2);
    let children = distances.map(move |distance| place + distance..p.min(place + 2 * distance));
    children.filter(|child| !child.is_empty())
}

/// Where the blocks of these places lie at the root, in the order of ranks.
fn runs_at_root(p: usize, root: Rank, places: Range<usize>) -> impl Iterator<Item = Span> {
    let first = (places.start + root) % p;
    let before_the_end = places.len().min(p - first);
    let runs = [
        Span { first, count: before_the_end, of: p },
        Span { first: 0, count: places.len() - before_the_end, of: p },
    ];
    runs.into_iter().filter(|run| run.count > 0)
}
