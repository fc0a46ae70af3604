//! The sampler against torch's own permutations, and the properties that training relies on.

#![allow(clippy::unwrap_used, clippy::panic)]

use drumline::{
    Error,
    sampler::{DistributedSampler, evaluation_shard},
};
use proptest::prelude::*;

/// `fixtures/randperm.txt` was written by torch itself; its head says how.
#[test]
fn shuffles_in_the_order_of_torch() {
    let mut compared = 0;
    for line in include_str!("fixtures/randperm.txt").lines().filter(|line| !line.starts_with('#'))
    {
        let fields: Vec<&str> = line.split(':').map(str::trim).collect();
        let numbers = |field: &str| -> Vec<u64> {
            field.split_whitespace().map(|number| number.parse().unwrap()).collect()
        };
        let (kind, case) = fields[0].split_once(' ').unwrap();
        let case = numbers(case);
        if case[0] == 0 {
            continue; // No sampler can be made for it; see below.
        }
        let sampler =
            DistributedSampler::builder(case[0] as usize, 1, 0).seed(case[1]).build().unwrap();
        let order: Vec<u64> = sampler.iter().map(|index| index as u64).collect();
        match kind {
            "full" => assert_eq!(order, numbers(fields[1]), "{line}"),
            "ends" => {
                assert_eq!(order[..32], numbers(fields[1]), "{line}");
                assert_eq!(order[order.len() - 32..], numbers(fields[2]), "{line}");
                let checksum = order
                    .iter()
                    .zip(0_u64..)
                    .fold(0_u64, |sum, (value, i)| sum.wrapping_add(i.wrapping_mul(*value)));
                assert_eq!(checksum, case[2], "{line}");
            }
            _ => panic!("unknown kind of line: {line}"),
        }
        compared += 1;
    }
    assert!(compared >= 7, "the fixture has only {compared} cases");
}

/// torch's documentation: the order of an epoch is that of seed + epoch.
#[test]
fn epochs_continue_the_seed() {
    let order = |seed, epoch| -> Vec<usize> {
        let mut sampler = DistributedSampler::builder(97, 1, 0).seed(seed).build().unwrap();
        sampler.set_epoch(epoch);
        sampler.iter().collect()
    };
    assert_eq!(order(40, 2), order(42, 0));
    assert_ne!(order(40, 2), order(40, 0));
    assert_eq!(order(u64::MAX, 1), order(0, 0), "the sum wraps as torch's 64 bits do");
}

/// What `torch.utils.data.DistributedSampler(range(n), w, r, shuffle=False, drop_last=d)` gives.
#[test]
fn pads_and_drops_like_torch() {
    let order = |samples, world_size, rank, drop_last| -> Vec<usize> {
        let builder = DistributedSampler::builder(samples, world_size, rank).shuffle(false);
        builder.drop_last(drop_last).build().unwrap().iter().collect()
    };
    assert_eq!(order(10, 4, 1, false), [1, 5, 9]);
    assert_eq!(order(10, 4, 2, false), [2, 6, 0]);
    assert_eq!(order(10, 4, 3, false), [3, 7, 1]);
    assert_eq!(order(10, 4, 3, true), [3, 7]);
    // More padding than samples: the whole order again and again.
    assert_eq!(
        (0..8).flat_map(|rank| order(3, 8, rank, false)).collect::<Vec<_>>(),
        [0, 1, 2, 0, 1, 2, 0, 1]
    );
}

#[test]
fn refuses_what_cannot_be_sampled() {
    let problem = |samples, world_size, rank, drop_last| {
        let builder = DistributedSampler::builder(samples, world_size, rank).drop_last(drop_last);
        match builder.build() {
            Err(error @ Error::InvalidArgument { .. }) => error.to_string(),
            other => panic!("{other:?}"),
        }
    };
    assert!(problem(0, 2, 0, false).contains("the data set is empty"));
    assert!(problem(9, 2, 2, false).contains("no rank 2 in a world of 2"));
    assert!(problem(9, 0, 0, false).contains("no rank 0 in a world of 0"));
    assert!(problem(3, 4, 0, true).contains("drop all 3 samples"));
    assert!(problem(u32::MAX as usize, 4, 0, false).contains("limit"));
    assert!(evaluation_shard(9, 2, 2).is_err());
}

proptest! {
    #[test]
    fn padding_covers_every_sample_evenly(
        samples in 1_usize..500, world_size in 1_usize..20, shuffle: bool, seed: u64, epoch: u32,
    ) {
        let mut uses = vec![0; samples];
        for rank in 0..world_size {
            let builder = DistributedSampler::builder(samples, world_size, rank);
            let mut sampler = builder.shuffle(shuffle).seed(seed).build().unwrap();
            sampler.set_epoch(u64::from(epoch));
            prop_assert_eq!(sampler.iter().len(), sampler.len());
            prop_assert_eq!(sampler.iter().count(), samples.div_ceil(world_size));
            sampler.iter().for_each(|index| uses[index] += 1);
        }
        let (least, most) = (uses.iter().min().unwrap(), uses.iter().max().unwrap());
        prop_assert!(*least >= 1 && most - least <= 1, "{uses:?}");
    }

    #[test]
    fn drop_last_uses_no_sample_twice(
        share in 1_usize..50, rest in 0_usize..20, world_size in 1_usize..20, seed: u64,
    ) {
        let samples = share * world_size + rest % world_size;
        let mut seen = vec![false; samples];
        for rank in 0..world_size {
            let builder = DistributedSampler::builder(samples, world_size, rank);
            let sampler = builder.drop_last(true).seed(seed).build().unwrap();
            prop_assert_eq!(sampler.iter().count(), share);
            for index in &sampler {
                prop_assert!(!std::mem::replace(&mut seen[index], true), "{} twice", index);
            }
        }
    }

    #[test]
    fn evaluation_counts_every_sample_once(samples in 0_usize..500, world_size in 1_usize..20) {
        let shards: Vec<_> = (0..world_size)
            .map(|rank| evaluation_shard(samples, world_size, rank).unwrap())
            .collect();
        prop_assert!(shards.iter().cloned().flatten().eq(0..samples));
        let longest = shards.iter().map(|shard| shard.len()).max().unwrap();
        prop_assert!(shards.iter().all(|shard| shard.len() + 1 >= longest));
    }
}
