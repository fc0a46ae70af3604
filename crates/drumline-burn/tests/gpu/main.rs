//! Gradients on a GPU are reduced during backward. Any device of burn's cubecl backend will do: `make vulkan` takes one
//! that is software.

#![allow(clippy::panic, clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;

mod sync_batch_norm;
mod unused_parameters;

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use burn::{
    optim::{AdamConfig, GradientsParams},
    tensor::{Device, Tensor, activation::tanh},
};
use drumline::{ProcessGroup, ReduceOp};
use drumline_burn::{DdpOptions, DistributedDataParallel, parameters_digest};

use common::{Mlp, gradients_of, on_ranks, probe::probe, tensor};

fn device() -> Device {
    #[cfg(feature = "cuda")]
    let device = Device::cuda(0);
    #[cfg(all(feature = "rocm", not(feature = "cuda")))]
    let device = Device::rocm(0);
    #[cfg(not(any(feature = "cuda", feature = "rocm")))]
    let device = Device::wgpu(burn::tensor::DeviceKind::DefaultDevice);
    device.autodiff()
}

/// One bucket per parameter.
fn small_buckets() -> DdpOptions {
    DdpOptions::default().first_bucket_bytes(1).bucket_bytes(1)
}

/// A model of this rank alone, made equal to that of rank 0. Threads must not run backward on clones of one model,
/// because the graphs of clones are one. burn merges graphs under a lock that the end of a backward takes too, and
/// waits there for the backward of the other thread: both block for ever.
fn wrap(
    group: &ProcessGroup,
    options: &DdpOptions,
    width: usize,
    depth: usize,
) -> (DistributedDataParallel, Mlp) {
    DistributedDataParallel::wrap_with(Mlp::new(width, depth, &device()), group, options).unwrap()
}

/// The gradients of this rank alone, read after backward.
fn own_gradients(model: &Mlp, loss: Tensor<1>) -> Vec<Vec<f32>> {
    gradients_of(model, &GradientsParams::from_grads(loss.backward(), model))
}

#[test]
fn averages_have_the_bits_of_gradients_that_are_reduced_after_backward() {
    for (world_size, options) in
        [(2, DdpOptions::default()), (2, small_buckets()), (3, small_buckets())]
    {
        on_ranks(world_size, |group| {
            let device = device();
            let (ddp, model) = wrap(&group, &options, 24, 3);
            let input = || tensor([8, 24], group.rank(), &device);
            let loss = || model.loss(input(), tensor([8, 1], 7, &device));
            let mut after = own_gradients(&model, loss());
            for gradient in &mut after {
                group.all_reduce(gradient, ReduceOp::Avg).unwrap();
            }
            for _ in 0..3 {
                let during = ddp.backward(loss(), &model).unwrap();
                assert_eq!(gradients_of(&model, &during), after, "{world_size} ranks");
            }
        });
    }
}

/// Backward stops at each layer until the gradients of the layers above have left. If they were read only after
/// backward, it would stop for ever.
#[test]
fn each_layers_gradients_leave_before_backward_reaches_the_layer_below() {
    const LAYERS: usize = 5;
    on_ranks(2, |group| {
        let device = device();
        let (ddp, model) = wrap(&group, &small_buckets(), 8, LAYERS);
        let ddp = Arc::new(ddp);
        for step in 0..3 {
            let mut x: Tensor<2> = tensor([4, 8], 1, &device);
            for (place, layer) in model.layers.iter().enumerate() {
                // Above lie the head and layers place+1 and up, with two parameters each.
                let wanted = (step * 2 * (LAYERS + 1) + 2 * (LAYERS - place)) as u64;
                let ddp = ddp.clone();
                x = probe(tanh(layer.forward(x)), move || wait_for_buckets(&ddp, wanted));
            }
            let loss = model.head.forward(x).square().mean();
            ddp.backward(loss, &model).unwrap();
        }
        assert_eq!(ddp.stats().buckets_launched, 3 * 2 * (LAYERS as u64 + 1));
    });
}

/// Waits until `wanted` buckets have left, and not one more.
fn wait_for_buckets(ddp: &DistributedDataParallel, wanted: u64) {
    let patience = Instant::now() + Duration::from_secs(120); // only against a test that hangs
    loop {
        let launched = ddp.stats().buckets_launched;
        if launched == wanted {
            return;
        }
        assert!(launched < wanted, "{launched} buckets have left, only {wanted} can be full");
        assert!(Instant::now() < patience, "{launched} of {wanted} buckets have left");
        thread::yield_now();
    }
}

#[test]
fn a_module_used_twice_and_several_backwards_give_the_sum() {
    on_ranks(2, |group| {
        let device = device();
        let (ddp, model) = wrap(&group, &small_buckets(), 4, 1);
        let loss = |seed: usize| {
            let hidden = model.layers[0].forward(tensor([3, 4], seed, &device));
            model.head.forward(model.layers[0].forward(hidden)).square().mean()
        };
        let (first, second) = (own_gradients(&model, loss(1)), own_gradients(&model, loss(2)));
        let add = |(a, b): (&Vec<f32>, &Vec<f32>)| a.iter().zip(b).map(|(a, b)| a + b).collect();
        let sum: Vec<Vec<f32>> = first.iter().zip(&second).map(add).collect();
        for _ in 0..2 {
            ddp.accumulate(loss(1), &model).unwrap();
            let gradients = ddp.backward(loss(2), &model).unwrap();
            assert_eq!(gradients_of(&model, &gradients), sum);
        }
    });
}

#[test]
fn gradients_that_no_tap_has_seen_are_read_after_backward() {
    on_ranks(2, |group| {
        let device = device();
        let (ddp, model) = wrap(&group, &small_buckets(), 4, 1);
        // The head is read without its tap.
        let loss = || {
            let hidden = model.layers[0].forward(tensor([3, 4], 1, &device));
            let bias = model.head.bias.as_ref().unwrap().base();
            (hidden.matmul(model.head.weight.base()) + bias.unsqueeze()).square().mean()
        };
        let plain = own_gradients(&model, loss());
        let gradients = ddp.backward(loss(), &model).unwrap();
        assert_eq!(gradients_of(&model, &gradients), plain);
        // A loss that the head has no part in.
        let loss = model.layers[0].forward(tensor([3, 4], 1, &device)).mean();
        let error = ddp.backward(loss, &model).unwrap_err().to_string();
        assert!(error.contains("parameters `head.weight`, `head.bias` got no gradient"), "{error}");
    });
}

#[test]
fn ranks_stay_equal_in_training_and_the_model_learns() {
    let ends = on_ranks(2, |group| {
        let device = device();
        let (ddp, mut model) = wrap(&group, &DdpOptions::default(), 16, 2);
        let mut optimizer = AdamConfig::new().init();
        let mut losses = Vec::new();
        for step in 0..20 {
            let input = tensor([8, 16], 10 * (step % 4) + group.rank(), &device);
            let loss = model.loss(input, Tensor::ones([8, 1], &device));
            losses.push(loss.clone().into_scalar::<f32>());
            let gradients = ddp.backward(loss, &model).unwrap();
            model = optimizer.step(0.01, model, gradients);
        }
        assert!(losses[19] < losses[0] / 2.0, "{losses:?}");
        parameters_digest(&model).unwrap()
    });
    assert_eq!(ends[0], ends[1]);
}
