//! The random numbers of shards.

use burn::tensor::{Device, Distribution, Tensor};
use drumline::ProcessGroup;
use drumline_burn::{DdpOptions, DistributedDataParallel};

use super::program::{generator, new_net};

/// The numbers that each shard of step `number` draws, and those that the program draws afterwards.
fn drawn(seed: u64, number: u64, count: usize) -> (Vec<Vec<f32>>, Vec<f32>) {
    let device = Device::flex().autodiff();
    let options = DdpOptions::default().shards(3).seed(seed);
    let group = ProcessGroup::alone();
    let (ddp, net) = DistributedDataParallel::wrap_with(new_net(), &group, &options).unwrap();
    let draw = |count: usize| -> Vec<f32> {
        Tensor::<1>::random([count], Distribution::Default, &device)
            .into_data()
            .try_into_vec()
            .unwrap()
    };
    let _guard = generator();
    device.seed(11);
    let mut of_shards = Vec::new();
    let loss = |_| {
        of_shards.push(draw(count));
        Ok(net.loss(Tensor::ones([4, 2], &device))) // with dropout
    };
    ddp.step(number, loss, &net).unwrap();
    (of_shards, draw(4))
}

#[test]
fn each_shard_has_numbers_of_its_own_and_the_program_goes_on_with_its_own() {
    let (first, after) = drawn(5, 0, 4);
    assert_eq!(drawn(5, 0, 4), (first.clone(), after.clone()));
    // What shards draw does not matter.
    assert_eq!(drawn(5, 0, 9).1, after);
    let others = [drawn(5, 1, 4), drawn(6, 0, 4)];
    assert!(others.iter().all(|(_, then)| *then == after));
    let mut all: Vec<Vec<u32>> = others
        .into_iter()
        .flat_map(|(of_shards, _)| of_shards)
        .chain(first)
        .chain([after])
        .map(|it| it.into_iter().map(f32::to_bits).collect())
        .collect();
    let count = all.len();
    all.sort();
    all.dedup();
    assert_eq!((count, all.len()), (10, 10));
}
