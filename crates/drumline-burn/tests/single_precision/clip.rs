//! Clipping by the norm of all gradients, as torch does it.

use crate::common::{Mlp, gradients_of, on_ranks, tensor};
use burn::{
    optim::GradientsParams,
    tensor::{Device, Tensor},
};
use drumline::ProcessGroup;
use drumline_burn::{ClipGradNorm, DistributedDataParallel, ErrorKind, clip_grad_norm};

/// Gradients of a step of this rank.
fn backward(
    ddp: &DistributedDataParallel,
    model: &Mlp,
    factor: f32,
    device: &Device,
) -> GradientsParams {
    let input = tensor([3, 8], ddp.group().rank(), device);
    let loss = model.loss(input, Tensor::ones([3, 1], device)) * factor;
    ddp.backward(loss, model).unwrap()
}

fn norm_of(gradients: &[Vec<f32>]) -> f64 {
    gradients.iter().flatten().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

fn clips_as_torch_does(device: &Device) {
    let start = Mlp::new(8, 3, device);
    for world_size in [1, 3] {
        let ranks = on_ranks(world_size, |group| {
            let (ddp, model) = DistributedDataParallel::wrap(start.clone(), &group).unwrap();
            let mut seen = Vec::new();
            for max_norm in [1e-3, 0.5, 1e9] {
                let mut gradients = backward(&ddp, &model, 10.0, device);
                let before = gradients_of(&model, &gradients);
                let norm = clip_grad_norm(&mut gradients, &model, max_norm).unwrap();
                let after = gradients_of(&model, &gradients);

                assert!((norm - norm_of(&before)).abs() < 1e-12 * norm, "in double precision");
                let coefficient = (max_norm / (norm + 1e-6)).min(1.0) as f32;
                assert_eq!(coefficient == 1.0, max_norm == 1e9);
                for (before, after) in before.iter().flatten().zip(after.iter().flatten()) {
                    assert!((before * coefficient - after).abs() <= 1e-6 * before.abs());
                }
                seen.push((norm.to_bits(), after));
            }
            seen
        });
        assert!(ranks.iter().all(|rank| *rank == ranks[0]), "the ranks differ");
    }
}

#[test]
fn all_gradients_are_scaled_by_the_norm_of_all_of_them_alike_on_all_ranks() {
    clips_as_torch_does(&Device::flex().autodiff());
}

#[cfg(feature = "ndarray")]
#[test]
fn gradients_of_other_devices_are_clipped_too() {
    clips_as_torch_does(&crate::other_device());
}

#[test]
fn a_norm_that_is_not_finite_is_an_error_only_if_asked_for() {
    let device = Device::flex().autodiff();
    let group = ProcessGroup::alone();
    let (ddp, model) = DistributedDataParallel::wrap(Mlp::new(8, 1, &device), &group).unwrap();
    for factor in [f32::NAN, f32::INFINITY] {
        let mut gradients = backward(&ddp, &model, factor, &device);
        let before = gradients_of(&model, &gradients);
        let strict = ClipGradNorm::new(1.0).error_if_nonfinite(true);
        let error = strict.clip(&mut gradients, &model).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NonFiniteNorm, "{error}");
        let bits = |gradients: Vec<Vec<f32>>| -> Vec<u32> {
            gradients.into_iter().flatten().map(f32::to_bits).collect()
        };
        assert_eq!(bits(gradients_of(&model, &gradients)), bits(before), "left as they were");

        assert!(!clip_grad_norm(&mut gradients, &model, 1.0).unwrap().is_finite());
        let after = gradients_of(&model, &gradients);
        assert!(after.iter().flatten().any(|x| x.is_nan()), "infinity times 0, as with torch");
    }
    let mut gradients = backward(&ddp, &model, 1.0, &device);
    let zero = ClipGradNorm::new(1.0).norm_type(0.0).clip(&mut gradients, &model).unwrap_err();
    assert!(zero.to_string().contains("an order above zero, not 0"), "{zero}");
}
