//! A root, and several hosts: the ranks of a host carry a slice each, so a host sends and gets the data once for each
//! host that it talks to.

use super::binomial;
use super::cost::{Cost, doublings};
use super::leaders;
use super::seats::{Seats, slices};
use crate::lags::Lags;
use crate::step::{Loc, Rank, Span, Step};
use crate::topology::Topology;

const DATA: Loc = Loc::data(Span::WHOLE);
const SLOT: Loc = Loc::slot(Span::WHOLE);

/// The root lays its data out. The rank on seat `i` of its host takes slice `i`, which goes from host to host, along a
/// tree, to the ranks on seat `i`. Each of them lays it out for its host.
///
/// ```text
///   host 0   rank 0 (root)  s0 s1   slot of 0        s0 -> rank 2
///            rank 1          .  .   -> s0 s1         s1 -> rank 3
///   host 1   rank 2          .  .                    s0  .           -> s0 s1
///            rank 3          .  .                     . s1           -> s0 s1
/// ```
///
/// See [`tree_cost`]. The host of the root sends the data several times if there are many hosts.
pub(super) fn tree(topology: &Topology, rank: Rank, root: Rank) -> Vec<Step> {
    broadcast(topology, rank, root, binomial::broadcast)
}

/// Rounds are those of a [binomial tree](binomial::broadcast_cost) over hosts, and one on the host before and after it.
/// A rank of the root's host sends its slice to `ceil(log2 H)` others, and reads the `n` elements.
pub(super) fn tree_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let hosts = topology.ranks_by_host();
    let slice = n.div_ceil(slices(hosts));
    let among = binomial::broadcast_cost(&Topology::flat(hosts.len()), 0, slice);
    Cost { rounds: among.rounds + 2, shared_elements: n, ..among }
}

/// Like [`tree`], but from each host to the next one. No host sends the data more than once, so this is for long data,
/// which goes in windows: hosts send one on while they get the next.
///
/// See [`chain_cost`].
pub(super) fn chain(topology: &Topology, rank: Rank, root: Rank) -> Vec<Step> {
    broadcast(topology, rank, root, |hosts, host, root| {
        let hosts = hosts.world_size;
        let from = (host + hosts - 1) % hosts;
        let to = (host + 1) % hosts;
        let receive = (host != root).then_some(Step::Recv { from, dst: DATA });
        let send = (to != root).then_some(Step::Send { to, src: DATA });
        receive.into_iter().chain(send).collect()
    })
}

/// `H - 1` rounds between hosts, and one on the host before and after them. A rank sends its slice once.
pub(super) fn chain_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let hosts = topology.ranks_by_host();
    let elements = n.div_ceil(slices(hosts));
    Cost { rounds: hosts.len() + 1, messages: 1, elements, shared_elements: n, ..Cost::default() }
}

/// `between` carries data between hosts that count as ranks.
fn broadcast(
    topology: &Topology,
    rank: Rank,
    root: Rank,
    between: fn(&Topology, Rank, Rank) -> Vec<Step>,
) -> Vec<Step> {
    let (seats, root_host) = (seats_of(topology, rank), topology.host_of(root));
    let between = |slice| among_hosts(&seats, slice, root_host, between);
    let fetch = |span, peer| Step::Copy { dst: Loc::data(span), src: Loc::slot(span).of(peer) };
    let mut steps = vec![];
    if seats.group == root_host {
        if rank == root {
            steps.extend([Step::Copy { dst: SLOT, src: DATA }, Step::Post]);
            steps.extend(seats.own_slice().into_iter().flat_map(between));
            return steps;
        }
        steps.extend([Step::Post, Step::Wait { peer: root, upto: 1 }]);
        // What is sent comes first.
        if let Some(slice) = seats.own_slice() {
            steps.push(fetch(slice, root));
            steps.extend(between(slice));
        }
        let others = (0..seats.slices).filter(|seat| *seat != seats.seat);
        steps.extend(others.map(|seat| fetch(seats.slice(seat), root)));
        return steps;
    }
    if let Some(slice) = seats.own_slice() {
        steps.extend(between(slice));
        steps.push(Step::Copy { dst: Loc::slot(slice), src: Loc::data(slice) });
    }
    steps.push(Step::Post);
    for (seat, peer) in seats.peers().filter(|(seat, _)| *seat < seats.slices) {
        steps.extend([Step::Wait { peer, upto: 1 }, fetch(seats.slice(seat), peer)]);
    }
    steps
}

