//! The same bits, whatever carries the numbers and whatever adds them: functions of one's own,
//! multiples, and long vectors. The operators themselves are in the conformance suite, over all
//! transports and in the simulator.

use std::{fmt::Debug, sync::Arc};

use crate::common::{tree, world_with as world};
use drumline_group::{
    Config, Element, Operator, ReduceOp,
    algorithms::{Rounding, SumOrder},
    f16,
    store::{HashStore, Store},
};
use proptest::prelude::*;

/// Every way there is to carry an all-reduce of ranks on one host.
fn ways() -> Vec<(&'static str, Config)> {
    let shared = Config::default().registered_bytes_max(64 << 20);
    let unix = Config::default().shared_memory(false);
    let tcp = unix.clone().unix_sockets(false);
    let with = |config: &Config, name: &str| config.clone().all_reduce(name);
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
    fn bits(self) -> u32;
}

impl Sample for f32 {
    fn from_f64(value: f64) -> f32 {
        value as f32
    }
    fn bits(self) -> u32 {
        self.to_bits()
    }
}

impl Sample for f16 {
    fn from_f64(value: f64) -> f16 {
        f16::from_f64(value / 64.0)
    }
    fn bits(self) -> u32 {
        self.to_bits().into()
    }
}

fn sum(values: &[f32]) -> f32 {
    tree(values, &|a, b| a + b)
}

/// Every way gives these results, bit by bit.
fn agree<T: Element, B: PartialEq + Debug>(
    world_size: usize,
    len: usize,
    own: impl Fn(usize, usize) -> T + Sync,
    operator: impl Fn(usize) -> Operator<T> + Sync,
    expected: impl Fn(usize) -> T,
    bits: impl Fn(&T) -> B,
) {
    let expected: Vec<B> = (0..len).map(|index| bits(&expected(index))).collect();
    for (way, config) in ways() {
        let results = world(world_size, &config, |group| {
            let own: Vec<T> = (0..len).map(|i| own(group.rank(), i)).collect();
            let operator = operator(group.rank());
            let mut blocking = own.clone();
            group.all_reduce(&mut blocking, &operator).unwrap();
            let mut registered = group.alloc_registered::<T>(len).unwrap();
            registered.copy_from_slice(&own);
            // A forced algorithm for private buffers takes registered ones, too.
            group.all_reduce(&mut registered, &operator).unwrap();
            let asynchronous = group.all_reduce_async(own, operator).unwrap().wait().unwrap();
            [blocking, registered.to_vec(), asynchronous]
        });
        for (rank, result) in results.iter().enumerate() {
            for (kind, values) in ["blocking", "registered", "asynchronous"].iter().zip(result) {
                let bits: Vec<B> = values.iter().map(&bits).collect();
                assert_eq!(bits, expected, "{way}, {kind}, rank {rank} of {world_size}");
            }
        }
    }
}

/// Affine maps `x -> factor * x + offset` modulo a prime, one after the other: associative, and
/// as far from commuting as can be.
fn then(first: u64, second: u64) -> u64 {
    const PRIME: u64 = 4_294_967_291;
    let parts = |map: u64| (map >> 32, map & 0xffff_ffff);
    let ((f1, o1), (f2, o2)) = (parts(first), parts(second));
    let (factor, offset) = (f1 * f2 % PRIME, (o1 * f2 + o2) % PRIME);
    (factor << 32) | offset
}

