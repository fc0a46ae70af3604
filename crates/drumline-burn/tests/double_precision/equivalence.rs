//! N ranks with a batch of b end where one rank with a batch of N·b ends, in double precision.

use crate::{
    common::{Mlp, on_ranks, optimizers, tensor},
    device,
};
use burn::{optim::GradientsParams, tensor::DType};
use drumline_burn::{
    DdpOptions, DistributedDataParallel, TensorValues, named_tensors, parameters_digest,
};

const WIDTH: usize = 8;
const STEPS: usize = 20;
const BATCH_PER_RANK: usize = 4;

#[test]
fn n_ranks_with_batch_b_equal_one_rank_with_batch_n_times_b() {
    let device = device();
    let start = Mlp::new(WIDTH, 2, &device);
    let start_values = f64_values(&start);
    for world_size in [2, 3, 4] {
        let global_batch = BATCH_PER_RANK * world_size;
        let inputs: Vec<_> =
            (0..STEPS).map(|i| tensor([global_batch, WIDTH], i, &device)).collect();
        let targets: Vec<_> =
            (0..STEPS).map(|i| tensor([global_batch, 1], 100 + i, &device)).collect();

        for (which, (name, mut optimizer, rate)) in optimizers().into_iter().enumerate() {
            let mut one = start.clone();
            for (input, target) in inputs.iter().zip(&targets) {
                let loss = one.loss(input.clone(), target.clone());
                let gradients = GradientsParams::from_grads(loss.backward(), &one);
                one = optimizer.step(rate, one, gradients);
            }

            let ranks = on_ranks(world_size, |group| {
                // Only rank 0 knows the parameters to start from.
                let model = match group.rank() {
                    0 => start.clone(),
                    _ => Mlp::new(WIDTH, 2, &device),
                };
                let options = DdpOptions::default().first_bucket_bytes(1).bucket_bytes(200);
                let (ddp, mut model) =
                    DistributedDataParallel::wrap_with(model, &group, &options).unwrap();
                let (_, mut optimizer, rate) = optimizers().into_iter().nth(which).unwrap();
                let first = group.rank() * BATCH_PER_RANK;
                let mine = first..first + BATCH_PER_RANK;
                for (input, target) in inputs.iter().zip(&targets) {
                    let input = input.clone().slice([mine.clone()]);
                    let target = target.clone().slice([mine.clone()]);
                    let loss = model.loss(input, target);
                    let gradients = ddp.backward(loss, &model).unwrap();
                    assert_eq!(gradients.len(), 6);
                    model = optimizer.step(rate, model, gradients);
                }
                assert_eq!(ddp.stats().steps, STEPS as u64);
                (parameters_digest(&model).unwrap(), f64_values(&model))
            });

            let one = f64_values(&one);
            assert!(largest_difference(&one, &start_values) > 1e-3, "nothing was learnt");
            for (digest, values) in &ranks {
                assert_eq!(*digest, ranks[0].0, "the ranks differ in bits");
                let difference = largest_difference(values, &one);
                assert!(difference < 1e-9, "{name}, {world_size} ranks: {difference:e}");
            }
        }
    }
}

/// k micro-batches on each of N ranks are one batch of their sum.
#[test]
fn accumulated_micro_batches_equal_one_large_batch() {
    const MICRO_BATCHES: usize = 3;
    let device = device();
    let start = Mlp::new(WIDTH, 2, &device);
    for world_size in [1, 2, 3] {
        let per_rank = MICRO_BATCHES * BATCH_PER_RANK;
        let input = |step| tensor([world_size * per_rank, WIDTH], step, &device);
        let target = |step| tensor([world_size * per_rank, 1], 100 + step, &device);
        for (which, (name, mut optimizer, rate)) in optimizers().into_iter().enumerate() {
            let mut one = start.clone();
            for step in 0..STEPS {
                let loss = one.loss(input(step), target(step));
                let gradients = GradientsParams::from_grads(loss.backward(), &one);
                one = optimizer.step(rate, one, gradients);
            }
            let one = f64_values(&one);

            let ranks = on_ranks(world_size, |group| {
                let options = DdpOptions::default().first_bucket_bytes(1).bucket_bytes(200);
                let (ddp, mut model) =
                    DistributedDataParallel::wrap_with(start.clone(), &group, &options).unwrap();
                let (_, mut optimizer, rate) = optimizers().into_iter().nth(which).unwrap();
                for step in 0..STEPS {
                    let loss = |number: usize| {
                        let first = group.rank() * per_rank + number * BATCH_PER_RANK;
                        let rows = first..first + BATCH_PER_RANK;
                        let [input, target] =
                            [input(step), target(step)].map(|all| all.slice([rows.clone()]));
                        // Not a division: burn rounds its derivative to single precision.
                        model.loss(input, target) * (1.0 / MICRO_BATCHES as f64)
                    };
                    let launched = ddp.stats().buckets_launched;
                    for number in 1..MICRO_BATCHES {
                        ddp.accumulate(loss(number), &model).unwrap();
                    }
                    assert_eq!(ddp.stats().buckets_launched, launched, "nothing is sent");
                    let gradients = ddp.backward(loss(0), &model).unwrap();
                    model = optimizer.step(rate, model, gradients);
                }
                assert_eq!(ddp.stats().steps, STEPS as u64);
                (parameters_digest(&model).unwrap(), f64_values(&model))
            });
            for (digest, values) in &ranks {
                assert_eq!(*digest, ranks[0].0, "the ranks differ in bits");
                let difference = largest_difference(values, &one);
                assert!(difference < 1e-9, "{name}, {world_size} ranks: {difference:e}");
            }
        }
    }
}

fn f64_values(model: &Mlp) -> Vec<f64> {
    assert_eq!(model.head.weight.base().dtype(), DType::F64);
    let values = named_tensors(model).unwrap().into_iter().map(|tensor| match tensor.values {
        TensorValues::F64(values) => values,
        other => panic!("{} is {}", tensor.name, other.dtype()),
    });
    values.flatten().collect()
}

fn largest_difference(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}
