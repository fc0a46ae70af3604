//! The library's own transports.

use drumline::auth::{Level, Secret};
use drumline_conformance::{Extent, Part, Threads, run_part, suite::WORLD_SIZES};

fn everywhere(world_sizes: &[usize], extent: Extent) {
    part_everywhere(world_sizes, extent, Part::WHOLE);
}

fn part_everywhere(world_sizes: &[usize], extent: Extent, part: Part) {
    for world in Threads::everywhere() {
        if let Err(problem) = run_part(&world, world_sizes, extent, part) {
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
    everywhere(&[3], Extent::Large);
}

#[test]
fn every_operation_over_several_connections() {
    let [_, _, tcp] = Threads::everywhere();
    let tcp = tcp.with(|config| config.streams = 3);
    if let Err(problem) = run_part(&tcp, &[3], Extent::Large, Part::WHOLE) {
        panic!("{problem}");
    }
}

/// At the security level `tls`, over one connection and over several.
#[test]
fn every_operation_over_sealed_connections() {
    for (streams, sizes, extent) in [(1, &[2, 3][..], Extent::Small), (3, &[3], Extent::Large)] {
        let [_, _, tcp] = Threads::everywhere();
        let world = tcp.with(|config| {
            config.streams = streams;
            config.security = Level::Tls;
            config.secret = Some(Secret::new("of the conformance suite").unwrap());
        });
        if let Err(problem) = run_part(&world, sizes, extent, Part::WHOLE) {
            panic!("{streams} streams: {problem}");
        }
    }
}

#[test]
#[cfg_attr(not(feature = "nightly"), ignore = "takes an hour: --features nightly")]
fn everything() {
    part_everywhere(&WORLD_SIZES, Extent::All, Part::from_env().unwrap());
}
