//! The conformance suite on simulated transports: unchanged cases, nothing goes wrong.

#![allow(clippy::panic)]

use drumline::SumOrder;
use drumline_conformance::{Case, Extent, on_group::Form, suite::cases};
use drumline_schedule::ALGORITHMS;
use drumline_sim::{Job, Place};

/// Every operation, type and operator for few ranks, every size for many.
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

fn run(job: &Job<'_>) {
    if let Err(problem) = job.run() {
        panic!("{problem}");
    }
}

fn suite(place: Place, sum_order: SumOrder) {
    suite_of(&WORLDS, place, sum_order);
}

fn suite_of(worlds: &[(usize, Extent)], place: Place, sum_order: SumOrder) {
    for &(world_size, extent) in worlds {
        let job = Job {
            world_size,
            place,
            sum_order,
            all_reduce: None,
            form: Form::Blocking,
            cases: &[],
        };
        // Where hosts hold ranks that are no node of the tree, there is no algorithm that sums
        // blocks by placement.
        let serves = |collective| {
            let topology = job.topology();
            let mut rows = ALGORITHMS.iter().filter(|row| row.collective == collective);
            rows.any(|row| (row.applies)(&topology))
        };
        let cases = cases(extent, world_size).into_iter();
        let cases: Vec<_> = cases.filter(|case| serves(case.kind.collective())).collect();
        for form in [Form::Blocking, Form::Async, Form::Registered] {
            if form != Form::Registered || job.shares_memory() {
                run(&Job { form, cases: &cases, ..job.clone() });
            }
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

#[test]
fn every_case_without_shared_memory() {
    suite(Place::Flat, SumOrder::Rank);
}

/// More than one message, slot, and way through shared memory.
#[test]
fn every_operation_on_longer_buffers() {
    let shorter = |case: Case| Case { elements: case.elements / 50, ..case };
    for (place, world_size) in [(Place::OneHost, 3), (Place::Hosts(2), 4), (Place::Flat, 3)] {
        let cases: Vec<_> = cases(Extent::Large, world_size).into_iter().map(shorter).collect();
        let (sum_order, all_reduce) = (SumOrder::Rank, None);
        for form in [Form::Blocking, Form::Async] {
            run(&Job { world_size, place, sum_order, all_reduce, form, cases: &cases });
        }
    }
}

#[test]
#[cfg_attr(not(feature = "nightly"), ignore = "takes days: --features nightly")]
fn everything() {
    let worlds = WORLDS.map(|(world_size, _)| (world_size, Extent::All));
    for place in [Place::OneHost, Place::Hosts(2), Place::Flat] {
        suite_of(&worlds, place, SumOrder::Rank);
    }
    suite_of(&worlds, Place::Hosts(3), SumOrder::Placement);
}
