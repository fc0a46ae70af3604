//! Every algorithm of the table is right, for every world size up to 64 (see [`sizes`]).

use drumline_inspect::check::{self, CheckError, Rule};
use drumline_schedule::step::Step;
use drumline_schedule::{
    ALGORITHMS, Algorithm, Borders, Collective, Counts, MemoryUse, Schedule, Topology, algorithm,
};

use crate::{sizes, tried};

/// One test for each collective, and two for all-reduce, so that they run side by side.
macro_rules! right_for_up_to_64_ranks {
    ($($name:ident: $collective:ident, $memory:pat,)*) => {
        $(#[test]
        fn $name() {
            let rows = rows(Collective::$collective);
            for algorithm in rows.filter(|row| matches!(row.memory, $memory)) {
                for world_size in served(algorithm, sizes(1..=64)) {
                    for root in roots(algorithm.collective, world_size) {
                        for elements in lengths(algorithm.collective, world_size) {
                            expect_right(algorithm, world_size, root, elements);
                        }
                    }
                }
            }
        })*
    };
}

right_for_up_to_64_ranks! {
    all_reduce_over_links_is_right_for_up_to_64_ranks: AllReduce, MemoryUse::Private,
    all_reduce_in_shared_memory_is_right_for_up_to_64_ranks: AllReduce,
        MemoryUse::Staged | MemoryUse::Registered,
    reduce_is_right_for_up_to_64_ranks: Reduce, _,
    broadcast_is_right_for_up_to_64_ranks: Broadcast, _,
    all_gather_is_right_for_up_to_64_ranks: AllGather, _,
    reduce_scatter_is_right_for_up_to_64_ranks: ReduceScatter, _,
    barrier_is_right_for_up_to_64_ranks: Barrier, _,
    monitored_barrier_is_right_for_up_to_64_ranks: MonitoredBarrier, _,
    gather_is_right_for_up_to_64_ranks: Gather, _,
    scatter_is_right_for_up_to_64_ranks: Scatter, _,
    all_to_all_is_right_for_up_to_64_ranks: AllToAll, _,
}

/// Lengths for every rank, or for every pair of ranks: random lengths, some empty blocks, or all but one
/// block empty.
#[test]
fn uneven_blocks_are_served_for_up_to_64_ranks() {
    let mut random = 0x9e37_79b9_u64;
    let mut next = move |below: usize| {
        // Knuth's linear congruential generator; its high bits are good enough for lengths.
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (random >> 33) as usize % below
    };
    for algorithm in ALGORITHMS.iter().filter(|row| row.uneven) {
        for world_size in served(algorithm, sizes(1..=64)) {
            let only = next(world_size);
            let root = next(world_size);
            let mut row = |kind: usize| -> Vec<usize> {
                let len = |rank: usize, next: &mut dyn FnMut(usize) -> usize| match kind {
                    0 => next(6),
                    1 => next(2) * next(9),
                    _ => usize::from(rank == only) * 7,
                };
                (0..world_size).map(|rank| len(rank, &mut next)).collect()
            };
            for kind in 0..3 {
                let counts = match algorithm.collective {
                    Collective::AllToAll => by_pair((0..world_size).map(|_| row(kind)).collect()),
                    _ => vec![Counts::ByRank(Borders::new(&row(kind)).unwrap()); world_size],
                };
                let topology = topology(algorithm, world_size);
                if let Err(error) = check::check_uneven(algorithm, &topology, root, &counts) {
                    let Algorithm { collective, name, .. } = algorithm;
                    panic!("{collective} {name}, root {root}, {counts:?}: {error}");
                }
            }
        }
    }
}

/// The counts of each rank when `matrix[i][j]` elements go from rank `i` to rank `j`.
fn by_pair(matrix: Vec<Vec<usize>>) -> Vec<Counts> {
    let borders = |counts: Vec<usize>| Borders::new(&counts).unwrap();
    let of_rank = |rank: usize| Counts::Own {
        sent: borders(matrix[rank].clone()),
        received: borders(matrix.iter().map(|row| row[rank]).collect()),
    };
    (0..matrix.len()).map(of_rank).collect()
}