fn map(seed: u64, rank: usize, index: usize) -> u64 {
    let factor = u64::from(sample::<f32>(seed, rank, index).to_bits() >> 1) | 1;
    (factor << 32) | (rank + 7 * index) as u64
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]

    #[test]
    fn functions_need_not_commute_in_any_way(
        world_size in 1_usize..=8, len in prop_oneof![0_usize..70, 4000_usize..9000], seed: u64,
    ) {
        let own = |rank, index| map(seed, rank, index);
        // One after the other: no tree at all.
        let expected = |index| (0..world_size).map(|rank| own(rank, index)).reduce(then).unwrap();
        agree(world_size, len, own, |_| Operator::custom("then", then), expected, |map| *map);
    }

    /// Neither associative nor commutative, and rounded to 16 bits each time.
    #[test]
    fn functions_follow_the_tree_in_their_own_type(
        world_size in 1_usize..=8, len in 0_usize..70, seed: u64,
    ) {
        let own = |rank, index| sample::<f16>(seed, rank, index);
        let halve = |a: f16, b: f16| f16::from_f32(a.to_f32() / 3.0 - b.to_f32());
        let column = |index| (0..world_size).map(|rank| own(rank, index)).collect::<Vec<_>>();
        let expected = |index| tree(&column(index), &halve);
        agree(world_size, len, own, |_| Operator::custom("halve", halve), expected, |x| x.bits());
    }

    #[test]
    fn multiples_are_rounded_before_they_are_summed(
        world_size in 1_usize..=8, len in prop_oneof![0_usize..70, 4000_usize..9000], seed: u64,
    ) {
        let factor = |rank| f16::from_f32(1.0 / (rank + 3) as f32);
        let own = |rank, index| sample::<f16>(seed, rank, index);
        let multiple = |rank, index| {
            f16::from_f32(own(rank, index).to_f32() * factor(rank).to_f32()).to_f32()
        };
        let column = |index| (0..world_size).map(|rank| multiple(rank, index)).collect::<Vec<_>>();
        let expected = |index| f16::from_f32(sum(&column(index)));
        let operator = |rank| Operator::premul_sum(factor(rank));
        agree(world_size, len, own, operator, expected, |x| x.bits());
    }
}

/// Longer than a staging slot, in every world: several pieces.
#[test]
fn long_vectors_go_through_short_slots() {
    for world_size in [2, 3] {
        let own = |rank, index| sample::<f32>(5, rank, index);
        let column = |index| (0..world_size).map(|rank| own(rank, index)).collect::<Vec<_>>();
        let expected = |index| sum(&column(index)) / world_size as f32;
        agree(world_size, 600_001, own, |_| ReduceOp::Avg.into(), expected, |x| x.bits());
    }
}

/// The order is a property of the group: ranks that want different ones do not meet.
#[test]
fn the_order_of_sums_can_be_chosen() {
    let config = Config::default().sum_order(SumOrder::Placement);
    let sums = world(3, &config, |group| {
        let mut data = [sample::<f32>(1, group.rank(), 0)];
        group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        data[0].to_bits()
    });
    // On one host both orders are the same tree.
    let column: Vec<f32> = (0..3).map(|rank| sample::<f32>(1, rank, 0)).collect();
    assert_eq!(sums, [sum(&column).to_bits(); 3]);
}

#[test]
fn a_setting_that_differs_is_told_with_the_rank_that_has_it() {
    let base = Config::default;
    for (variable, what, configs, values) in [
        (
            "DRUMLINE_ROUNDING",
            "rounding",
            [Rounding::Once, Rounding::Host].map(|it| base().rounding(it)),
            ["once", "host"],
        ),
        (
            "DRUMLINE_SUM_ORDER",
            "order of sums",
            [SumOrder::Placement, SumOrder::Rank].map(|it| base().sum_order(it)),
            ["placement", "rank"],
        ),
        (
            "DRUMLINE_WINDOW_BYTES",
            "window",
            [4096, 8192].map(|it| base().window_bytes(it)),
            ["4096", "8192"],
        ),
    ] {
        for shared_memory in [true, false] {
            let store: Arc<dyn Store> = Arc::new(HashStore::new());
            let errors = crate::common::on_threads((0..2).collect(), |rank: usize| {
                let config =
                    configs[rank].clone().shared_memory(shared_memory).unix_sockets(shared_memory);
                let refused = drumline_group::rendezvous::connect(
                    "settings",
                    store.clone(),
                    rank,
                    2,
                    &config,
                );
                refused.map(drop).unwrap_err().to_string()
            });
            for (rank, error) in errors.iter().enumerate() {
                let (ours, theirs) = (values[rank], values[1 - rank]);
                let told = format!(
                    "rank {}: its {what} is {theirs}, that of this rank {ours}: set {variable} alike on all ranks",
                    1 - rank
                );
                assert!(error.contains(&told), "{errors:?}");
            }
        }
    }
}
