//! Replays agree with the formulas, and share the resources of hosts.

use drumline_inspect::replay::{
    Cluster, Method, Outcome, Workload, line_bound, replay, replay_in_a_row,
};
use drumline_schedule::price::{ElementKind, Link, PriceList, Rate};
use drumline_schedule::{ALGORITHMS, Algorithm, Collective, Cost, MemoryUse, Topology};
use proptest::prelude::*;

const F32: ElementKind = ElementKind { bytes: 4, sum_bytes: 4 };

/// All prices are 0.
fn free() -> PriceList {
    let mut list = PriceList::default();
    for name in PriceList::names() {
        list.set(name, 0);
    }
    list
}

fn time(cluster: &Cluster, algorithm: &'static Algorithm, elements: usize) -> Outcome {
    replay(cluster, &Workload { algorithm, root: 0, elements, kind: F32 }).unwrap()
}

fn find(collective: Collective, name: &str) -> &'static Algorithm {
    Algorithm::find(collective, name).unwrap()
}

/// Rounds, bytes on the line and bytes combined, as the formulas of the algorithms say.
#[test]
fn where_nothing_is_shared_a_replay_is_the_formula() {
    let prices = PriceList {
        far: Link { round_ps: 5_000_000, message_ps: 0, byte: Rate { cached_fs: 0, memory_fs: 0 } },
        nic_byte_fs: 300_000,
        combine: Rate { cached_fs: 100_000, memory_fs: 100_000 },
        ..free()
    };
    let mut seen = 0;
    for row in ALGORITHMS.iter().filter(|row| row.memory == MemoryUse::Private) {
        for ranks in [2, 4, 8, 16, 64] {
            let topology = Topology::flat(ranks);
            let elements = 64 * 50;
            let cluster = Cluster::new(topology.clone(), prices.clone());
            let cost = (row.cost)(&topology, 0, elements);
            let outcome = time(&cluster, row, elements);
            // A replay prices each further input of a sum as one read; the formula prices it as a pair.
            let combined = match row.name {
                "direct" | "gather" => cost.combined * ranks / (2 * (ranks - 1)),
                _ => cost.combined,
            };
            let formula = prices.links(&topology).of(Cost { combined, ..cost }, 4) as u64;
            let what = format!("{} {}, {ranks} ranks", row.collective, row.name);
            assert_eq!(outcome.rounds, cost.rounds, "{what}");
            assert_eq!(outcome.line_bytes, 4 * cost.elements as u64, "{what}");
            // Elsewhere no single rank is the busiest in every round, so the formula is too low.
            let symmetric = ["doubling", "halving", "direct", "gather", "bruck", "dissemination"];
            if symmetric.contains(&row.name) && !row.collective.has_root() {
                assert_eq!(outcome.time_ps, formula, "{what}");
                seen += 1;
            }
        }
    }
    assert_eq!(seen, 5 * 11);
}

/// With one message a round, the work for the message comes before and after it. The work for bytes overlaps
/// with their travel.
#[test]
fn work_for_messages_and_their_bytes_is_the_formulas() {
    let each = |fs| Rate { cached_fs: fs, memory_fs: fs };
    let messages = Link { round_ps: 5_000_000, message_ps: 2_000_000, byte: each(0) };
    let bytes = Link { round_ps: 0, message_ps: 0, byte: each(300_000) };
    for (name, far) in [("doubling", messages), ("halving", messages), ("doubling", bytes)] {
        for ranks in [2, 8, 64] {
            let prices = PriceList { far, ..free() };
            let topology = Topology::flat(ranks);
            let row = find(Collective::AllReduce, name);
            let cost = (row.cost)(&topology, 0, 6_400);
            let formula = prices.links(&topology).of(cost, 4) as u64;
            let cluster = Cluster::new(topology, prices);
            assert_eq!(time(&cluster, row, 6_400).time_ps, formula, "{name}, {ranks} ranks");
        }
    }
}

#[test]
fn rounds_through_shared_memory_are_those_of_the_formula() {
    let prices = PriceList { post_ps: 100, far: Link { round_ps: 100, ..free().far }, ..free() };
    for hosts in [&[2][..], &[5], &[8], &[4, 4], &[2, 2, 2]] {
        let topology = Topology::hosts(hosts);
        let serve = ALGORITHMS.iter().filter(|row| row.memory != MemoryUse::Private);
        for row in serve.filter(|row| (row.applies)(&topology)) {
            let cluster = Cluster::new(topology.clone(), prices.clone());
            let outcome = time(&cluster, row, 100);
            let rounds = (row.cost)(&topology, 0, 100).rounds;
            let what = format!("{} {}, {hosts:?}", row.collective, row.name);
            assert_eq!((outcome.rounds, outcome.time_ps), (rounds, 100 * rounds as u64), "{what}");
        }
    }
}

