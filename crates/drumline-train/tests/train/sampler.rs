//! The sampler against torch's own permutations, and the properties that training relies on.

use drumline_group::ErrorKind;
use drumline_train::sampler::{DistributedSampler, SamplerState, evaluation_shard};
use proptest::prelude::*;

/// `fixtures/randperm.txt` was written by torch itself; its head says how.
#[test]
fn shuffles_in_the_order_of_torch() {
    let mut compared = 0;
    for line in
        include_str!("../fixtures/randperm.txt").lines().filter(|line| !line.starts_with('#'))
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
            Err(error) if error.kind() == ErrorKind::Argument => error.to_string(),
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

#[test]
fn a_state_of_another_order_is_refused() {
    let sampler = |samples| DistributedSampler::builder(samples, 2, 0);
    let mut ours = sampler(10).seed(7).build().unwrap();
    ours.set_epoch(3);
    ours.advance(2);
    assert_eq!(
        ours.state().to_string(),
        "epoch=3 consumed=4 samples=10 seed=7 shuffle=1 drop_last=0"
    );
    let problem = |builder: drumline_train::sampler::DistributedSamplerBuilder| {
        let mut other = builder.build().unwrap();
        let error = other.resume(&ours.state()).unwrap_err().to_string();
        assert_eq!((other.state().epoch, other.state().consumed), (0, 0), "it was changed");
        error
    };
    assert!(problem(sampler(9).seed(7)).contains("samples 10, but this sampler has 9"));
    assert!(problem(sampler(10).seed(8)).contains("seed 7, but this sampler has 8"));
    assert!(problem(sampler(10).seed(7).shuffle(false)).contains("shuffle"));
    assert!(problem(sampler(10).seed(7).drop_last(true)).contains("drop_last"));

    for text in [
        "",
        "epoch=3",
        "epoch=3 consumed=-4 samples=10 seed=7 shuffle=1 drop_last=0",
        "epoch=3 consumed=4 samples=10 seed=7 shuffle=2 drop_last=0",
        "epoch=3 consumed=4 samples=10 seed=7 shuffle=1 drop_last=0 x=1",
    ] {
        let error = text.parse::<SamplerState>().unwrap_err().to_string();
        assert!(error.contains("is not the state of a sampler"), "{error}");
    }
}

/// One stretch of an epoch without interruption: how many ranks, what their batches are, and
/// after how many steps they are stopped.
#[derive(Clone, Debug)]
struct Stretch {
    world_size: usize,
    batch_size: usize,
    steps: usize,
}

fn stretch() -> impl Strategy<Value = Stretch> {
    (1_usize..9, 1_usize..20, 0_usize..8).prop_map(|(world_size, batch_size, steps)| Stretch {
        world_size,
        batch_size,
        steps,
    })
}

/// What all ranks of a stretch use, step by step, rank by rank; and the state they leave, which
/// travels as text.
fn run(
    settings: &SamplerState, // Of the epoch's start.
    stretch: &Stretch,
    from: Option<&str>,
) -> (Vec<Vec<Vec<usize>>>, String) {
    let mut ranks: Vec<DistributedSampler> = (0..stretch.world_size)
        .map(|rank| {
            let SamplerState { samples, seed, shuffle, drop_last, .. } = *settings;
            let builder = DistributedSampler::builder(samples, stretch.world_size, rank);
            let builder = builder.seed(seed).shuffle(shuffle).drop_last(drop_last);
            let mut sampler = builder.build().unwrap();
            sampler.set_epoch(settings.epoch);
            if let Some(state) = from {
                sampler.resume(&state.parse().unwrap()).unwrap();
            }
            sampler
        })
        .collect();
    let left: Vec<Vec<usize>> = ranks.iter().map(|sampler| sampler.iter().collect()).collect();
    let mut steps = Vec::new();
    for step in 0..stretch.steps {
        let batches: Vec<Vec<usize>> = left
            .iter()
            .map(|indices| indices.chunks(stretch.batch_size).nth(step).unwrap_or(&[]).to_vec())
            .collect();
        ranks.iter_mut().zip(&batches).for_each(|(rank, batch)| rank.advance(batch.len()));
        if !batches[0].is_empty() {
            steps.push(batches);
        }
    }
    let states: Vec<String> = ranks.iter().map(|rank| rank.state().to_string()).collect();
    assert!(states.iter().all(|state| *state == states[0]), "the ranks disagree");
    (steps, states[0].clone())
}

fn epoch(samples: usize, seed: u64, shuffle: bool, drop_last: bool, epoch: u64) -> SamplerState {
    let builder = DistributedSampler::builder(samples, 1, 0).seed(seed).shuffle(shuffle);
    let mut sampler = builder.drop_last(drop_last).build().unwrap();
    sampler.set_epoch(epoch);
    sampler.state()
}

proptest! {
    /// Whatever the interruptions and the numbers of ranks, the samples of an epoch are used in
    /// the epoch's order, each once; only the last world rounds.
    #[test]
    fn any_interruptions_and_any_worlds_see_each_sample_once(
        samples in 9_usize..300, // At least one for each rank, or drop_last is refused.
        shuffle: bool, drop_last: bool, seed: u64, number in 0_u64..1000,
        stretches in prop::collection::vec(stretch(), 0..6),
        last in stretch(),
    ) {
        let start = epoch(samples, seed, shuffle, drop_last, number);
        let last = Stretch { steps: samples, ..last };
        let mut seen = Vec::new();
        let mut state: Option<String> = None;
        let mut rounding = last.world_size;
        for stretch in stretches.iter().chain([&last]) {
            let (steps, left) = run(&start, stretch, state.as_deref());
            if !steps.is_empty() {
                rounding = stretch.world_size;
            }
            for batches in steps {
                // In the order of the epoch: the ranks take turns.
                for place in 0..batches[0].len() {
                    seen.extend(batches.iter().map(|batch| batch[place]));
                }
            }
            state = Some(left);
        }
        let whole = Stretch { world_size: 1, batch_size: samples, steps: 1 };
        let order = run(&start, &whole, None).0[0][0].clone();
        prop_assert!(order.iter().copied().collect::<std::collections::BTreeSet<_>>().into_iter()
            .eq(0..samples), "the order is no permutation");
        if drop_last {
            prop_assert!(samples - seen.len() < last.world_size, "{} of {samples}", seen.len());
            prop_assert!(order.starts_with(&seen));
        } else {
            prop_assert!(seen.len() - samples < rounding, "{} of {samples}", seen.len());
            prop_assert!(order.iter().cycle().take(seen.len()).eq(&seen));
        }
    }

    /// The same ranks go on with exactly the steps that they would have made.
    #[test]
    fn the_same_world_goes_on_as_if_nothing_had_happened(
        samples in 9_usize..300, shuffle: bool, drop_last: bool, seed: u64,
        stretch in stretch(), stops in prop::collection::vec(0_usize..8, 0..6),
    ) {
        let start = epoch(samples, seed, shuffle, drop_last, 5);
        let to_the_end = Stretch { steps: samples, ..stretch };
        let whole = run(&start, &to_the_end, None);
        let mut steps = Vec::new();
        let mut state: Option<String> = None;
        for count in stops.into_iter().chain([samples]) {
            let (more, left) =
                run(&start, &Stretch { steps: count, ..to_the_end }, state.as_deref());
            steps.extend(more);
            state = Some(left);
        }
        prop_assert_eq!((steps, state.unwrap()), whole);
    }
}
