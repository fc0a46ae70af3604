//! Algorithms for many hosts are right, and what a rank keeps does not grow with their number.

use std::collections::BTreeSet;
use std::ops::Range;

use drumline_inspect::check;
use drumline_schedule::step::{Rank, Step};
use drumline_schedule::{ALGORITHMS, Algorithm, Borders, Counts, Schedule, SumOrder, Topology};

use crate::{sizes, tried};

const NAMES: [&str; 4] = [
    "hierarchical-ring",
    "hierarchical-ring-push",
    "hierarchical-halving",
    "hierarchical-halving-pull",
];

/// Those that have a block for every rank.
fn rows() -> impl Iterator<Item = &'static Algorithm> + Clone {
    let has_blocks = |row: &&Algorithm| row.collective.has_input() && NAMES.contains(&row.name);
    ALGORITHMS.iter().filter(has_blocks)
}

fn by_placement(topology: Topology) -> Topology {
    topology.with_order(SumOrder::Placement)
}

fn expect_right(topology: &Topology) {
    for row in rows().filter(|row| (row.applies)(topology)) {
        let named = |problem| format!("{row:?}, {:?}: {problem}", topology.ranks_by_host());
        for elements in tried(topology.world_size, vec![0, 1, 5]) {
            if let Err(error) = check::check(row, topology, 0, elements) {
                panic!("{}", named(error));
            }
        }
        let counts: Vec<usize> = (0..topology.world_size).map(|rank| rank * 7 % 5).collect();
        let counts = vec![Counts::ByRank(Borders::new(&counts).unwrap()); counts.len()];
        if let Err(error) = check::check_uneven(row, topology, 0, &counts) {
            panic!("{}", named(error));
        }
    }
}

/// Every number of ranks, spread as evenly as possible, in the order of ranks and dealt out in turn.
#[test]
fn up_to_33_ranks_on_up_to_5_hosts() {
    for hosts in 2..=5 {
        for ranks in sizes(hosts + 1..=33) {
            let mut of_rank: Vec<usize> = (0..ranks).map(|rank| rank * hosts / ranks).collect();
            expect_right(&Topology::placed(of_rank.clone()));
            expect_right(&by_placement(Topology::placed(of_rank.clone())));
            of_rank = (0..ranks).map(|rank| rank % hosts).collect();
            expect_right(&by_placement(Topology::placed(of_rank)));
        }
    }
}

#[test]
fn many_hosts_of_up_to_three_ranks() {
    for hosts in [6, 7, 8, 12, 16, 17] {
        for ranks in [2, 3] {
            expect_right(&by_placement(Topology::hosts(&vec![ranks; hosts])));
        }
        let sizes = |first: usize| (0..hosts).map(move |host| 1 + (host * 5 + first) % 3);
        for first in 0..3 {
            let sizes: Vec<usize> = sizes(first).collect();
            expect_right(&by_placement(Topology::hosts(&sizes)));
        }
        let mut all_but_one = vec![1; hosts];
        all_but_one[hosts / 2] = 3;
        expect_right(&by_placement(Topology::hosts(&all_but_one)));
    }
}

/// All shapes of the tree of hosts.
#[test]
fn any_number_of_hosts_up_to_40() {
    for hosts in sizes(2..=40) {
        expect_right(&Topology::hosts(&vec![2; hosts]));
    }
}

fn peers(topology: &Topology, schedule: &Schedule) -> usize {
    let is_far = |peer: &Rank| topology.host_of(*peer) != topology.host_of(schedule.rank);
    let peers: BTreeSet<Rank> =
        schedule.steps.iter().filter_map(Step::peer).filter(is_far).collect();
    peers.len()
}

#[test]
fn connections_and_scratch_of_a_rank_do_not_grow_with_hosts() {
    for hosts in [2, 3, 5, 17, 33, 64, 100, 129, 1_000, 1_025, 2_047, 2_048] {
        let topology = by_placement(Topology::hosts(&vec![8; hosts]));
        let doublings = hosts.next_power_of_two().ilog2() as usize;
        for row in rows() {
            for host in [0, 1, hosts / 2, hosts - 2, hosts - 1] {
                let schedule = row.schedule(&topology, 8 * host + 3, 0).unwrap();
                let peers = peers(&topology, &schedule);
                assert!(peers <= 2 * doublings + 2, "{}, {hosts} hosts: {peers}", row.name);
                let scratch: usize =
                    schedule.scratch(&Counts::Even(1)).values().map(Range::len).sum();
                let most = if hosts.is_power_of_two() { doublings + 3 } else { 4 * doublings + 4 };
                assert!(scratch <= most, "{}, {hosts} hosts: {scratch}", row.name);
            }
        }
    }
}
