//! The conformance suite on simulated transports: unchanged cases, nothing goes wrong.

#![allow(clippy::panic)]

use drumline::{DType, ReduceOp, SumOrder};
use drumline_conformance::{
    Case, Extent, Kind,
    on_group::Form,
    suite::{SIZES, cases},
};
use drumline_schedule::{ALGORITHMS, Collective, MemoryUse};
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
    for (world_size, extent) in WORLDS {
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

/// One input, summed by every algorithm over every transport. The bits that the oracle expects
/// are those that real transports are compared with, too, in the tests of the conformance suite.
#[test]
fn all_algorithms_give_exactly_the_bits_of_the_oracle_in_every_size() {
    let dtypes = [DType::F32, DType::F16, DType::Bf16, DType::F8E4M3, DType::F8E5M2];
    let cases = |kind| -> Vec<Case> {
        let of_type = |dtype| {
            let sizes = SIZES.into_iter().chain([5000]);
            sizes.map(move |elements| Case { kind, dtype, elements, uneven: false, seed: 11 })
        };
        dtypes.into_iter().flat_map(of_type).collect()
    };
    let sums = cases(Kind::AllReduce(ReduceOp::Sum));
    for place in [Place::OneHost, Place::Hosts(2), Place::Flat] {
        for world_size in [2, 3, 4, 6, 8] {
            for row in ALGORITHMS.iter().filter(|row| row.collective == Collective::AllReduce) {
                let registered = row.memory == MemoryUse::Registered;
                let form = if registered { Form::Registered } else { Form::Blocking };
                // Partial sums of narrow floats do not travel from registered memory.
                let fits = |case: &&Case| {
                    !(registered && row.partial_sums_travel) || case.dtype == DType::F32
                };
                let cases: Vec<_> = sums.iter().filter(fits).copied().collect();
                let job = Job {
                    world_size,
                    place,
                    sum_order: SumOrder::Rank,
                    all_reduce: Some(row.name),
                    form,
                    cases: &cases,
                };
                let shares = job.shares_memory() || row.memory == MemoryUse::Private;
                if shares && (row.applies)(&job.topology()) {
                    run(&job);
                }
            }
        }
    }
}
