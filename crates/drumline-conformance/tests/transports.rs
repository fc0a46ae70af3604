//! The library's own transports.

#![allow(clippy::unwrap_used, clippy::panic)]

use drumline_conformance::{Extent, Threads, run};

fn everywhere(world_sizes: &[usize], extent: Extent) {
    for world in Threads::everywhere() {
        if let Err(problem) = run(&world, world_sizes, extent) {
            panic!("{problem}");
        }
    }
}

#[test]
fn every_operation_type_and_operator() {
    everywhere(&[1, 2, 3, 5], Extent::Small);
}

#[test]
fn every_operation_with_many_ranks() {
    everywhere(&[4, 6, 7, 8, 12, 16], Extent::Sizes);
}

#[test]
fn every_operation_on_long_buffers() {
    everywhere(&[2, 3], Extent::Large);
}

#[test]
#[cfg_attr(not(feature = "nightly"), ignore = "takes hours: --features nightly")]
fn everything() {
    everywhere(&[1, 2, 3, 4, 5, 6, 7, 8, 12, 16], Extent::All);
}