/// Only the lines between hosts have a price, and all ranks of a host share one line.
#[test]
fn ranks_share_the_line_of_their_host() {
    let prices = PriceList { nic_byte_fs: 1_000, ..free() };
    for hosts in [&[1, 1][..], &[4, 4], &[2, 2, 2]] {
        let topology = Topology::hosts(hosts);
        let cluster = Cluster::new(topology.clone(), prices.clone());
        let of = |collective, name| time(&cluster, find(collective, name), 600);
        for (collective, name) in [
            (Collective::AllToAll, "direct"),
            (Collective::AllReduce, "hierarchical"),
            (Collective::AllReduce, "hierarchical-push"),
        ] {
            let outcome = of(collective, name);
            let bound = line_bound(collective, &topology, 2_400);
            assert_eq!(outcome.line_bytes, bound, "{collective} {name} {hosts:?}");
            assert_eq!(outcome.time_ps, bound, "{collective} {name} {hosts:?}");
        }
    }
    let of = |hosts: &[usize]| {
        let cluster = Cluster::new(Topology::hosts(hosts), prices.clone());
        time(&cluster, find(Collective::AllGather, "direct"), 100).time_ps
    };
    // Each host sends its blocks to each rank of other hosts.
    assert_eq!([of(&[1; 8]), of(&[2; 4]), of(&[4; 2])], [7 * 400, 2 * 6 * 400, 4 * 4 * 400]);
}

#[test]
fn ranks_share_the_cores_and_the_memory_of_their_host() {
    let copy = Rate { cached_fs: 1_000, memory_fs: 1_000 };
    let prices = PriceList { copy, ..free() };
    let row = find(Collective::AllGather, "shm");
    let of = |cores_per_host, prices: &PriceList| {
        let cluster = Cluster::new(Topology::hosts(&[4]), prices.clone());
        time(&Cluster { cores_per_host, ..cluster }, row, 100).time_ps
    };
    let alone = of(4, &prices);
    assert!(alone > 0);
    assert_eq!([of(8, &prices), of(2, &prices), of(1, &prices)], [alone, 2 * alone, 4 * alone]);
    // All data comes from memory and goes to memory, for one rank after another.
    let narrow = PriceList { memory_byte_fs: 1_000, ..free() };
    assert!(of(4, &narrow) >= 4 * 4 * 400, "{}", of(4, &narrow));
}

/// In calls in a row, a core changes ranks only when it must: it continues with its rank until that rank
/// waits.
#[test]
fn a_core_changes_ranks_as_seldom_as_it_can() {
    let prices = PriceList { switch_ps: 1_000, ..free() };
    let row = find(Collective::AllReduce, "shm-oneshot");
    let of = |ranks, cores_per_host| {
        let cluster = Cluster::new(Topology::hosts(&[ranks]), prices.clone());
        let workload = Workload { algorithm: row, root: 0, elements: 2, kind: F32 };
        replay_in_a_row(&Cluster { cores_per_host, ..cluster }, &workload).unwrap().time_ps
    };
    // All ranks post, and then all look. The rank that looks last may post for the next call.
    assert_eq!([of(2, 2), of(2, 1), of(4, 2), of(3, 2)], [0, 1_000, 1_000, 1_000]);
    assert_eq!([of(4, 1), of(8, 1), of(8, 4)], [3_000, 7_000, 1_000]);
    // Two cores that change at different times wait for each other now and then.
    assert!((3_000..4_000).contains(&of(8, 2)), "{}", of(8, 2));
}

/// Where all ranks begin and end a call at the same time, a call takes the same time alone and in a row.
#[test]
fn a_call_in_a_row_is_one_call() {
    let copy = Rate { cached_fs: 1_000, memory_fs: 1_000 };
    let prices = PriceList { copy, call_ps: 50, nic_byte_fs: 2_000, ..free() };
    let on = |hosts: &[usize], cores_per_host| {
        let cluster = Cluster::new(Topology::hosts(hosts), prices.clone());
        Cluster { cores_per_host, ..cluster }
    };
    for (name, cluster) in [
        ("shm", on(&[4], 1)),
        ("shm", on(&[4], 2)),
        ("shm", on(&[4], 4)),
        ("direct", on(&[1, 1, 1], 1)),
    ] {
        let algorithm = find(Collective::AllGather, name);
        let workload = Workload { algorithm, root: 0, elements: 100, kind: F32 };
        let once = replay(&cluster, &workload).unwrap();
        let again = replay_in_a_row(&cluster, &workload).unwrap();
        let of = |outcome: Outcome| (outcome.time_ps, outcome.rounds, outcome.line_bytes);
        assert_eq!(of(once), of(again), "{name}, {} cores", cluster.cores_per_host);
    }
}

