//! Algorithms that add on each host first are right for every placement that they serve.

use drumline_inspect::check;
use drumline_schedule::{
    ALGORITHMS, Algorithm, Collective, Rounding, SumOrder, Topology, algorithm,
};

use crate::{sizes, tried};

#[test]
fn hierarchies_are_right_for_all_equal_hosts_of_up_to_64_ranks() {
    // Another test checks all algorithms on hosts of two ranks. With hosts of one rank this is direct
    // exchange, with more clocks.
    for (ranks, most) in [(1, 20), (4, 16), (8, 8)] {
        for world_size in sizes((1..=most).map(|hosts| ranks * hosts)) {
            expect_right(&Topology::hosts(&vec![ranks; world_size / ranks]));
        }
    }
}

/// The last host of a job is often not full.
#[test]
fn hierarchies_are_right_with_a_short_last_host() {
    for (ranks, last) in [(2, 1), (4, 1), (4, 3), (8, 1), (8, 5)] {
        for hosts in [1, 2, 3, 4, 6] {
            let sizes: Vec<usize> = vec![ranks; hosts].into_iter().chain([last]).collect();
            expect_right(&Topology::hosts(&sizes));
        }
    }
}

#[test]
fn hierarchies_are_right_for_any_placement_that_they_serve() {
    let expect_right = |topology: Topology| {
        // Some serve any placement, and others any that sums follow.
        if topology.ranks_by_host().len() > 1 {
            expect_right(&topology);
        }
        expect_right(&topology.with_order(SumOrder::Placement));
    };
    for sizes in [&[3][..], &[3, 3], &[6, 6, 6], &[1, 2, 3], &[5, 1, 7, 2], &[2, 9]] {
        expect_right(Topology::hosts(sizes));
    }
    for (world_size, hosts) in [(4, 2), (9, 3), (10, 4), (24, 3), (64, 8)] {
        expect_right(Topology::placed((0..world_size).map(|rank| rank % hosts)));
    }
}

/// The checker expects sums of rounded sums of hosts then.
#[test]
fn hosts_may_round_their_sums() {
    let worlds = [&[2, 2][..], &[2, 1], &[4, 4, 3], &[8, 8, 8, 8, 8], &[2, 2, 2, 2, 2, 2, 1]];
    for world in worlds.into_iter().map(Topology::hosts) {
        expect_right(&world.clone().with_rounding(Rounding::Host));
        let row = Algorithm::find(Collective::AllReduce, "hierarchical").unwrap();
        // It rounds only the result.
        let once = row.narrow_schedules(&world, 0).unwrap();
        let rounding = world.clone().with_rounding(Rounding::Host);
        assert!(check::check_narrow_schedules(&world, &once, 9).is_ok());
        let error = check::check_narrow_schedules(&rounding, &once, 9).unwrap_err().to_string();
        assert!(error.contains("round("), "{error}");
    }
    for sizes in [&[3, 3][..], &[1, 2, 3]] {
        let world = Topology::hosts(sizes).with_order(SumOrder::Placement);
        expect_right(&world.with_rounding(Rounding::Host));
    }
}

/// Here the ranks of a host are not adjacent in the tree of sums.
#[test]
fn placements_that_the_order_forbids_are_refused() {
    let dealt = Topology::placed([0, 1, 0, 1]);
    for algorithm in hierarchies().filter(|row| row.collective.reduces()) {
        let error = algorithm.schedule(&dealt, 0, 0).unwrap_err().to_string();
        assert!(error.contains("needs hosts whose ranks are nodes"), "{error}");
        assert!(algorithm.schedule(&Topology::hosts(&[3, 3]), 0, 0).is_err());
    }
}