/// The rank on seat `i` of a host sums slice `i` over its host. Then the ranks on that seat of all hosts sum it as in a
/// [tree](binomial::reduce_sums), and those of the root's host lay the sums out for the root.
///
/// See [`reduce_cost`].
pub(super) fn reduce(topology: &Topology, rank: Rank, root: Rank) -> Vec<Step> {
    reduce_with(topology, rank, root, |hosts, host, root, _| {
        binomial::reduce_sums(hosts, host, root)
    })
}

/// Rounds are those of the [tree](binomial::reduce_sums_rounds) over hosts, and one on the host before and after it. A
/// rank sends its slice once. It reads and combines its slice of all ranks of its host. The root reads the other slices.
pub(super) fn reduce_cost(topology: &Topology, root: Rank, n: usize) -> Cost {
    let (hosts, root_host) = (topology.ranks_by_host(), topology.host_of(root));
    let made = |host| binomial::received(hosts.len(), host, root_host);
    let made: Vec<usize> = (0..hosts.len()).map(made).collect();
    let rounds = binomial::reduce_sums_rounds(hosts.len(), root_host);
    reduce_with_cost(topology, root, n, |_| (rounds, made.clone()))
}

/// Where [`reduce_in_turn`] works, and is not the same as [`reduce`].
pub(super) fn serves_turns(topology: &Topology) -> bool {
    leaders::serves(topology) && topology.ranks_by_host().len() > 2
}

/// Like [`reduce`], but hosts make the sums [in turn](binomial::reduce_in_turn): for each slice others. The root's host
/// gets the sum once, where it gets `ceil(log2 H)` in [`reduce`]. So this is for long data and several hosts.
///
/// See [`reduce_in_turn_cost`].
pub(super) fn reduce_in_turn(topology: &Topology, rank: Rank, root: Rank) -> Vec<Step> {
    reduce_with(topology, rank, root, binomial::reduce_in_turn)
}

/// As [`reduce_cost`], with the rounds and the sums of [turns](binomial::reduce_in_turn_cost).
pub(super) fn reduce_in_turn_cost(topology: &Topology, root: Rank, n: usize) -> Cost {
    let (hosts, root_host) = (topology.ranks_by_host(), topology.host_of(root));
    reduce_with_cost(topology, root, n, |seat| {
        binomial::reduce_in_turn_cost(hosts.len(), root_host, seat)
    })
}

/// The lags of [`reduce_in_turn`]. Every level of the tree is a round, and the way of the result to the root is the
/// last one. A message goes up from a level in the round of this level, and is added in the next one.
pub(super) fn turn_lags(topology: &Topology, rank: Rank, steps: &[Step]) -> Lags {
    let own = topology.host_of(rank);
    let level = |peer| (own ^ topology.host_of(peer)).ilog2() as usize;
    let levels = doublings(topology.ranks_by_host().len());
    let (mut lag, mut posts) = (0, 0);
    let (mut has_sent, mut has_result) = (false, false);
    let of_steps = steps.iter().map(|step| {
        match step {
            Step::Send { .. } if has_result => lag = levels,
            Step::Send { to, .. } => (lag, has_sent) = (level(*to), true),
            Step::Recv { .. } if has_sent => lag = levels + 1,
            Step::Recv { from, .. } | Step::RecvReduce { from, .. } => lag = level(*from) + 1,
            Step::Post => posts += 1,
            _ => {}
        }
        if posts > 1 {
            lag = levels + 1; // the root reads the result
        }
        has_result |= matches!(
            step,
            Step::RecvReduce { finish: true, .. } | Step::ReduceTree { finish: true, .. }
        );
        lag
    });
    Lags::with_results_in_slots(steps, of_steps.collect(), levels + 1)
}