/// Each place of a step costs one touch; a copy has two places.
#[test]
fn places_are_paid_for_however_short_they_are() {
    let prices = PriceList { touch_ps: 100, ..free() };
    let alone = Cluster::new(Topology::hosts(&[1]), prices.clone());
    let two = Cluster::new(Topology::hosts(&[2]), prices);
    let row = find(Collective::AllReduce, "shm-oneshot");
    let [of_one, short, long] = [(&alone, 1), (&two, 1), (&two, 1_000)]
        .map(|(cluster, elements)| time(cluster, row, elements).time_ps);
    // A copy to the slot; two slots, or one and the data, into the data.
    assert_eq!([of_one, short, long], [0, 200 + 300, 200 + 300]);
}

/// Long data goes in pieces. A replay takes only some of many pieces.
#[test]
fn pieces_take_turns_and_the_rest_is_reckoned() {
    let row = find(Collective::AllReduce, "shm-twoshot");
    let prices = PriceList { cache_bytes: 0, ..PriceList::default() };
    let cluster = Cluster::new(Topology::hosts(&[4]), prices);
    let of = |pieces: usize| time(&cluster, row, pieces * (64 << 10));
    assert_eq!(of(16).method, Method::Replay);
    assert_eq!(of(1_000).method, Method::Pieces);
    let (more, many) = (of(64).time_ps as f64, of(1_024).time_ps as f64);
    assert!((many / more / 16.0 - 1.0).abs() < 0.25, "{more} {many}");
}

/// 16,384 ranks: the number of events is that of messages and steps. Workloads with too many are replayed with fewer
/// hosts, if all hosts are equal.
#[test]
fn sixteen_thousand_ranks() {
    let cluster = |hosts| Cluster::new(Topology::hosts(&[8].repeat(hosts)), PriceList::default());
    let large = cluster(2048);
    let of = |collective, name| time(&large, find(collective, name), 1 << 20);
    let halving = of(Collective::AllReduce, "halving");
    assert_eq!((halving.method, halving.rounds), (Method::Replay, 28));
    // 28 messages of each rank, a few events for each of them.
    let messages = 16_384 * 28;
    assert!((2 * messages..8 * messages).contains(&halving.events), "{}", halving.events);
    let all_to_all = find(Collective::AllToAll, "direct");
    assert_eq!(time(&large, all_to_all, 1 << 20).method, Method::Hosts);
    let mut sizes = [8].repeat(2048);
    sizes[7] = 7;
    let uneven = Cluster::new(Topology::hosts(&sizes), PriceList::default());
    assert_eq!(time(&uneven, all_to_all, 1 << 20).method, Method::Formula);
}

fn rows() -> impl Strategy<Value = (&'static Algorithm, Topology)> {
    let topology =
        prop::collection::vec(1_usize..5, 1..5).prop_map(|hosts| Topology::hosts(&hosts));
    (0..ALGORITHMS.len(), topology)
        .prop_map(|(row, topology)| (&ALGORITHMS[row], topology))
        .prop_filter("it does not serve these ranks", |(row, topology)| (row.applies)(topology))
}

proptest! {
    /// Every rank ends, after at most as many rounds as the formula says.
    #[test]
    fn every_schedule_ends((row, topology) in rows(), elements in 0_usize..200_000, cores in 1..5_usize) {
        let cluster = Cluster::new(topology.clone(), PriceList::default());
        let cluster = Cluster { cores_per_host: cores, ..cluster };
        let outcome = time(&cluster, row, elements);
        prop_assert!(outcome.time_ps >= cluster.prices.call_ps);
        prop_assert!(outcome.rounds <= (row.cost)(&topology, 0, elements).rounds);
    }

    /// Higher prices give longer times, within a tolerance: they may change the order of service for the
    /// better.
    #[test]
    fn dearer_is_slower(row in 0..ALGORITHMS.len(), ranks in 1_usize..9, elements in 1_usize..100_000) {
        let row = &ALGORITHMS[row];
        for topology in [Topology::flat(ranks), Topology::hosts(&[ranks])] {
            if !(row.applies)(&topology) {
                continue;
            }
            let base = time(&Cluster::new(topology.clone(), PriceList::default()), row, elements);
            for name in PriceList::names().filter(|name| *name != "cache_bytes") {
                let mut list = PriceList::default();
                let value = value_of(&list, name);
                list.set(name, 2 * value);
                let dearer = time(&Cluster::new(topology.clone(), list), row, elements);
                prop_assert!(at_least(dearer, base), "{} {} {}", row.collective, row.name, name);
            }
            let longer = time(&Cluster::new(topology.clone(), PriceList::default()), row, 2 * elements);
            prop_assert!(at_least(longer, base), "{} {}", row.collective, row.name);
        }
    }
}

fn at_least(one: Outcome, other: Outcome) -> bool {
    one.time_ps >= other.time_ps / 20 * 19
}

fn value_of(list: &PriceList, name: &str) -> u64 {
    let text = list.to_string();
    let entries = drumline_schedule::price::entries(&text).unwrap();
    entries.iter().find(|entry| entry.name == name).unwrap().value
}