/// The checker refuses an algorithm that cuts blocks but claims to serve uneven ones.
#[test]
fn uneven_blocks_are_refused_by_algorithms_that_cut_them() {
    let two = vec![Counts::ByRank(Borders::new(&[3, 4]).unwrap()); 2];
    for algorithm in ALGORITHMS.iter().filter(|row| !row.uneven) {
        let reckless = Algorithm { applies: algorithm::any, ..*algorithm };
        let refused = check::check_uneven(&reckless, &Topology::hosts(&[2]), 0, &two);
        assert_eq!(refused, Err(CheckError::NotUneven));
    }
    let scatter = Algorithm::find(Collective::Scatter, "binomial").unwrap();
    let reckless = Algorithm { uneven: true, ..*scatter };
    let error = check::check(&reckless, &Topology::flat(5), 0, 10);
    assert!(matches!(error, Err(CheckError::Form { rule: Rule::PartOfBlock, .. })), "{error:?}");
}

/// The same around a larger power of two, where the shapes of trees and formulas change.
#[test]
fn all_algorithms_are_right_for_larger_worlds() {
    for algorithm in ALGORITHMS {
        for world_size in served(algorithm, sizes([96, 127, 128, 129])) {
            expect_right(algorithm, world_size, world_size - 1, 3);
        }
    }
}

/// The schedules of all ranks together may send no more than this many messages: beyond it the
/// checker takes long. It stops direct exchange, which is the same for all world sizes, at 256.
const MANY_MESSAGES: usize = 1 << 17;

#[test]
#[cfg_attr(not(feature = "nightly"), ignore = "takes a minute: --features nightly")]
fn all_algorithms_are_right_for_powers_of_two_up_to_1024() {
    for algorithm in ALGORITHMS.iter().filter(|row| row.memory == MemoryUse::Private) {
        for world_size in [256, 512, 1024] {
            let topology = Topology::flat(world_size);
            let messages = world_size * (algorithm.cost)(&topology, 0, 1).messages;
            if (algorithm.applies)(&topology) && messages <= MANY_MESSAGES {
                expect_right(algorithm, world_size, 0, 2);
            }
        }
    }
    // With elements for every rank.
    let halving = Algorithm::find(Collective::AllReduce, "halving").unwrap();
    for world_size in [256, 512, 1024] {
        expect_right(halving, world_size, 0, world_size + 3);
    }
}

/// In algorithms that say so, partial sums do travel. Every check proves that in all others none does.
#[test]
fn partial_sums_travel_where_it_says_so() {
    for algorithm in ALGORITHMS.iter().filter(|row| row.partial_sums_travel) {
        let denied = Algorithm { partial_sums_travel: false, ..*algorithm };
        let error = check::check(&denied, &topology(algorithm, 6), 0, 10);
        assert!(matches!(error, Err(CheckError::PartialSum { .. })), "{denied:?}: {error:?}");
    }
}

/// A rank generates its own steps without those of other ranks: these worlds are too large for that. It sends
/// to a rank what that rank expects.
#[test]
fn schedules_of_huge_worlds_cost_their_own_steps() {
    for world_size in [10_000, 16_383, 16_384] {
        let topology = Topology::flat(world_size);
        for name in ["halving", "doubling"] {
            let algorithm = Algorithm::find(Collective::AllReduce, name).unwrap();
            let cost = (algorithm.cost)(&topology, 0, 1 << 20);
            for rank in [0, 5_000, world_size - 1] {
                let schedule = algorithm.schedule(&topology, rank, 0).unwrap();
                let (messages, elements) = schedule.sent(&Counts::Even(1 << 20));
                assert!(messages <= cost.messages && elements <= cost.elements, "{cost}");
                assert!(schedule.steps.len() <= 5 * cost.messages);

                let is_send = |step: &&Step| matches!(step, Step::Send { .. });
                let last = schedule.steps.iter().rev().find(is_send).unwrap();
                let peer = last.peer().unwrap();
                let theirs = algorithm.schedule(&topology, peer, 0).unwrap();
                let sent = lengths_between(
                    &schedule,
                    |step| matches!(step, Step::Send { to, .. } if *to == peer),
                );
                let expected = lengths_between(&theirs, |step| {
                    !matches!(step, Step::Send { .. } | Step::Flush { .. })
                        && step.peer() == Some(rank)
                });
                assert!(!sent.is_empty());
                assert_eq!(sent, expected, "{name}: from {rank} to {peer}");
            }
        }
    }
}

