//! Loss scales that adapt alike on all ranks.

use crate::common::{Mlp, on_ranks, tensor};
use burn::{
    optim::SgdConfig,
    tensor::{Device, Tensor},
};
use drumline_burn::{DistributedDataParallel, GradScaler, LossScale, parameters_digest};

/// Trains for some steps. In step 3 rank 1 has an infinite loss. Returns a digest, the scale of each step, and the
/// steps that were made.
fn train(start: &Mlp, scaler: GradScaler) -> Vec<(u64, Vec<f64>, Vec<usize>)> {
    on_ranks(2, |group| {
        let device = Device::flex().autodiff();
        let (ddp, mut model) = DistributedDataParallel::wrap(start.clone(), &group).unwrap();
        let (mut optimizer, mut scaler) = (SgdConfig::new().init(), scaler.clone());
        let (mut scales, mut made) = (Vec::new(), Vec::new());
        for step in 0..6 {
            let input = tensor([3, 8], 10 * step + group.rank(), &device);
            let mut loss = model.loss(input, Tensor::ones([3, 1], &device));
            if (step, group.rank()) == (3, 1) {
                loss = loss * f32::INFINITY;
            }
            scales.push(scaler.loss_scale().value());
            let mut gradients = ddp.backward(scaler.scale(loss), &model).unwrap();
            if scaler.unscale(&mut gradients, &model).unwrap() {
                made.push(step);
                model = optimizer.step(0.1, model, gradients);
            }
            scaler.update();
        }
        (parameters_digest(&model).unwrap(), scales, made)
    })
}

#[test]
fn an_infinity_on_one_rank_skips_the_step_on_all_of_them() {
    let start = Mlp::new(8, 2, &Device::flex().autodiff());
    let scale = LossScale::default().init_scale(8.0).growth_interval(2);
    let ranks = train(&start, GradScaler::new(scale));
    assert_eq!(ranks[0], ranks[1]);
    assert_eq!(ranks[0].1, [8.0, 8.0, 16.0, 16.0, 8.0, 8.0]);
    assert_eq!(ranks[0].2, [0, 1, 2, 4, 5]);
    // Powers of two change no bits of f32.
    let other = train(&start, GradScaler::new(LossScale::default()));
    assert_eq!(ranks[0].0, other[0].0);
}
