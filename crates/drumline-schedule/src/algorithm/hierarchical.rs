//! Hosts add their own ranks first, and only sums of hosts travel.

use super::cost::{Cost, Load};
use super::direct::DIRECT_MAX_RANKS;
use super::halving::SLICES_MAX;
use super::seats::{Seats, slices};
use super::{direct, halving};
use crate::lags::Lags;
use crate::step::{Loc, Rank, Span, Step};
use crate::topology::Topology;

/// How the ranks on one seat of all hosts sum their slice: an all-reduce over links in which each host counts
/// as a rank.
struct BetweenHosts {
    generate: fn(&Topology, Rank, Rank) -> Vec<Step>,
    rounds: fn(usize) -> usize,
    loads: fn(usize, usize, Span) -> Vec<Load>,
}

const DIRECT: BetweenHosts = BetweenHosts {
    generate: direct::all_reduce,
    rounds: |hosts| if hosts > 1 { 2 } else { 0 },
    loads: direct::loads,
};

const HALVING: BetweenHosts =
    BetweenHosts { generate: halving::all_reduce, rounds: halving::rounds, loads: halving::loads };

/// Hosts that may add their own ranks first, few enough that every host may send to every host.
pub(super) fn serves_few(topology: &Topology) -> bool {
    topology.sums_by_placement() && topology.ranks_by_host().len() <= DIRECT_MAX_RANKS
}

/// Several hosts that may add their own ranks first, with no more slices than halving can name.
pub(super) fn serves_several(topology: &Topology) -> bool {
    let hosts = topology.ranks_by_host();
    topology.sums_by_placement() && hosts.len() > 1 && slices(hosts) <= SLICES_MAX
}

/// The data has as many slices as the smallest host has ranks. On every host the rank on seat `i` sums slice
/// `i` over its host. Then it takes part in a [direct exchange](direct::all_reduce) with the ranks on seat
/// `i` of the other hosts: each host sums a part of the slice for all hosts. Then all ranks of the host get
/// the slice.
///
/// ```text
///   host 0   rank 0   a0 a1        A0 A1      A = a + b       s0 s1
///            rank 1   b0 b1   on the host                     s0 s1
///                                   |  |  seat 0 exchanges slice 0, seat 1 slice 1
///   host 1   rank 2   c0 c1        C0 C1      C = c + d       s0 s1
///            rank 3   d0 d1                                   s0 s1      s = A + C
/// ```
///
/// In this form ranks copy their data to slots, and copy results from slots. See [`staged_cost`]. Scratch
/// holds a part of a slice for every other host.
pub(super) fn staged(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    through_slots(topology, rank, &DIRECT)
}

/// With `H` hosts of at most `q` ranks and `L` slices of at most `s = ceil(n / L)` elements: 2
/// rounds on the host if `q > 1`, and 2 between hosts if `H > 1`. A rank sends `2 (H - 1)`
/// messages: all of a slice but its own part, and its own part `H - 1` times; the largest part has
/// `ceil(n / (L H))` elements. It reads its slice from `q - 1` ranks and then the other slices. It
/// combines its slice of the ranks of its host, and then its part of all hosts.
pub(super) fn staged_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    through_slots_cost(topology, n, &DIRECT)
}

/// The same in registered data: ranks sum in place, and a rank that has a slice writes it to the ranks of its
/// host. See [`push_cost`].
pub(super) fn push(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    in_place(topology, rank, &DIRECT)
}

/// Rounds, messages and elements are those of [`staged_cost`]. A rank reads its slice from `q - 1`
/// ranks and writes it to as many.
pub(super) fn push_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    in_place_cost(topology, n, &DIRECT)
}

/// Like [`staged`], but with [halving](halving::all_reduce) between hosts, which suits many hosts because a
/// rank exchanges with few ranks. A rank sends as little as in direct exchange, or up to an eighth more if
/// the number of hosts is not a power of two.
///
/// See [`staged_halving_cost`].
pub(super) fn staged_halving(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    through_slots(topology, rank, &HALVING)
}

