//! Many seeds: right bits, nothing too early, no deadlock.

use drumline_accel::{DeviceOptions, Planted};
use drumline_device::{Action, Pipeline};
use drumline_group::Config;
use fastrand::Rng;

use crate::common::{Bench, bench, bench_of, config};
use crate::rounds::round;

/// Rounds in one world.
const ROUNDS: u64 = 20;

/// Runs the rounds of a seed, and tells what is wrong.
fn world_of(bench: &Bench, seed: u64, planted: Option<Planted>) -> Vec<String> {
    bench.controls.seed(seed);
    let mut random = Rng::with_seed(seed);
    let ranks = random.usize(1..=8);
    let slots = random.usize(2..=5);
    let mut options = DeviceOptions::default()
        .window_bytes(*random.choice([64, 256, 4_096]).as_ref().unwrap())
        .slots(slots)
        .lag(random.usize(1..slots));
    options = match planted {
        Some(Planted::Rules(_)) | None => options,
        Some(planted) => options.planted(planted),
    };
    if let Some(Planted::Rules(rules)) = planted {
        options = options.slots(4).lag(2).planted(Planted::Rules(rules));
    }
    let way = random.u8(..8);
    let config = ways(bench, way, ranks, &options);
    let wrong = bench.world(ranks, &config, |member| {
        let on = member.on(&options);
        let mut wrong = Vec::new();
        for number in 0..ROUNDS {
            match round(&member, &on, seed * ROUNDS + number) {
                Ok(more) => wrong.extend(more),
                Err(error) => {
                    wrong.push(format!("rank {}: {error}", member.rank()));
                    break;
                }
            }
        }
        match on.destroy() {
            Err(error) if wrong.is_empty() => wrong.push(error.to_string()),
            _ => {}
        }
        wrong
    });
    wrong.concat()
}

/// Some seeds take other ways: without shared memory, or where the driver pins less.
fn ways(bench: &Bench, way: u8, ranks: usize, options: &DeviceOptions) -> Config {
    let own = (ranks * options.slots) as u32;
    match way {
        0 => return config().shared_memory(false),
        1 => bench.controls.fail("cuMemHostRegister", 1 + own / 2, 1),
        2 if ranks > 1 => bench.controls.fail("cuMemHostRegister", own + 1, 801),
        _ => {}
    }
    config()
}

#[test]
fn every_seed_has_the_bits_of_the_host() {
    let worlds = std::env::var("DRUMLINE_TEST_DEVICE_WORLDS").map_or(6, |it| it.parse().unwrap());
    for seed in 0..worlds {
        let bench = bench_of(1 + seed as usize % 4);
        let wrong = world_of(&bench, seed, None);
        assert!(wrong.is_empty(), "world {seed}: {wrong:#?}");
        bench.is_clean();
    }
}

/// Whether the rounds find an error of order: wrong bits, or what no device would tell.
fn is_found(planted: Planted) -> bool {
    (0..300).any(|seed| {
        let bench = bench();
        let wrong = world_of(&bench, 1_000 + seed, Some(planted));
        wrong.iter().any(|it| it.contains("differs at")) || bench.controls.violations() > 0
    })
}

#[test]
fn every_error_of_order_that_is_planted_is_found() {
    let mut planted = vec![
        Planted::ReadsEarly,
        Planted::WritesEarly,
        Planted::SendsEarly,
        Planted::EndsEarly,
        Planted::OpensEarly,
        Planted::CopiesInEarly,
        Planted::FetchesEarly,
    ];
    // A slot that is used again too early: it waits for an earlier window, or for none. (Ranks that call too early are
    // found by the exhaustive tests of the pipeline.)
    let right = Pipeline::rules(4, 2);
    for less in [1, 2, 1_000] {
        let mut wrong = right;
        wrong[0].distance -= less;
        planted.push(Planted::Rules(wrong));
    }
    assert_eq!(right[0].action, Action::CopyOut);
    for planted in planted {
        assert!(is_found(planted), "{planted:?}");
    }
}
