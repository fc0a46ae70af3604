//! Scans between hosts: the lowest rank of a host, its *leader*, adds for all ranks of the host.
//!
//! A scan adds in the order of ranks. A *run* is `2^k` ranks of one host, the first of them a multiple of `2^k`. Every
//! tree over ranks `0..m` that reaches beyond a run has the run as a node. So the sums of runs travel, in place of what
//! their ranks bring.

use super::cost::{Cost, doublings};
use super::hierarchical::largest;
use super::hierarchical_gather::{block_in, blocks_in};
use super::scan;
use super::shared::others;
use crate::step::{Loc, Rank, Span, Step};
use crate::topology::Topology;
use crate::tree::Node;

const DATA: Loc = Loc::data(Span::WHOLE);
const SLOT: Loc = Loc::slot(Span::WHOLE);

/// Several hosts, one of them with several ranks. All but the last have the same power of two of consecutive ranks.
pub(super) fn serves_runs(topology: &Topology) -> bool {
    let hosts = topology.ranks_by_host();
    let ranks = hosts[0].len();
    let all_but_last = &hosts[..hosts.len() - 1];
    hosts.len() > 1
        && largest(hosts) > 1
        && ranks.is_power_of_two()
        && all_but_last.iter().all(|host| host.len() == ranks)
        && hosts.concat().is_sorted()
}

/// Leaders add the runs of their host, and send the sums to the leaders of all hosts that have higher ranks. Then a leader
/// adds for each rank of its host what is below that rank.
///
/// ```text
///   host 0   rank 0   a    a + b = A   A -> rank 2     a
///            rank 1   b -> slot                        A
///   host 1   rank 2   c                                A + c
///            rank 3   d -> slot                        A + (c + d)
/// ```
///
/// See [`direct_scan_cost`]. The last rank comes first: then its slot may keep the result of the rank before it. That of the last
/// rank waits in the slot of the leader. So no rank reads its own slot, since two ranks that are alone on a host swap
/// slots.
pub(super) fn direct_scan(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    steps(topology, rank, true, direct)
}

/// 1 round between hosts, and one before and after it on hosts with several ranks. A leader sends one message to each host
/// with higher ranks. It combines runs, and what each rank of its host sums.
pub(super) fn direct_scan_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    direct_cost(topology, true, n)
}

/// Like [`direct_scan`], but without the rank's own data.
pub(super) fn direct_exclusive_scan(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    steps(topology, rank, false, direct)
}

/// That of [`direct_scan`], and one combination less for each rank that gets a sum.
pub(super) fn direct_exclusive_scan_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    direct_cost(topology, false, n)
}

/// The same for many hosts, where each is a run: leaders [double](scan::doubling_scan).
///
/// See [`doubling_scan_cost`].
pub(super) fn doubling_scan(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    steps(topology, rank, true, doubling)
}

/// `ceil(log2 H)` rounds between hosts, and one before and after them on hosts with several ranks. The first leader sends
/// a message in each of them.
pub(super) fn doubling_scan_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    doubling_cost(topology, true, n)
}

/// Like [`doubling_scan`], but without the rank's own data.
pub(super) fn doubling_exclusive_scan(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    steps(topology, rank, false, doubling)
}

/// That of [`doubling_scan`], and one combination less for each rank that gets a sum.
pub(super) fn doubling_exclusive_scan_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    doubling_cost(topology, false, n)
}

/// What the leader of a host does with other leaders.
struct Between {
    steps: Vec<Step>,
    /// The sums of runs of other hosts that it then has: at least those below the highest rank of its host.
    sums: Vec<(Node, Loc)>,
}

fn steps(
    topology: &Topology,
    rank: Rank,
    inclusive: bool,
    between: fn(&Topology, usize) -> Between,
) -> Vec<Step> {
    let ranks = topology.neighbours(rank);
    let leader = ranks[0];
    if rank != leader {
        return follow(topology, rank, inclusive);
    }
    let Between { steps: exchange, sums } = between(topology, topology.host_of(rank));
    let read = ranks[1..].iter().filter(|rank| is_read(topology, **rank, inclusive));
    let mut steps: Vec<Step> = read.map(|&peer| Step::Wait { peer, upto: 1 }).collect();
    steps.extend(exchange);
    for seat in (1..ranks.len()).rev() {
        let own = ranks[..seat + usize::from(inclusive)].iter().enumerate();
        let own = own.map(|(seat, rank)| (Node::leaf(*rank), brought(ranks, seat)));
        let below = sums.iter().copied().filter(|(node, _)| node.lo < ranks[seat]);
        let mut srcs: Vec<(Node, Loc)> = below.chain(own).collect();
        srcs.sort_by_key(|(node, _)| node.lo);
        let next = (seat + 1) % ranks.len();
        let dst = if next == 0 { SLOT } else { SLOT.of(ranks[next]) };
        steps.push(summed(srcs, dst));
    }
    steps.push(Step::Post);
    let mut below: Vec<(Node, Loc)> = sums;
    below.retain(|(node, _)| node.lo < leader);
    below.sort_by_key(|(node, _)| node.lo);
    steps.extend(scan::sum(leader, inclusive, below.into_iter()));
    steps
}