/// Like [`staged_cost`], but between hosts with `2 ceil(log2 H)` rounds, and with what halving sends and
/// combines of the slice in a world of `H` ranks.
pub(super) fn staged_halving_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    through_slots_cost(topology, n, &HALVING)
}

/// Like [`push`], but with halving between hosts. See [`push_halving_cost`].
pub(super) fn push_halving(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    in_place(topology, rank, &HALVING)
}

/// Like [`push_cost`], but between hosts as in [`staged_halving_cost`].
pub(super) fn push_halving_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    in_place_cost(topology, n, &HALVING)
}

/// The same without the last step, in registered data: a slice stays where it was summed, and ranks wait until all
/// slices of their host are there. See [`pull_cost`].
///
/// ```text
///   host 0   rank 0   a0 a1        A0 A1      A = a + b       s0  .
///            rank 1   b0 b1   on the host                      . s1
///                                   |  |  seat 0 exchanges slice 0, seat 1 slice 1
///   host 1   rank 2   c0 c1        C0 C1      C = c + d       s0  .
///            rank 3   d0 d1                                    . s1      s = A + C
/// ```
pub(super) fn pull(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    slices_in_place(topology, rank, &DIRECT)
}

/// Rounds, messages and elements are those of [`staged_cost`]. A rank reads its slice from `q - 1` ranks.
pub(super) fn pull_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    slices_in_place_cost(topology, n, &DIRECT)
}

/// Like [`pull`], but with halving between hosts. See [`pull_halving_cost`].
pub(super) fn pull_halving(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    slices_in_place(topology, rank, &HALVING)
}

/// Like [`pull_cost`], but between hosts as in [`staged_halving_cost`].
pub(super) fn pull_halving_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    slices_in_place_cost(topology, n, &HALVING)
}

/// The lags of [`staged`] and [`push`].
pub(super) fn lags(topology: &Topology, _rank: Rank, steps: &[Step]) -> Lags {
    lags_of(topology, steps, &DIRECT)
}

/// The lags of [`staged_halving`] and [`push_halving`]. If the number of hosts is no power of two, some hosts take fewer
/// rounds than others, so windows go one after another.
pub(super) fn halving_lags(topology: &Topology, _rank: Rank, steps: &[Step]) -> Lags {
    match topology.ranks_by_host().len().is_power_of_two() {
        true => lags_of(topology, steps, &HALVING),
        false => Lags::NONE,
    }
}

fn lags_of(topology: &Topology, steps: &[Step], between: &BetweenHosts) -> Lags {
    match topology.ranks_by_host().len() {
        1 => Lags::NONE,
        hosts => Lags::by_rounds_between_hosts(steps, (between.rounds)(hosts)),
    }
}

/// The ranks of `rank`'s host that hold the slices of the result of a
/// [`ReduceSlices`](crate::Collective::ReduceSlices): the `i`-th holds block `i` of as many blocks as there are
/// holders. These are the first ranks of the host, as many as the smallest host has.
pub fn slice_holders(topology: &Topology, rank: Rank) -> &[Rank] {
    &topology.neighbours(rank)[..slices(topology.ranks_by_host())]
}

