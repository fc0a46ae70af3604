//! What narrow floats send between hosts.

use drumline_schedule::price::ElementKind;
use drumline_schedule::step::Step;
use drumline_schedule::{
    Algorithm, Chooser, Collective, Counts, Rounding, Schedule, Situation, Topology, Why, eligible,
};

const BF16: usize = 2;
const F32: usize = 4;

/// The bytes that each host sends to others in a sum of `elements` elements, which take 2 bytes, or 4 as sums.
fn sent_narrow(topology: &Topology, row: &Algorithm, elements: usize) -> Vec<usize> {
    let schedules = row.narrow_schedules(topology, 0).unwrap();
    sent(topology, &schedules, elements, |wide| if wide { F32 } else { BF16 })
}

fn sent_as_f32(topology: &Topology, row: &Algorithm, elements: usize) -> Vec<usize> {
    sent(topology, &row.schedules(topology, 0).unwrap(), elements, |_| F32)
}

fn sent(
    topology: &Topology,
    schedules: &[Schedule],
    elements: usize,
    width: impl Fn(bool) -> usize,
) -> Vec<usize> {
    let mut hosts = vec![0; topology.ranks_by_host().len()];
    for schedule in schedules {
        for step in &schedule.steps {
            if let Step::Send { src, .. } = step {
                let len = schedule.resolve(*src, &Counts::Even(elements)).len();
                hosts[topology.host_of(schedule.rank)] += len * width(src.is_wide());
            }
        }
    }
    hosts
}

fn row(collective: Collective, name: &str) -> &'static Algorithm {
    Algorithm::find(collective, name).unwrap()
}

/// Sums of hosts go out as `f32`, and as many results come back as `bf16`.
#[test]
fn an_all_reduce_sends_three_quarters_of_what_f32_does() {
    for (hosts, ranks) in [(2, 2), (2, 8), (4, 4), (8, 3)] {
        let world = Topology::hosts(&vec![ranks; hosts]);
        let elements = 10 * hosts * ranks;
        for name in ["hierarchical", "hierarchical-push", "hierarchical-halving"] {
            if (row(Collective::AllReduce, name).applies)(&world) {
                let narrow = sent_narrow(&world, row(Collective::AllReduce, name), elements);
                let wide = sent_as_f32(&world, row(Collective::AllReduce, name), elements);
                assert_eq!(wide, vec![2 * (hosts - 1) * elements * F32 / hosts; hosts]);
                let quarters = narrow.iter().map(|sent| 4 * sent);
                assert!(quarters.eq(wide.iter().map(|sent| 3 * sent)), "{name}: {narrow:?}");
            }
        }
    }
}

/// What a rank brings is no sum.
#[test]
fn hosts_of_one_rank_send_half() {
    for hosts in [2, 3, 8] {
        let world = Topology::hosts(&vec![1; hosts]);
        let hierarchical = row(Collective::AllReduce, "hierarchical");
        let narrow = sent_narrow(&world, hierarchical, 10 * hosts);
        let wide = sent_as_f32(&world, hierarchical, 10 * hosts);
        assert!(narrow.iter().map(|sent| 2 * sent).eq(wide), "{narrow:?}");
    }
    // Beside a larger host, only that host has sums.
    let world = Topology::hosts(&[4, 1]);
    let narrow = sent_narrow(&world, row(Collective::AllReduce, "hierarchical"), 100);
    assert_eq!(narrow, [50 * F32 + 50 * BF16, 100 * BF16]);
}

/// Sums of hosts that are rounded are as narrow as results.
#[test]
fn hosts_that_round_their_sums_send_half() {
    for (hosts, ranks) in [(2, 2), (2, 8), (4, 4), (8, 2)] {
        let world = Topology::hosts(&vec![ranks; hosts]).with_rounding(Rounding::Host);
        let elements = 10 * hosts * ranks;
        for name in ["hierarchical", "hierarchical-push"] {
            let narrow = sent_narrow(&world, row(Collective::AllReduce, name), elements);
            let wide = sent_as_f32(&world, row(Collective::AllReduce, name), elements);
            assert!(narrow.iter().map(|sent| 2 * sent).eq(wide), "{name}: {narrow:?}");
        }
        let scatter = row(Collective::ReduceScatter, "hierarchical");
        let narrow = sent_narrow(&world, scatter, 10);
        assert!(narrow.iter().map(|sent| 2 * sent).eq(sent_as_f32(&world, scatter, 10)));
    }
    let world = Topology::hosts(&[2, 2]).with_rounding(Rounding::Host);
    assert_eq!(sent_narrow(&world, row(Collective::Reduce, "hierarchical"), 10), [0, 10 * BF16]);
}

/// Otherwise the length of the data would decide the bits.
#[test]
fn if_hosts_round_their_sums_no_algorithm_rounds_only_the_result() {
    let bf16 = ElementKind { bytes: BF16, sum_bytes: F32 };
    let f32 = ElementKind { bytes: F32, sum_bytes: F32 };
    let world = Topology::hosts(&[4, 4]).with_rounding(Rounding::Host);
    for collective in [Collective::AllReduce, Collective::Reduce, Collective::ReduceScatter] {
        for (elements, registered) in
            [1, 1 << 14, 1 << 24].map(|n| [(n, false), (n, true)]).concat()
        {
            let of = |kind| Situation {
                long_bytes: Some(1 << 20),
                registered,
                ..Situation::over_links(collective, &world, elements, kind)
            };
            let chosen = Chooser::default().choose(&of(bf16)).unwrap();
            assert!(chosen.sums_apart, "{collective} of {elements}: {}", chosen.name);
            let chosen = Chooser::default().choose(&of(f32)).unwrap();
            assert!(elements > 1 || !chosen.sums_apart || collective != Collective::AllReduce);
        }
    }
    let situation = Situation {
        long_bytes: Some(1 << 20),
        ..Situation::over_links(Collective::AllReduce, &world, 9, bf16)
    };
    let doubling = row(Collective::AllReduce, "hierarchical-doubling");
    assert_eq!(eligible(doubling, &situation), Err(Why::RoundsOnce));
    // On one host nothing travels.
    let one_host = Topology::hosts(&[8]).with_rounding(Rounding::Host);
    let on_one_host = Situation { topology: &one_host, ..situation };
    assert!(!on_one_host.rounds_on_hosts());
    assert!(situation.rounds_on_hosts());
}

/// Only sums of hosts travel in these, and they cannot be narrower.
#[test]
fn a_reduce_and_a_reduce_scatter_send_sums() {
    let world = Topology::hosts(&[2, 2]);
    let scatter = row(Collective::ReduceScatter, "hierarchical");
    assert_eq!(sent_narrow(&world, scatter, 10), [2 * 10 * F32; 2]);
    let reduce = row(Collective::Reduce, "hierarchical");
    assert_eq!(sent_narrow(&world, reduce, 10), [0, 10 * F32]);
    let one_and_two = Topology::hosts(&[2, 1]);
    assert_eq!(sent_narrow(&one_and_two, scatter, 10), [10 * F32, 2 * 10 * BF16]);
}