/// A rank that is no leader finishes what the leader has added for it.
fn follow(topology: &Topology, rank: Rank, inclusive: bool) -> Vec<Step> {
    let ranks = topology.neighbours(rank);
    let seat = ranks.partition_point(|other| *other < rank);
    let result = SLOT.of(ranks[(seat + 1) % ranks.len()]);
    let sum = Node::root(rank + usize::from(inclusive));
    let lay_out = Step::Copy { dst: SLOT, src: DATA };
    let mut steps: Vec<Step> =
        is_read(topology, rank, inclusive).then_some(lay_out).into_iter().collect();
    steps.extend([Step::Post, Step::Wait { peer: ranks[0], upto: 1 }]);
    steps.push(match sum.len {
        1 => Step::Copy { dst: DATA, src: result },
        _ => Step::ReduceTree { dsts: vec![DATA], srcs: vec![(sum, result)], finish: true },
    });
    steps
}

/// Whether anybody sums what this rank brings: the last rank is below no other.
fn is_read(topology: &Topology, rank: Rank, inclusive: bool) -> bool {
    inclusive || rank + 1 < topology.world_size
}

/// What the rank on a seat brings, for its leader.
fn brought(ranks: &[Rank], seat: usize) -> Loc {
    if seat == 0 { DATA } else { SLOT.of(ranks[seat]) }
}

fn summed(srcs: Vec<(Node, Loc)>, dst: Loc) -> Step {
    match srcs[..] {
        [(_, src)] => Step::Copy { dst, src },
        _ => Step::ReduceTree { dsts: vec![dst], srcs, finish: false },
    }
}

fn direct(topology: &Topology, host: usize) -> Between {
    let hosts = topology.ranks_by_host();
    let (ranks, own) = (&hosts[host], runs(&hosts[host]));
    let others = || others(hosts.len(), host);
    // A leader that is alone on its host has one run, its own data.
    let of_own = |count| if ranks.len() == 1 { DATA } else { blocks_in(host, count) };
    let mut steps = vec![];
    if ranks.len() > 1 {
        let most = others().map(|other| below(&own, &hosts[other])).max().unwrap_or(0);
        for (index, run) in own[..most].iter().enumerate() {
            let seats = ranks.iter().enumerate();
            let members = seats.filter(|(_, rank)| (run.lo..run.lo + run.len).contains(*rank));
            let srcs = members.map(|(seat, rank)| (Node::leaf(*rank), brought(ranks, seat)));
            steps.push(summed(srcs.collect(), block_in(host, index)));
        }
    }
    let to = others().map(|other| (other, below(&own, &hosts[other])));
    let to = to.filter(|(_, count)| *count > 0);
    steps.extend(to.map(|(other, count)| Step::Send { to: hosts[other][0], src: of_own(count) }));
    let mut sums = vec![];
    for other in others() {
        let runs = runs(&hosts[other]);
        let count = below(&runs, ranks);
        if count > 0 {
            steps.push(Step::Recv { from: hosts[other][0], dst: blocks_in(other, count) });
        }
        let runs = runs.into_iter().take(count).enumerate();
        sums.extend(runs.map(|(index, run)| (run, block_in(other, index))));
    }
    Between { steps, sums }
}

fn direct_cost(topology: &Topology, inclusive: bool, n: usize) -> Cost {
    let hosts = topology.ranks_by_host();
    let runs: Vec<Vec<Node>> = hosts.iter().map(|ranks| runs(ranks)).collect();
    let collects = |host: usize| {
        usize::from(hosts[host][1..].iter().any(|rank| is_read(topology, *rank, inclusive)))
    };
    let loads = (0..hosts.len()).map(|host| {
        let (ranks, own) = (&hosts[host], &runs[host]);
        let mut most = 0;
        let mut load = Load::default();
        let mut arrival = collects(host);
        let mut known: Vec<Node> = vec![];
        for other in others(hosts.len(), host) {
            let sent = below(own, &hosts[other]);
            most = most.max(sent);
            load.messages += usize::from(sent > 0);
            load.elements += sent;
            let got = &runs[other][..below(&runs[other], ranks)];
            if !got.is_empty() {
                arrival = arrival.max(collects(other) + 1);
            }
            known.extend(got);
        }
        let sent = own[..most].iter().filter(|_| ranks.len() > 1);
        load.combined = sent.clone().map(|run| run.len - 1).sum();
        load.shared = sent.map(|run| run.len - usize::from(run.lo == ranks[0])).sum();
        let known = |rank: Rank| known.iter().filter(|run| run.lo < rank).count();
        load.results(ranks, inclusive, known);
        load.rounds = arrival + usize::from(ranks.len() > 1);
        load
    });
    Load::most(loads, n)
}