fn through_slots(topology: &Topology, rank: Rank, between: &BetweenHosts) -> Vec<Step> {
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
    steps.extend(sum_of_slice(topology, &seats, Loc::slot, between));
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

fn through_slots_cost(topology: &Topology, n: usize, between: &BetweenHosts) -> Cost {
    let hosts = topology.ranks_by_host();
    let largest = largest(hosts);
    let slice = n.div_ceil(slices(hosts));
    let shared_elements = if largest == 1 { 0 } else { n + (largest - 2) * slice };
    Cost { shared_elements, ..cost(hosts, n, between) }
}

fn in_place(topology: &Topology, rank: Rank, between: &BetweenHosts) -> Vec<Step> {
    let seats = seats_of(topology, rank);
    if topology.world_size == 1 {
        return vec![];
    }
    let mut steps = vec![Step::Post];
    steps.extend(sum_of_slice(topology, &seats, Loc::data, between));
    if let Some(slice) = seats.own_slice() {
        let slice = Loc::data(slice);
        steps.extend(seats.peers().map(|(_, peer)| Step::Copy { dst: slice.of(peer), src: slice }));
    }
    steps.push(Step::Post);
    let writers = seats.peers().filter(|&(seat, _)| seat < seats.slices);
    steps.extend(writers.map(|(_, peer)| Step::Wait { peer, upto: 2 }));
    steps
}

fn slices_in_place(topology: &Topology, rank: Rank, between: &BetweenHosts) -> Vec<Step> {
    let seats = seats_of(topology, rank);
    if topology.world_size == 1 {
        return vec![];
    }
    let mut steps = vec![Step::Post];
    steps.extend(sum_of_slice(topology, &seats, Loc::data, between));
    steps.push(Step::Post);
    let holders = seats.peers().filter(|&(seat, _)| seat < seats.slices);
    steps.extend(holders.map(|(_, peer)| Step::Wait { peer, upto: 2 }));
    steps
}

fn slices_in_place_cost(topology: &Topology, n: usize, between: &BetweenHosts) -> Cost {
    let hosts = topology.ranks_by_host();
    let slice = n.div_ceil(slices(hosts));
    Cost { shared_elements: (largest(hosts) - 1) * slice, ..cost(hosts, n, between) }
}

fn in_place_cost(topology: &Topology, n: usize, between: &BetweenHosts) -> Cost {
    let hosts = topology.ranks_by_host();
    let slice = n.div_ceil(slices(hosts));
    Cost { shared_elements: 2 * (largest(hosts) - 1) * slice, ..cost(hosts, n, between) }
}

/// The part that both forms have in common.
fn cost(hosts: &[Vec<Rank>], n: usize, between: &BetweenHosts) -> Cost {
    let on_host = if largest(hosts) > 1 { 2 } else { 0 };
    let slices = slices(hosts);
    let loads = (0..slices).map(|seat| Span::block(seat, slices)).flat_map(|slice| {
        // The rank of each host that has the slice.
        let loads = (between.loads)(hosts.len(), n, slice).into_iter();
        let len = slice.resolve(n).len();
        loads.zip(hosts).map(move |(load, ranks)| Load {
            combined: load.combined + (ranks.len() - 1) * len,
            ..load
        })
    });
    Cost { rounds: on_host + (between.rounds)(hosts.len()), ..Load::most(loads) }
}

/// Ranks of the largest host.
pub(super) fn largest(hosts: &[Vec<Rank>]) -> usize {
    hosts.iter().map(Vec::len).max().unwrap_or(1)
}

fn seats_of(topology: &Topology, rank: Rank) -> Seats<'_> {
    Seats::of(topology.ranks_by_host(), topology.host_of(rank), rank)
}

/// Sums the rank's slice over all ranks, into its data. A rank without a slice does nothing. `from` says
/// where the contributions of the ranks of the host lie. Messages touch private memory only.
fn sum_of_slice(
    topology: &Topology,
    seats: &Seats<'_>,
    from: fn(Span) -> Loc,
    between: &BetweenHosts,
) -> Vec<Step> {
    let Some(slice) = seats.own_slice() else { return vec![] };
    let hosts = topology.ranks_by_host().len();
    let mut steps = seats.sum_of_group(from(slice), from, Loc::data(slice), hosts == 1);
    let exchange = (between.generate)(&Topology::flat(hosts), seats.group, 0);
    steps.extend(exchange.into_iter().map(|step| {
        let of_slice = |loc: Loc| Loc { span: loc.span.within(slice), ..loc };
        step.moved(|host| seats.counterpart(host), of_slice)
    }));
    steps
}
