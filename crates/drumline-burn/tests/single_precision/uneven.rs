//! Ranks with different numbers of batches.

use crate::common::{Mlp, gradients_of, on_ranks, tensor};
use burn::{
    module::Module,
    nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig},
    optim::{GradientsParams, SgdConfig},
    tensor::{Device, Tensor},
};
use drumline_burn::{
    DdpOptions, DistributedDataParallel, Divisor, NamedTensor, named_tensors, parameters_digest,
};

fn device() -> Device {
    Device::flex().autodiff()
}

#[derive(Module, Debug)]
struct Normed {
    linear: Linear,
    norm: BatchNorm,
}

impl Normed {
    fn new() -> Self {
        let linear = LinearConfig::new(4, 4).init(&device());
        Self { linear, norm: BatchNormConfig::new(4).init(&device()) }
    }

    fn loss(&self, rank: usize, step: usize) -> Tensor<1> {
        let input: Tensor<2> = tensor([6, 4], 100 * rank + step, &device());
        (self.norm.forward(self.linear.forward(input)) - 1).square().mean()
    }
}

fn running_mean(model: &Normed) -> NamedTensor {
    let tensors = named_tensors(model).unwrap();
    tensors.into_iter().find(|tensor| tensor.name == "norm.running_mean").unwrap()
}

fn weight_of(model: &Normed, gradients: &GradientsParams) -> Vec<f32> {
    let weight = gradients.get::<2>(model.linear.weight.id).unwrap();
    weight.into_data().try_into_vec().unwrap()
}

/// Trains on ranks with `batches` batches, and checks each step against the definition.
fn train(batches: [usize; 4], divisor: Divisor) {
    let most = *batches.iter().max().unwrap();
    let ranks = on_ranks(batches.len(), |group| {
        let rank = group.rank();
        let options = DdpOptions::default().divisor(divisor).first_bucket_bytes(1);
        let (ddp, mut model) =
            DistributedDataParallel::wrap_with(Normed::new(), &group, &options).unwrap();
        let mut optimizer = SgdConfig::new().init();
        let (mut means, mut own_means) = (Vec::new(), Vec::new());
        for step in 0.. {
            model = ddp.sync_buffers(model).unwrap();
            means.push(running_mean(&model));
            // What each rank with data would find by itself.
            let plain = |rank: usize| {
                let model = model.clone();
                let own = model.loss(rank, step).backward();
                weight_of(&model, &GradientsParams::from_grads(own, &model))
            };
            let active: Vec<usize> = (0..4).filter(|&rank| batches[rank] > step).collect();
            let divided_by = match divisor {
                Divisor::ActiveRanks => active.len(),
                _ => batches.len(),
            };
            let mut wanted = vec![0.0_f64; 16];
            for &rank in &active {
                let pairs = wanted.iter_mut().zip(plain(rank));
                pairs.for_each(|(sum, own)| *sum += f64::from(own) / divided_by as f64);
            }
            let gradients = match step < batches[rank] {
                true => Some(ddp.backward(model.loss(rank, step), &model).unwrap()),
                false => ddp.shadow(&model).unwrap(),
            };
            let Some(gradients) = gradients else {
                assert_eq!(step, most, "ends when no rank has data");
                break;
            };
            for (found, wanted) in weight_of(&model, &gradients).into_iter().zip(wanted) {
                assert!((f64::from(found) - wanted).abs() < 1e-6, "{divisor:?}, step {step}");
            }
            model = optimizer.step(0.1, model, gradients);
            own_means.push(running_mean(&model));
        }
        assert_eq!(ddp.stats().steps, most as u64);
        (parameters_digest(&model).unwrap(), means, own_means)
    });
    assert!(ranks.iter().all(|rank| rank.0 == ranks[0].0), "the ranks differ");
    let means = &ranks[0].1;
    assert!(ranks.iter().all(|rank| rank.1 == *means));
    for step in 0..most {
        let lowest = (0..4).find(|&rank| batches[rank] > step).unwrap();
        assert_eq!(means[step + 1], ranks[lowest].2[step], "those of the lowest rank with data");
    }
}

#[test]
fn ranks_with_10_7_3_and_0_batches_end_together() {
    for divisor in [Divisor::InitialWorld, Divisor::ActiveRanks] {
        train([10, 7, 3, 0], divisor);
        train([0, 3, 10, 7], divisor);
    }
}

/// The gradients of one rank's batch, by parameter.
fn plain(model: &Mlp, rank: usize) -> Vec<Vec<f32>> {
    let gradients = loss(&model.clone(), rank).backward();
    gradients_of(model, &GradientsParams::from_grads(gradients, model))
}

fn loss(model: &Mlp, rank: usize) -> Tensor<1> {
    model.forward(tensor([3, 4], rank, &device())).square().mean()
}

#[test]
fn micro_batches_whose_step_a_rank_did_not_end_are_data() {
    let start = Mlp::new(4, 1, &device()); // the same on all ranks, also what is ignored
    for world_size in 1..=3 {
        for divisor in [Divisor::InitialWorld, Divisor::ActiveRanks] {
            on_ranks(world_size, |group| {
                let rank = group.rank();
                let options = DdpOptions::default().divisor(divisor).ignore(["head"]);
                let (ddp, model) =
                    DistributedDataParallel::wrap_with(start.clone(), &group, &options).unwrap();
                let averages = |ranks: usize| -> Vec<f32> {
                    let own = (0..ranks).map(|rank| plain(&model, rank)[0].clone());
                    let sum = own.reduce(|a, b| a.iter().zip(&b).map(|(a, b)| a + b).collect());
                    let divisor = if divisor == Divisor::ActiveRanks { ranks } else { world_size };
                    sum.unwrap().iter().map(|it| it / divisor as f32).collect()
                };
                let check = |gradients: &GradientsParams, ranks| {
                    let found = gradients_of(&model, gradients);
                    for (found, wanted) in found[0].iter().zip(averages(ranks)) {
                        assert!(
                            (found - wanted).abs() < 1e-6,
                            "{divisor:?}: {found}, not {wanted}"
                        );
                    }
                    assert_eq!(found[2], plain(&model, rank)[2], "this rank keeps its own");
                };
                for _epoch in 0..2 {
                    // The last rank has no data for the end of its step.
                    let gradients = if rank + 1 == world_size {
                        ddp.accumulate(loss(&model, rank), &model).unwrap();
                        ddp.shadow(&model).unwrap().unwrap()
                    } else {
                        ddp.backward(loss(&model, rank), &model).unwrap()
                    };
                    check(&gradients, world_size);
                    assert!(ddp.shadow(&model).unwrap().is_none());
                }
                let gradients = ddp.backward(loss(&model, rank), &model).unwrap();
                check(&gradients, world_size);
                assert_eq!(ddp.stats().steps, 3);
            });
        }
    }
}
