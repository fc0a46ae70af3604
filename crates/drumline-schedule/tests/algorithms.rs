//! Every algorithm of the table is right, for every world size up to 64.
#![allow(clippy::unwrap_used, clippy::panic)]

use drumline_schedule::{ALGORITHMS, Algorithm, Collective, MemoryUse, Topology, check};

#[test]
fn all_algorithms_are_right_for_1_to_64_ranks() {
    for algorithm in ALGORITHMS {
        for world_size in 1..=64 {
            for root in roots(algorithm.collective, world_size) {
                for elements in lengths(algorithm.collective, world_size) {
                    expect_right(algorithm, world_size, root, elements);
                }
            }
        }
    }
}

/// The same around a larger power of two, where the shapes of trees and formulas change.
#[test]
fn all_algorithms_are_right_for_larger_worlds() {
    for algorithm in ALGORITHMS {
        for world_size in [96, 127, 128, 129] {
            expect_right(algorithm, world_size, world_size - 1, 3);
        }
    }
}

fn expect_right(algorithm: &Algorithm, world_size: usize, root: usize, elements: usize) {
    let Algorithm { collective, name, .. } = algorithm;
    let topology = topology(algorithm, world_size);
    if let Err(error) = check::check(algorithm, &topology, root, elements) {
        panic!("{collective} {name}, {world_size} ranks, root {root}, n = {elements}: {error}");
    }
}

/// Ranks that are far from one another; or on hosts of two, or all on one host, where the
/// algorithm uses memory that they share.
fn topology(algorithm: &Algorithm, world_size: usize) -> Topology {
    let pairs = Topology::placed((0..world_size).map(|rank| rank / 2));
    match algorithm.memory {
        MemoryUse::Private => Topology::flat(world_size),
        _ if (algorithm.applies)(&pairs) => pairs,
        _ => Topology::hosts(&[world_size]),
    }
}

fn roots(collective: Collective, world_size: usize) -> Vec<usize> {
    match collective {
        Collective::AllReduce
        | Collective::AllGather
        | Collective::ReduceScatter
        | Collective::Barrier => vec![0],
        Collective::Reduce | Collective::Broadcast if world_size <= 17 => (0..world_size).collect(),
        Collective::Reduce | Collective::Broadcast => {
            vec![0, world_size / 2 + 1, world_size - 1]
        }
    }
}

/// Nothing, fewer elements than blocks, as many, and blocks of two sizes.
fn lengths(collective: Collective, world_size: usize) -> Vec<usize> {
    match collective {
        // Blocks are what each rank brings to each, so they all have the same size.
        Collective::AllGather | Collective::ReduceScatter => vec![0, 1, 13],
        _ => {
            // The work grows with the cube of the world size where every rank sums everything.
            let of_a_block = if world_size <= 32 { 12 } else { 2 };
            vec![0, 1, world_size - 1, world_size, of_a_block * world_size + 5]
        }
    }
}

#[test]
fn one_rank_alone_sends_nothing_and_waits_for_nobody() {
    for algorithm in ALGORITHMS {
        let schedule = algorithm.schedule(&Topology::flat(1), 0, 0).unwrap();
        // Its own contribution still has to get into the gathered data.
        let expected = usize::from(algorithm.collective.has_input());
        assert_eq!(schedule.steps.len(), expected, "{schedule}");
    }
}
