//! The conformance suite on simulated transports, without faults.

use drumline_conformance::{
    Case, Extent, Part,
    on_group::Form,
    suite::{Call, WORLD_SIZES, calls},
};
use drumline_schedule::{Rounding, SumOrder};
use drumline_sim::{ConformanceJob, Place};

/// Small worlds run every collective, type and operator. Large worlds run every size.
const WORLDS: [(usize, Extent); 10] = [
    (1, Extent::Small),
    (2, Extent::Small),
    (3, Extent::Small),
    (5, Extent::Small),
    (4, Extent::Sizes),
    (6, Extent::Sizes),
    (7, Extent::Sizes),
    (8, Extent::Sizes),
    (12, Extent::Sizes),
    (16, Extent::Sizes),
];

fn suite(place: Place, sum_order: SumOrder) {
    for (world_size, extent) in WORLDS {
        run(&calls(extent, world_size), world_size, place, sum_order);
    }
}

fn run(calls: &[Call], world_size: usize, place: Place, sum_order: SumOrder) {
    run_rounded(calls, world_size, place, sum_order, Rounding::Once);
}

fn run_rounded(
    calls: &[Call],
    world_size: usize,
    place: Place,
    sum_order: SumOrder,
    rounding: Rounding,
) {
    for form in Form::ALL {
        let job = ConformanceJob {
            world_size,
            place,
            sum_order,
            rounding,
            all_reduce: None,
            form,
            cases: &[],
        };
        let is_possible = form != Form::Registered || job.shares_memory();
        let cases =
            calls.iter().filter(|(case, of)| *of == form && is_possible && job.serves(case));
        let cases: Vec<Case> = cases.map(|(case, _)| *case).collect();
        if let Err(problem) = (ConformanceJob { cases: &cases, ..job }).run() {
            panic!("{problem}");
        }
    }
}

#[test]
fn every_case_on_one_host() {
    suite(Place::OneHost, SumOrder::Rank);
}

#[test]
fn every_case_on_two_hosts() {
    suite(Place::Hosts(2), SumOrder::Rank);
}

#[test]
fn every_case_on_three_hosts_summed_by_placement() {
    suite(Place::Hosts(3), SumOrder::Placement);
}

/// Only worlds whose hosts have several ranks each: in others no algorithm of `reduce` rounds on hosts.
#[test]
fn every_case_where_hosts_round_their_sums() {
    let worlds = [(4, 2), (6, 3), (8, 2), (12, 4)];
    for (world_size, hosts) in worlds {
        let calls = calls(Extent::Small, world_size);
        run_rounded(&calls, world_size, Place::Hosts(hosts), SumOrder::Placement, Rounding::Host);
    }
}

#[test]
fn every_case_without_shared_memory() {
    suite(Place::Flat, SumOrder::Rank);
}

/// Buffers that need several messages and slots.
#[test]
fn every_operation_on_longer_buffers() {
    let shorter = |(case, form): Call| (Case { elements: case.elements / 50, ..case }, form);
    for (place, world_size) in [(Place::OneHost, 3), (Place::Hosts(2), 4), (Place::Flat, 3)] {
        let calls: Vec<Call> = calls(Extent::Large, world_size).into_iter().map(shorter).collect();
        run(&calls, world_size, place, SumOrder::Rank);
    }
}

#[test]
#[cfg_attr(not(feature = "nightly"), ignore = "takes an hour: --features nightly")]
fn everything() {
    let part = Part::from_env().unwrap();
    let places = [
        (Place::OneHost, SumOrder::Rank),
        (Place::Hosts(2), SumOrder::Rank),
        (Place::Flat, SumOrder::Rank),
        (Place::Hosts(3), SumOrder::Placement),
    ];
    for world_size in WORLD_SIZES {
        for (place, sum_order) in places {
            let calls = part.of(calls(Extent::All, world_size));
            run(&calls, world_size, place, sum_order);
        }
    }
}