/// Algorithms by memory nodes serve hosts whose memory nodes are nodes of the tree.
#[test]
fn nodes_are_right_for_all_sizes_that_they_serve() {
    let all_reduces = || ALGORITHMS.iter().filter(|row| row.collective == Collective::AllReduce);
    let by_nodes = || all_reduces().filter(|row| row.name.starts_with("shm-nodes"));
    assert_eq!(by_nodes().count(), 2);
    let mut served = 0;
    for sizes in [&[2, 2][..], &[2, 2, 2], &[4, 4, 2], &[4, 3], &[8, 8], &[8, 8, 8, 5], &[16, 16]] {
        let nodes = sizes.iter().enumerate();
        let nodes = nodes.flat_map(|(node, &ranks)| std::iter::repeat_n(Some(node), ranks));
        let world = Topology::hosts(&[sizes.iter().sum()]).with_nodes(nodes);
        for (row, elements) in by_nodes().flat_map(|row| [0, 1, 7, 500].map(|n| (row, n))) {
            served += 1;
            if let Err(error) = check::check(row, &world, 0, elements) {
                panic!("{}, {sizes:?}, n = {elements}: {error}", row.name);
            }
        }
    }
    assert_eq!(served, 7 * 2 * 4);
    for nodes in [&[0, 1, 0, 1][..], &[0, 0, 0, 1, 1, 1], &[0, 0, 1], &[0, 0, 0, 0]] {
        let world = Topology::hosts(&[nodes.len()]).with_nodes(nodes.iter().map(|&it| Some(it)));
        for row in by_nodes() {
            let error = row.schedule(&world, 0, 0).unwrap_err().to_string();
            assert!(error.contains("needs several memory nodes"), "{error}");
        }
    }
}

/// An algorithm that says that it serves a topology keeps the order of sums of that topology.
#[test]
fn algorithms_know_which_topologies_they_serve() {
    let placements = [&[0, 1, 0, 1][..], &[0, 0, 1, 1, 1], &[0, 0, 0, 1, 1, 1], &[0, 0, 1, 1, 2]];
    for algorithm in ALGORITHMS {
        for hosts in placements {
            for order in [SumOrder::Rank, SumOrder::Placement] {
                let world = Topology::placed(hosts).with_order(order);
                if let Err(error) = check::check(algorithm, &world, 1, 17) {
                    let refused = !(algorithm.applies)(&world);
                    let Algorithm { collective, name, .. } = algorithm;
                    assert!(refused, "{collective} {name}, {hosts:?} by {order:?}: {error}");
                }
            }
        }
    }
}

/// The checker refuses sums by rank where the topology asks for sums by placement, and conversely.
#[test]
fn the_order_of_the_topology_is_what_is_checked() {
    let dealt = Topology::placed([0, 1, 0, 1]);
    let binomial = Algorithm::find(Collective::AllReduce, "binomial").unwrap();
    for (algorithm, order) in hierarchies()
        .filter(|row| row.collective.reduces())
        .map(|algorithm| (algorithm, SumOrder::Rank))
        .chain([(binomial, SumOrder::Placement)])
    {
        let reckless = Algorithm { applies: algorithm::any, ..*algorithm };
        let error = check::check(&reckless, &dealt.clone().with_order(order), 0, 9).unwrap_err();
        assert!(matches!(error, check::CheckError::Result { .. }), "{error}");
    }
}

fn hierarchies() -> impl Iterator<Item = &'static Algorithm> + Clone {
    ALGORITHMS.iter().filter(|algorithm| algorithm.name.starts_with("hierarchical"))
}

fn expect_right(topology: &Topology) {
    let p = topology.world_size;
    let serving = hierarchies().filter(|algorithm| (algorithm.applies)(topology));
    assert!(serving.clone().count() >= 2, "{topology:?}");
    for algorithm in serving {
        // As root a rank that leads its host, one in the middle, and the last one.
        let roots = if algorithm.collective.has_root() { vec![0, p / 2, p - 1] } else { vec![0] };
        let roots = tried(p, roots);
        // No algorithm cuts a block.
        let cuts = !algorithm.collective.has_input();
        let lengths = match cuts {
            false => vec![0, 1, 5],
            true => vec![0, 1, p - 1, if p <= 32 { 12 * p + 5 } else { 2 * p + 5 }],
        };
        let lengths = tried(p, lengths);
        for (root, &elements) in roots.iter().flat_map(|root| lengths.iter().map(|n| (*root, n))) {
            if let Err(error) = check::check(algorithm, topology, root, elements) {
                let (Algorithm { collective, name, .. }, hosts) =
                    (algorithm, topology.ranks_by_host());
                panic!("{collective} {name}, {hosts:?}, root {root}, n = {elements}: {error}");
            }
        }
    }
}
