//! Each gradient is copied once into its bucket. Its average comes back to the memory in which burn computed it, where
//! burn may write to it. A rank that computed none gets the bucket itself.

use crate::common::{Mlp, on_ranks, tensor};
use burn::{
    optim::{AdamConfig, GradientsParams},
    tensor::{Device, Tensor},
};
use drumline_burn::{DdpOptions, DistributedDataParallel, Wire};

const WIDTH: usize = 16;

fn device() -> Device {
    Device::flex().autodiff()
}

/// Address and length of a gradient in memory.
fn place<const D: usize>(gradient: Option<Tensor<D>>) -> (usize, usize) {
    // burn moves the memory out of a tensor that nobody else uses. A copy would lie in memory of its own.
    let data = gradient.unwrap().into_data();
    (data.bytes().as_ptr() as usize, data.bytes().len())
}

/// Those of all gradients, in the order of memory.
fn places(model: &Mlp, mut gradients: GradientsParams) -> Vec<(usize, usize)> {
    let mut places = Vec::new();
    for layer in model.layers.iter().chain([&model.head]) {
        places.push(place(gradients.remove::<2>(layer.weight.id)));
        places.push(place(gradients.remove::<1>(layer.bias.as_ref().unwrap().id)));
    }
    places.sort_unstable();
    places
}

fn target() -> Tensor<2> {
    Tensor::ones([3, 1], &device())
}

#[test]
fn one_copy_of_each_gradient_in_and_its_average_is_burns_to_write() {
    let start = Mlp::new(WIDTH, 3, &device());
    for wire in [Wire::AsIs, Wire::Bf16] {
        on_ranks(2, |group| {
            let options = DdpOptions::default().wire(wire);
            let (ddp, model) =
                DistributedDataParallel::wrap_with(start.clone(), &group, &options).unwrap();
            for data in 0..3 {
                let input = tensor([3, WIDTH], data, &device());
                let loss = model.loss(input, target());
                let mut gradients = ddp.backward(loss, &model).unwrap();
                for layer in &model.layers {
                    let data = gradients.remove::<2>(layer.weight.id).unwrap().into_data();
                    let address = data.bytes().as_ptr();
                    let gradient = Tensor::<2>::from_data(data, &Device::flex());
                    let doubled = (gradient * 2).into_data();
                    assert_eq!(doubled.bytes().as_ptr(), address, "burn need not copy it");
                }
            }
            let bytes = 4 * (3 * (WIDTH + 1) * WIDTH + WIDTH + 1);
            assert_eq!(ddp.stats().bytes_copied, 3 * bytes as u64, "one copy in");
        });
    }
}

#[test]
fn a_rank_without_gradients_gets_the_averages_in_the_bucket() {
    let start = Mlp::new(WIDTH, 3, &device());
    for wire in [Wire::AsIs, Wire::Bf16] {
        on_ranks(2, |group| {
            let options = DdpOptions::default().bucket_bytes(1 << 20).wire(wire); // one bucket
            let (ddp, model) =
                DistributedDataParallel::wrap_with(start.clone(), &group, &options).unwrap();
            // Rank 1 has no data.
            let step = |data: usize| match group.rank() {
                0 => {
                    let loss = model.loss(tensor([3, WIDTH], data, &device()), target());
                    ddp.backward(loss, &model).unwrap()
                }
                _ => ddp.shadow(&model).unwrap().unwrap(),
            };
            drop(step(0)); // after this the buckets are planned anew
            if group.rank() == 0 {
                (1..=4).for_each(|data| drop(step(data)));
                return;
            }
            let first = places(&model, step(1));
            let bytes = 4 * (3 * (WIDTH + 1) * WIDTH + WIDTH + 1);
            assert_eq!(first.iter().map(|(_, length)| length).sum::<usize>(), bytes);
            for pair in first.windows(2) {
                assert_eq!(pair[0].0 + pair[0].1, pair[1].0, "side by side, as in the bucket");
            }
            assert_eq!(places(&model, step(2)), first, "the bucket is used again");

            // A gradient that is kept keeps its bucket.
            let kept = step(3);
            let id = model.head.weight.id;
            let values = |gradients: &GradientsParams| -> Vec<f32> {
                gradients.get::<2>(id).unwrap().to_data().try_into_vec().unwrap()
            };
            let before = values(&kept);
            let other = step(4);
            assert_ne!(values(&other), before);
            assert_ne!(places(&model, other), first);
            assert_eq!(values(&kept), before);
        });
    }
}

#[test]
fn what_burn_writes_to_a_gradient_stays_out_of_the_bucket() {
    let start = Mlp::new(WIDTH, 3, &device());
    on_ranks(2, |group| {
        let (ddp, mut model) = DistributedDataParallel::wrap(start.clone(), &group).unwrap();
        let mut optimizer = AdamConfig::new().init();
        for step in 0..4 {
            let input = tensor([3, WIDTH], step, &device());
            let mut gradients =
                ddp.backward(model.loss(input, Tensor::ones([3, 1], &device())), &model).unwrap();
            let id = model.head.weight.id;
            let gradient = gradients.remove::<2>(id).unwrap();
            let twin = gradients.get::<1>(model.head.bias.as_ref().unwrap().id).unwrap();
            let twin_before: Vec<f32> = twin.to_data().try_into_vec().unwrap();
            let before: Vec<f32> = gradient.to_data().try_into_vec().unwrap();
            let doubled: Vec<f32> = (gradient * 2).into_data().try_into_vec().unwrap();
            assert_eq!(doubled, before.iter().map(|x| 2.0 * x).collect::<Vec<_>>());
            assert_eq!(twin.into_data().try_into_vec::<f32>().unwrap(), twin_before);
            gradients.register(id, Tensor::<2>::zeros([WIDTH, 1], &Device::flex()));
            model = optimizer.step(0.01, model, gradients);
        }
    });
}
