//! The same bits, whatever carries the numbers and whatever adds them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::fmt::Debug;

use common::world_with as world;
use drumline::{Config, Element, ReduceOp, SumOrder};
use half::{bf16, f16};
use proptest::prelude::*;

/// Every way there is to carry an all-reduce of ranks on one host.
fn ways() -> Vec<(&'static str, Config)> {
    let shared = Config { registered_bytes_max: Some(64 << 20), ..Config::default() };
    let unix = Config { shared_memory: false, ..Config::default() };
    let tcp = Config { unix_sockets: false, ..unix.clone() };
    let with = |config: &Config, name: &str| Config {
        all_reduce: Some(name.to_owned()),
        ..config.clone()
    };
    let mut ways = vec![("shared", shared.clone()), ("unix", unix.clone()), ("tcp", tcp.clone())];
    for name in ["shm-oneshot", "shm-twoshot", "hierarchical", "direct"] {
        ways.push((name, with(&shared, name)));
    }
    for name in ["direct", "halving", "doubling", "gather", "binomial"] {
        ways.push((name, with(&unix, name)));
    }
    ways.push(("halving over tcp", with(&tcp, "halving")));
    ways
}

/// Values of very different size, so that another order of sums gives other bits.
fn sample<T: Sample>(seed: u64, rank: usize, index: usize) -> T {
    let mut x = seed ^ (rank as u64 * 0x9e37_79b9 + index as u64 + 1);
    x = x.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^= x >> 27;
    x = x.wrapping_mul(0x94d0_49bb_1331_11eb);
    let value = (x >> 40) as f64 / 1024.0 - 8192.0;
    T::from_f64(value * 2.0_f64.powi((x & 15) as i32 - 8))
}

trait Sample: Element {
    fn from_f64(value: f64) -> Self;
    fn widen(self) -> f32;
    fn bits(self) -> u32;
}

impl Sample for f32 {
    fn from_f64(value: f64) -> f32 {
        value as f32
    }
    fn widen(self) -> f32 {
        self
    }
    fn bits(self) -> u32 {
        self.to_bits()
    }
}

impl Sample for f16 {
    fn from_f64(value: f64) -> f16 {
        f16::from_f64(value / 64.0)
    }
    fn widen(self) -> f32 {
        self.to_f32()
    }
    fn bits(self) -> u32 {
        self.to_bits().into()
    }
}

impl Sample for bf16 {
    fn from_f64(value: f64) -> bf16 {
        bf16::from_f64(value)
    }
    fn widen(self) -> f32 {
        self.to_f32()
    }
    fn bits(self) -> u32 {
        self.to_bits().into()
    }
}

/// The canonical tree, as it is defined, in `f32`.
fn tree(values: &[f32]) -> f32 {
    match values {
        [value] => *value,
        _ => {
            let half = 1 << (values.len() - 1).ilog2();
            tree(&values[..half]) + tree(&values[half..])
        }
    }
}

fn agrees_with_the_tree<T: RoundOnce + Debug>(world_size: usize, len: usize, seed: u64, avg: bool) {
    let op = if avg { ReduceOp::Avg } else { ReduceOp::Sum };
    let expected: Vec<u32> = (0..len)
        .map(|index| {
            let column: Vec<f32> =
                (0..world_size).map(|rank| sample::<T>(seed, rank, index).widen()).collect();
            let sum = tree(&column);
            let sum = if avg { sum / world_size as f32 } else { sum };
            // Rounded once, to the type that travels.
            T::from_f32_once(sum).bits()
        })
        .collect();
    for (way, config) in ways() {
        let results = world(world_size, &config, |group| {
            let own: Vec<T> = (0..len).map(|i| sample(seed, group.rank(), i)).collect();
            let mut blocking = own.clone();
            group.all_reduce(&mut blocking, op).unwrap();
            let mut registered = group.alloc_registered::<T>(len).unwrap();
            registered.copy_from_slice(&own);
            // A forced algorithm for private buffers takes registered ones, too.
            group.all_reduce(&mut registered, op).unwrap();
            let asynchronous = group.all_reduce_async(own, op).wait().unwrap();
            [blocking, registered.to_vec(), asynchronous]
        });
        for (rank, result) in results.iter().enumerate() {
            for (kind, values) in ["blocking", "registered", "asynchronous"].iter().zip(result) {
                let bits: Vec<u32> = values.iter().map(|value| value.bits()).collect();
                assert_eq!(bits, expected, "{way}, {kind}, rank {rank} of {world_size}, {op}");
            }
        }
    }
}

trait RoundOnce: Sample {
    fn from_f32_once(value: f32) -> Self;
}

impl RoundOnce for f32 {
    fn from_f32_once(value: f32) -> f32 {
        value
    }
}
impl RoundOnce for f16 {
    fn from_f32_once(value: f32) -> f16 {
        f16::from_f32(value)
    }
}
impl RoundOnce for bf16 {
    fn from_f32_once(value: f32) -> bf16 {
        bf16::from_f32(value)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]

    #[test]
    fn every_way_gives_the_bits_of_the_tree(
        world_size in 1_usize..=8, len in prop_oneof![0_usize..70, 4000_usize..9000],
        seed: u64, avg: bool,
    ) {
        agrees_with_the_tree::<f32>(world_size, len, seed, avg);
        agrees_with_the_tree::<f16>(world_size, len, seed, avg);
        agrees_with_the_tree::<bf16>(world_size, len, seed, avg);
    }
}

/// Longer than a staging slot, in every world: several pieces.
#[test]
fn long_vectors_go_through_short_slots() {
    for world_size in [2, 3] {
        agrees_with_the_tree::<f32>(world_size, 600_001, 5, true);
    }
}

/// The order is a property of the group: ranks that want different ones do not meet.
#[test]
fn the_order_of_sums_can_be_chosen() {
    let config = Config { sum_order: SumOrder::Placement, ..Config::default() };
    let sums = world(3, &config, |group| {
        let mut data = [sample::<f32>(1, group.rank(), 0)];
        group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        data[0].to_bits()
    });
    // On one host both orders are the same tree.
    let column: Vec<f32> = (0..3).map(|rank| sample::<f32>(1, rank, 0)).collect();
    assert_eq!(sums, [tree(&column).to_bits(); 3]);
}
