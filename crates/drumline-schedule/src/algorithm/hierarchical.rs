//! Hosts add their own ranks first, and only sums of hosts travel.

use super::Cost;
use super::seats::{Seats, busiest, slices};
use crate::step::{Loc, Rank, Span, Step};
use crate::topology::Topology;
use crate::tree::Node;

/// The data is cut into as many slices as the smallest host has ranks. On every host the rank on
/// seat `i` sums slice `i` over its host, and shares it out with the ranks on seat `i` of the
/// other hosts as direct exchange would: each host sums a part of the slice for all. Then all
/// ranks of the host get the slice.
///
/// ```text
///   host 0   rank 0   a0 a1        A0 A1      A = a + b       s0 s1
///            rank 1   b0 b1   on the host                     s0 s1
///                                   |  |  seat 0 exchanges slice 0, seat 1 slice 1
///   host 1   rank 2   c0 c1        C0 C1      C = c + d       s0 s1
///            rank 3   d0 d1                                   s0 s1      s = A + C
/// ```
///
/// In this form, what ranks bring is laid out in slots, and results are fetched from there. See
/// [`staged_cost`]. Scratch: a part of a slice for every other host.
pub(super) fn staged(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let seats = seats_of(topology, rank);
    if topology.world_size == 1 {
        return vec![];
    }
    let has_peers = seats.peers().next().is_some();
    let mut steps = vec![];
    if has_peers {
        steps.push(Step::Copy { dst: Loc::slot(Span::WHOLE), src: Loc::data(Span::WHOLE) });
    }
    steps.push(Step::Post);
    steps.extend(sum_of_slice(topology, &seats, Loc::slot));
    if let Some(slice) = seats.own_slice().filter(|_| has_peers) {
        steps.push(Step::Copy { dst: Loc::slot(slice), src: Loc::data(slice) });
    }
    steps.push(Step::Post);
    for (seat, peer) in seats.peers().filter(|&(seat, _)| seat < seats.slices) {
        let slice = seats.slice(seat);
        steps.push(Step::Wait { peer, upto: 2 });
        steps.push(Step::Copy { dst: Loc::data(slice), src: Loc::slot(slice).of(peer) });
    }
    steps
}

/// With `H` hosts of at most `q` ranks and `L` slices of at most `s = ceil(n / L)` elements: 2
/// rounds on the host if `q > 1`, and 2 between hosts if `H > 1`. A rank sends `2 (H - 1)`
/// messages: all of a slice but its own part, and its own part `H - 1` times; the largest part has
/// `ceil(n / (L H))` elements. It reads its slice from `q - 1` ranks and then the other slices. It
/// combines its slice of the ranks of its host, and then its part of all hosts.
pub(super) fn staged_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let Shape { largest, slice, .. } = Shape::of(topology, n);
    let shared_elements = if largest == 1 { 0 } else { n + (largest - 2) * slice };
    Cost { shared_elements, ..exchange_cost(topology, n) }
}

/// The same where the data is registered: it is summed where it lies, and whoever has a slice
/// writes it to its host's ranks. See [`push_cost`].
pub(super) fn push(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let seats = seats_of(topology, rank);
    if topology.world_size == 1 {
        return vec![];
    }
    let mut steps = vec![Step::Post];
    steps.extend(sum_of_slice(topology, &seats, Loc::data));
    if let Some(slice) = seats.own_slice() {
        let slice = Loc::data(slice);
        steps.extend(seats.peers().map(|(_, peer)| Step::Copy { dst: slice.of(peer), src: slice }));
    }
    steps.push(Step::Post);
    let writers = seats.peers().filter(|&(seat, _)| seat < seats.slices);
    steps.extend(writers.map(|(_, peer)| Step::Wait { peer, upto: 2 }));
    steps
}

/// Rounds, messages and elements are those of [`staged_cost`]. A rank reads its slice from `q - 1`
/// ranks and writes it to as many.
pub(super) fn push_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let Shape { largest, slice, .. } = Shape::of(topology, n);
    Cost { shared_elements: 2 * (largest - 1) * slice, ..exchange_cost(topology, n) }
}

/// What is the same in both forms.
fn exchange_cost(topology: &Topology, n: usize) -> Cost {
    let Shape { hosts, largest, slices, slice } = Shape::of(topology, n);
    let on_host = if largest > 1 { 2 } else { 0 };
    match hosts {
        1 => Cost { rounds: on_host, combined: combined(topology, n), ..Cost::default() },
        _ => Cost {
            rounds: on_host + 2,
            messages: 2 * (hosts - 1),
            elements: slice + (hosts - 2) * n.div_ceil(slices * hosts),
            combined: combined(topology, n),
            ..Cost::default()
        },
    }
}

/// Where hosts differ in size, the rank with the longest slice need not be the busiest.
fn combined(topology: &Topology, n: usize) -> usize {
    let hosts = topology.ranks_by_host();
    busiest(hosts, n, |ranks, slice, part| (ranks - 1) * slice + (hosts.len() - 1) * part)
}

/// The numbers that prices depend on.
struct Shape {
    hosts: usize,
    /// Ranks of the largest host.
    largest: usize,
    slices: usize,
    /// Elements in the largest slice.
    slice: usize,
}

impl Shape {
    fn of(topology: &Topology, n: usize) -> Shape {
        let sizes = || topology.ranks_by_host().iter().map(Vec::len);
        let slices = slices(topology.ranks_by_host());
        Shape {
            hosts: sizes().len(),
            largest: sizes().max().unwrap_or(1),
            slices,
            slice: n.div_ceil(slices),
        }
    }
}

fn seats_of(topology: &Topology, rank: Rank) -> Seats<'_> {
    Seats::of(topology.ranks_by_host(), topology.host_of(rank), rank)
}

/// The sum of the rank's slice over all ranks, in its data; nothing for ranks without a slice. What the
/// ranks of the host bring is read `from` there. Messages touch private memory only.
fn sum_of_slice(topology: &Topology, seats: &Seats<'_>, from: fn(Span) -> Loc) -> Vec<Step> {
    let Some(slice) = seats.own_slice() else { return vec![] };
    let hosts = topology.ranks_by_host().len();
    let mut steps = seats.sum_of_group(slice, from, Loc::data(slice), hosts == 1);
    if hosts > 1 {
        steps.extend(exchange(seats, hosts));
    }
    steps
}

/// Direct exchange of the slice with the same seat of the other hosts.
fn exchange(seats: &Seats<'_>, hosts: usize) -> Vec<Step> {
    let own = seats.part(seats.group);
    let senders = || (1..hosts).map(|distance| (seats.group + hosts - distance) % hosts);
    let copy_of = |host: usize| match host == seats.group {
        true => Loc::data(own),
        false => Loc::scratch(host, own),
    };
    let send =
        |host: usize, part: Span| Step::Send { to: seats.counterpart(host), src: Loc::data(part) };
    let recv = |host: usize, dst: Loc| Step::Recv { from: seats.counterpart(host), dst };

    let mut steps = vec![];
    steps.extend(seats.other_groups().map(|host| send(host, seats.part(host))));
    steps.extend(senders().map(|host| recv(host, copy_of(host))));
    steps.push(Step::ReduceTree {
        dsts: vec![Loc::data(own)],
        // Leaves of the tree over hosts.
        srcs: (0..hosts).map(|host| (Node::leaf(host), copy_of(host))).collect(),
        finish: true,
    });
    steps.extend(seats.other_groups().map(|host| send(host, own)));
    steps.extend(senders().map(|host| recv(host, Loc::data(seats.part(host)))));
    steps
}