fn doubling(topology: &Topology, host: usize) -> Between {
    let hosts = topology.ranks_by_host();
    let ranks = &hosts[host];
    // Beside the scratch of the exchange.
    let sum = Loc::scratch(1 + doublings(hosts.len()), Span::WHOLE);
    let mut steps = vec![];
    if ranks.len() > 1 && scan::has_use(hosts.len(), host, 1) {
        let srcs = ranks.iter().enumerate();
        let srcs = srcs.map(|(seat, rank)| (Node::leaf(*rank), brought(ranks, seat)));
        steps.push(summed(srcs.collect(), sum));
    }
    let own = if ranks.len() == 1 { DATA } else { sum };
    let (exchange, kept) = scan::climb(hosts.len(), host, own);
    steps.extend(exchange.into_iter().map(|step| step.moved(|host| hosts[host][0], |loc| loc)));
    let of_ranks = |node: Node| Node { lo: hosts[node.lo][0], len: node.len * hosts[0].len() };
    let sums = kept.into_iter().map(|(node, loc)| (of_ranks(node), loc)).collect();
    Between { steps, sums }
}

fn doubling_cost(topology: &Topology, inclusive: bool, n: usize) -> Cost {
    let hosts = topology.ranks_by_host();
    let rounds = doublings(hosts.len());
    let before = usize::from(hosts[0].len() > 1);
    let loads = (0..hosts.len()).map(|host| {
        let ranks = &hosts[host];
        let mut load = Load::default();
        if scan::has_use(hosts.len(), host, 1) {
            load.combined = ranks.len() - 1;
            load.shared = ranks.len() - 1;
        }
        load.combined += scan::joins(hosts.len(), host);
        load.results(ranks, inclusive, |_| host.count_ones() as usize);
        // The last round serves the hosts of its right block.
        let reached = if host >> (rounds - 1) == 1 { rounds } else { rounds - 1 };
        load.rounds = before + reached + usize::from(ranks.len() > 1);
        load
    });
    let most = Load::most(loads, n);
    Cost { messages: rounds, elements: rounds * n, ..most }
}

/// What a leader does, in lengths of the data.
#[derive(Default)]
struct Load {
    rounds: usize,
    messages: usize,
    elements: usize,
    combined: usize,
    shared: usize,
}

impl Load {
    /// Adds the sums for the ranks of the host. `known` counts the runs of other hosts below a rank.
    fn results(&mut self, ranks: &[Rank], inclusive: bool, known: impl Fn(Rank) -> usize) {
        let own = usize::from(inclusive);
        for (seat, rank) in ranks.iter().enumerate() {
            self.combined += (known(*rank) + seat + own).saturating_sub(1);
            if seat > 0 {
                // It reads slots, and writes the result to one; that of the last rank to its own.
                self.shared += seat - 1 + own + usize::from(seat + 1 < ranks.len());
            }
        }
    }

    /// The most that a rank does. The other ranks read their result.
    fn most(loads: impl Iterator<Item = Load>, n: usize) -> Cost {
        let none = Cost { shared_elements: n, ..Cost::default() };
        loads.fold(none, |cost, load| Cost {
            rounds: cost.rounds.max(load.rounds),
            messages: cost.messages.max(load.messages),
            elements: cost.elements.max(load.elements * n),
            combined: cost.combined.max(load.combined * n),
            shared_elements: cost.shared_elements.max(load.shared * n),
        })
    }
}

/// The fewest runs that the ranks of a host form.
fn runs(ranks: &[Rank]) -> Vec<Node> {
    let mut runs = vec![];
    let mut rest = ranks;
    while let Some(&lo) = rest.first() {
        let is_run = |len: usize| {
            lo % len == 0 && rest.get(len - 1).is_some_and(|last| *last == lo + len - 1)
        };
        let lens = (0..=rest.len().ilog2()).rev().map(|log2| 1 << log2);
        let len = lens.into_iter().find(|len| is_run(*len)).unwrap_or(1);
        runs.push(Node { lo, len });
        rest = &rest[len..];
    }
    runs
}

/// How many of these runs are below the highest rank of another host.
fn below(runs: &[Node], ranks: &[Rank]) -> usize {
    let highest = ranks.last().copied().unwrap_or(0);
    runs.iter().take_while(|run| run.lo < highest).count()
}
