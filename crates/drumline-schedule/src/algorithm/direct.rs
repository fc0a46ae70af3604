//! Direct exchange: every rank sends to every rank.

use super::cost::{Cost, Load};
use crate::step::{Loc, Rank, Span, Step};
use crate::topology::Topology;
use crate::tree::Node;

/// The largest world in which all ranks may send to each other within one call. There a rank sends
/// `2 (p - 1)` messages, and all ranks together `2 p^2`. In larger worlds the bookkeeping costs more than
/// the saved rounds, and blocks get too short for the wire.
pub const DIRECT_MAX_RANKS: usize = 256;

pub(super) fn serves(topology: &Topology) -> bool {
    serves_few(topology) && topology.sums_by_rank()
}

pub(super) fn serves_few(topology: &Topology) -> bool {
    topology.world_size <= DIRECT_MAX_RANKS
}

/// Block `i` of the data belongs to rank `i`. Every rank sends each block to its owner. The owner sums the
/// `p` copies in one pass and sends the result to all ranks.
///
/// ```text
///   rank 0   a0 a1 a2          s0  .  .          s0 s1 s2
///   rank 1   b0 b1 b2    ->     . s1  .    ->    s0 s1 s2      si = ai + bi + ci
///   rank 2   c0 c1 c2           .  . s2          s0 s1 s2
/// ```
///
/// See [`all_reduce_cost`]. No rank can send less. Only contributions and results travel, no
/// partial sums, so narrow floats stay narrow on the wire. Scratch holds a block for every peer.
pub(super) fn all_reduce(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let p = topology.world_size;
    if p == 1 {
        return vec![];
    }
    let (receivers, senders) = (|| receivers(p, rank), || senders(p, rank));
    let own = Span::block(rank, p);
    let copy_of = |peer: Rank| match peer == rank {
        true => Loc::data(own),
        false => Loc::scratch(peer, own),
    };

    let mut steps = vec![];
    steps.extend(receivers().map(|to| Step::Send { to, src: Loc::data(Span::block(to, p)) }));
    steps.extend(senders().map(|from| Step::Recv { from, dst: copy_of(from) }));
    steps.push(Step::ReduceTree {
        dsts: vec![Loc::data(own)],
        srcs: (0..p).map(|peer| (Node::leaf(peer), copy_of(peer))).collect(),
        finish: true,
    });
    steps.extend(receivers().map(|to| Step::Send { to, src: Loc::data(own) }));
    steps.extend(senders().map(|from| Step::Recv { from, dst: Loc::data(Span::block(from, p)) }));
    steps
}

/// 2 rounds and `2 (p - 1)` messages. A rank with a block of `b` elements sends `n - b` and then
/// `(p - 1) b`. It combines its block of every other rank into its own. The largest block has
/// `ceil(n / p)` elements.
pub(super) fn all_reduce_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    match topology.world_size {
        1 => Cost::default(),
        p => Cost {
            rounds: 2,
            messages: 2 * (p - 1),
            elements: n + (p - 2) * n.div_ceil(p),
            combined: (p - 1) * n.div_ceil(p),
            ..Cost::default()
        },
    }
}

/// The load of each of `p` ranks in an [`all_reduce`] of `part` of `n` elements.
pub(super) fn loads(p: usize, n: usize, part: Span) -> Vec<Load> {
    let all = part.resolve(n).len();
    let peers = p - 1;
    let load = |rank| {
        let block = Span::block(rank, p).within(part).resolve(n).len();
        Load { messages: 2 * peers, sent: all - block + peers * block, combined: peers * block }
    };
    (0..p).map(load).collect()
}