/// `between` sums the slice of a seat towards the root, over hosts that count as ranks.
fn reduce_with(
    topology: &Topology,
    rank: Rank,
    root: Rank,
    between: fn(hosts: usize, host: usize, root: usize, seat: usize) -> Vec<Step>,
) -> Vec<Step> {
    let (seats, root_host) = (seats_of(topology, rank), topology.host_of(root));
    let mut steps = vec![Step::Copy { dst: SLOT, src: DATA }, Step::Post];
    if let Some(slice) = seats.own_slice() {
        // The data of other ranks stays as it is.
        let sum = if rank == root { Loc::data(slice) } else { Loc::scratch(0, slice) };
        steps.extend(seats.sum_of_group(Loc::data(slice), Loc::slot, sum, false));
        let own = |span: Span| Loc { span: span.within(slice), ..sum };
        let climb = between(seats.groups.len(), seats.group, root_host, seats.seat);
        let climb = climb.into_iter();
        steps.extend(
            climb.map(|step| step.moved(|host| seats.counterpart(host), |loc| own(loc.span))),
        );
        if seats.group == root_host && rank != root {
            steps.push(Step::Copy { dst: Loc::slot(slice), src: sum });
        }
    }
    steps.push(Step::Post);
    if rank == root {
        for (seat, peer) in seats.peers().filter(|(seat, _)| *seat < seats.slices) {
            let slice = seats.slice(seat);
            steps.push(Step::Wait { peer, upto: 2 });
            steps.push(Step::Copy { dst: Loc::data(slice), src: Loc::slot(slice).of(peer) });
        }
    }
    steps
}

/// `between` says the rounds between hosts for a seat, and how many sums each host makes.
fn reduce_with_cost(
    topology: &Topology,
    root: Rank,
    n: usize,
    between: impl Fn(usize) -> (usize, Vec<usize>),
) -> Cost {
    let hosts = topology.ranks_by_host();
    let (slices, root_host) = (slices(hosts), topology.host_of(root));
    let len = |seat: usize| Span::block(seat, slices).resolve(n).len();
    let longest = n.div_ceil(slices);
    let peers = |host: usize| hosts[host].len() - 1;
    let of_seat = |seat| {
        let (rounds, made) = between(seat);
        let sums = made.into_iter().enumerate().map(|(host, made)| peers(host) + made);
        (rounds, sums.max().unwrap_or(0) * len(seat))
    };
    let (rounds, combined) =
        (0..slices).map(of_seat).fold((0, 0), |most, one| (most.0.max(one.0), most.1.max(one.1)));
    let read = (0..hosts.len()).map(|host| peers(host) * longest).max().unwrap_or(0);
    let root_seat = hosts[root_host].partition_point(|&other| other < root);
    let of_root = match root_seat < slices {
        true => peers(root_host) * len(root_seat) + n - len(root_seat),
        false => n,
    };
    Cost {
        rounds: rounds + 2,
        messages: 1,
        elements: longest,
        combined,
        shared_elements: read.max(of_root),
    }
}

fn seats_of(topology: &Topology, rank: Rank) -> Seats<'_> {
    Seats::of(topology.ranks_by_host(), topology.host_of(rank), rank)
}

/// What the ranks on one seat of all hosts do with their slice, as if hosts were ranks.
fn among_hosts(
    seats: &Seats<'_>,
    slice: Span,
    root_host: usize,
    between: fn(&Topology, Rank, Rank) -> Vec<Step>,
) -> Vec<Step> {
    let steps = between(&Topology::flat(seats.groups.len()), seats.group, root_host).into_iter();
    let of_slice = |loc: Loc| Loc { span: loc.span.within(slice), ..loc };
    steps.map(|step| step.moved(|host| seats.counterpart(host), of_slice)).collect()
}
