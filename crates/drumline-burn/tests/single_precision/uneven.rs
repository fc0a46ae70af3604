//! Ranks with different numbers of batches.

use crate::common::{on_ranks, tensor};
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