/// Every rank sends block `i` of its input to rank `i`. The receiver sums the `p` copies in one pass. This is
/// the first half of [`all_reduce`].
///
/// See [`reduce_scatter_cost`]. Contributions travel, but no partial sums. Scratch holds a block for every
/// peer.
pub(super) fn reduce_scatter(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let p = topology.world_size;
    let data = Loc::data(Span::WHOLE);
    let own = Loc::input(Span::block(rank, p));
    if p == 1 {
        return vec![Step::Copy { dst: data, src: own }];
    }
    let copy_of = |peer: Rank| match peer == rank {
        true => own,
        false => Loc::scratch(peer, Span::block(rank, p)),
    };

    let mut steps = vec![];
    let block_of = |to| Loc::input(Span::block(to, p));
    steps.extend(receivers(p, rank).map(|to| Step::Send { to, src: block_of(to) }));
    steps.extend(senders(p, rank).map(|from| Step::Recv { from, dst: copy_of(from) }));
    steps.push(Step::ReduceTree {
        dsts: vec![data],
        srcs: (0..p).map(|peer| (Node::leaf(peer), copy_of(peer))).collect(),
        finish: true,
    });
    steps
}

/// 1 round, `p - 1` messages and `(p - 1) n` elements, sent and combined, `n` being the length
/// of a block.
pub(super) fn reduce_scatter_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let peers = topology.world_size - 1;
    Cost {
        rounds: peers.min(1),
        messages: peers,
        elements: peers * n,
        combined: peers * n,
        ..Cost::default()
    }
}

/// Every rank sends its contribution to every other rank.
///
/// See [`all_gather_cost`].
pub(super) fn all_gather(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let p = topology.world_size;
    let input = Loc::input(Span::WHOLE);
    let block_of = |peer| Loc::data(Span::block(peer, p));
    let mut steps: Vec<Step> = receivers(p, rank).map(|to| Step::Send { to, src: input }).collect();
    steps.push(Step::Copy { dst: block_of(rank), src: input });
    steps.extend(senders(p, rank).map(|from| Step::Recv { from, dst: block_of(from) }));
    steps
}

/// 1 round, `p - 1` messages and `(p - 1) n` elements, `n` being one rank's contribution.
pub(super) fn all_gather_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let peers = topology.world_size - 1;
    Cost { rounds: peers.min(1), messages: peers, elements: peers * n, ..Cost::default() }
}

/// Every rank sends block `i` of its input to rank `i`.
///
/// See [`all_to_all_cost`].
pub(super) fn all_to_all(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let p = topology.world_size;
    let block = |peer| Span::block(peer, p);
    let send = |to| Step::Send { to, src: Loc::input(block(to)) };
    let mut steps: Vec<Step> = receivers(p, rank).map(send).collect();
    steps.push(Step::Copy { dst: Loc::data(block(rank)), src: Loc::input(block(rank)) });
    steps.extend(senders(p, rank).map(|from| Step::Recv { from, dst: Loc::data(block(from)) }));
    steps
}

/// 1 round, `p - 1` messages and `(p - 1) n` elements, `n` being the length of a block.
pub(super) fn all_to_all_cost(topology: &Topology, root: Rank, n: usize) -> Cost {
    all_gather_cost(topology, root, n)
}

/// Every rank sends an empty message to every other rank. So each rank knows by itself which ranks are
/// missing.
///
/// See [`barrier_cost`].
pub(super) fn barrier(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let p = topology.world_size;
    let nothing = Loc::data(Span::EMPTY);
    let sends = receivers(p, rank).map(|to| Step::Send { to, src: nothing });
    sends.chain(senders(p, rank).map(|from| Step::Recv { from, dst: nothing })).collect()
}

/// 1 round of `p - 1` empty messages.
pub(super) fn barrier_cost(topology: &Topology, _root: Rank, _elements: usize) -> Cost {
    let peers = topology.world_size - 1;
    Cost { rounds: peers.min(1), messages: peers, ..Cost::default() }
}

/// The other ranks. Each rank starts with the next higher one, so that not all ranks send to the same rank
/// first.
fn receivers(p: usize, rank: Rank) -> impl Iterator<Item = Rank> {
    (1..p).map(move |distance| (rank + distance) % p)
}

fn senders(p: usize, rank: Rank) -> impl Iterator<Item = Rank> {
    (1..p).map(move |distance| (rank + p - distance) % p)
}