/// The lengths of the chosen messages, in order, for a million elements.
fn lengths_between(schedule: &Schedule, chosen: impl Fn(&Step) -> bool) -> Vec<usize> {
    let steps = schedule.steps.iter().filter(|step| chosen(step));
    let place = |step: &Step| step.writes().chain(step.reads()).next().unwrap();
    steps.map(|step| schedule.resolve(place(step), &Counts::Even(1 << 20)).len()).collect()
}

fn rows(collective: Collective) -> impl Iterator<Item = &'static Algorithm> {
    ALGORITHMS.iter().filter(move |row| row.collective == collective)
}

fn expect_right(algorithm: &Algorithm, world_size: usize, root: usize, elements: usize) {
    let Algorithm { collective, name, .. } = algorithm;
    let topology = topology(algorithm, world_size);
    if let Err(error) = check::check(algorithm, &topology, root, elements) {
        panic!("{collective} {name}, {world_size} ranks, root {root}, n = {elements}: {error}");
    }
}

/// The world sizes for which [`topology`] finds a topology that the algorithm serves.
fn served(
    algorithm: &Algorithm,
    world_sizes: impl IntoIterator<Item = usize>,
) -> impl Iterator<Item = usize> {
    let worlds = world_sizes.into_iter();
    worlds.filter(|&world_size| (algorithm.applies)(&topology(algorithm, world_size)))
}

/// One rank on each host; or, for algorithms in shared memory, hosts of two ranks, or one host, with or
/// without memory nodes.
fn topology(algorithm: &Algorithm, world_size: usize) -> Topology {
    if algorithm.memory == MemoryUse::Private {
        return Topology::flat(world_size);
    }
    let pairs = Topology::placed((0..world_size).map(|rank| rank / 2));
    let one_host = Topology::hosts(&[world_size]);
    let nodes_of =
        |ranks: usize| one_host.clone().with_nodes((0..world_size).map(|rank| Some(rank / ranks)));
    let simpler = [pairs, one_host.clone(), nodes_of(2), nodes_of(4)];
    simpler.into_iter().find(|world| (algorithm.applies)(world)).unwrap_or(nodes_of(8))
}

fn roots(collective: Collective, world_size: usize) -> Vec<usize> {
    match collective.has_root() {
        false => vec![0],
        true if world_size <= 17 => (0..world_size).collect(),
        true => tried(world_size, vec![0, world_size / 2 + 1, world_size - 1]),
    }
}

/// No elements, fewer elements than blocks, as many as blocks, and blocks of two lengths. Collectives with a
/// block for every rank need fewer lengths, because no algorithm cuts a block.
fn lengths(collective: Collective, world_size: usize) -> Vec<usize> {
    let all = match collective {
        Collective::Barrier | Collective::MonitoredBarrier => vec![0],
        // A block for every rank.
        collective if collective.has_input() => vec![0, 1, 5],
        _ => {
            // Where every rank computes the whole sum, work grows with the cube of the world size.
            let of_a_block = if world_size <= 32 { 5 } else { 2 };
            vec![0, 1, world_size - 1, world_size, of_a_block * world_size + 3]
        }
    };
    tried(world_size, all)
}

#[test]
fn one_rank_alone_sends_nothing_and_waits_for_nobody() {
    let alone = Topology::flat(1);
    for algorithm in ALGORITHMS.iter().filter(|row| (row.applies)(&alone)) {
        let schedule = algorithm.schedule(&alone, 0, 0).unwrap();
        // It still copies its own contribution to the data.
        let expected = usize::from(algorithm.collective.has_input());
        assert_eq!(schedule.steps.len(), expected, "{schedule}");
    }
}
