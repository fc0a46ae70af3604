//! Tensors that every rank keeps for itself.

use crate::common::{Mlp, gradients_of, on_ranks, tensor};
use burn::{
    module::{Param, ParamId},
    optim::{GradientsParams, SgdConfig},
    tensor::{Device, Tensor, quantization::QuantScheme},
};
use drumline_burn::{DdpOptions, DistributedDataParallel, named_tensors, parameters_digest};

fn device() -> Device {
    Device::flex().autodiff()
}

fn loss(model: &Mlp, rank: usize) -> Tensor<1> {
    model.loss(tensor([3, 4], rank, &device()), Tensor::ones([3, 1], &device()))
}

#[test]
fn ignored_tensors_are_neither_sent_nor_averaged() {
    for world_size in [1, 3] {
        let ranks = on_ranks(world_size, |group| {
            let rank = group.rank();
            let own = Mlp::new(4, 2, &device()); // random
            let before = named_tensors(&own).unwrap();
            let options = DdpOptions::default().ignore(["layers.0", "head.bias"]);
            let (ddp, mut model) =
                DistributedDataParallel::wrap_with(own, &group, &options).unwrap();
            let after = named_tensors(&model).unwrap();
            for (before, after) in before.iter().zip(&after) {
                let is_kept = before.name.starts_with("layers.0.") || before.name == "head.bias";
                assert!(!is_kept || before == after, "{}", before.name);
            }
            let mut optimizer = SgdConfig::new().init();
            let mut seen = Vec::new();
            for _ in 0..3 {
                let plain = |data| {
                    let gradients = loss(&model, data).backward();
                    gradients_of(&model, &GradientsParams::from_grads(gradients, &model))
                };
                let [first, last] = [plain(rank), plain(rank + 10)];
                ddp.accumulate(loss(&model, rank), &model).unwrap();
                let gradients = ddp.backward(loss(&model, rank + 10), &model).unwrap();
                let found = gradients_of(&model, &gradients);
                // Order: two of each layer, two of the head.
                for kept in [0, 1, 5] {
                    let pairs = first[kept].iter().zip(&last[kept]);
                    let sum: Vec<f32> = pairs.map(|(a, b)| a + b).collect();
                    assert_eq!(found[kept], sum, "this rank's own");
                }
                seen.push([2, 3, 4].map(|averaged| found[averaged].clone()));
                model = optimizer.step(0.1, model, gradients);
            }
            (ddp.parameters_digest(&model).unwrap(), parameters_digest(&model).unwrap(), seen)
        });
        for (number, (digest, all, seen)) in ranks.iter().enumerate() {
            assert_eq!((digest, seen), (&ranks[0].0, &ranks[0].2));
            assert_eq!(*all == ranks[0].1, number == 0, "ignored tensors differ");
        }
    }
}

#[test]
fn a_name_that_is_not_there_is_an_error_on_every_rank() {
    for world_size in [1, 2] {
        for typo in on_ranks(world_size, |group| {
            let options = DdpOptions::default().ignore(["layers.7", "head"]);
            let model = Mlp::new(4, 2, &device());
            DistributedDataParallel::wrap_with(model, &group, &options).map(drop).unwrap_err()
        }) {
            assert!(typo.to_string().contains("no tensor or module `layers.7`"), "{typo}");
        }
    }
    for differs in on_ranks(2, |group| {
        let name = if group.rank() == 1 { "head.bias" } else { "head" };
        let options = DdpOptions::default().ignore([name]);
        let model = Mlp::new(4, 2, &device());
        DistributedDataParallel::wrap_with(model, &group, &options).map(drop).unwrap_err()
    }) {
        assert!(differs.to_string().contains("rank 1"), "{differs}");
    }
}

#[test]
fn a_tensor_of_8_bits_is_an_error_that_names_it_unless_it_is_ignored() {
    let model = || {
        let mut model = Mlp::new(4, 2, &device());
        let weight = Tensor::<2>::ones([4, 4], &Device::flex());
        let weight = weight.quantize_dynamic(&QuantScheme::default());
        model.layers[1].weight = Param::initialized(ParamId::new(), weight);
        model
    };
    for error in on_ranks(2, |group| {
        DistributedDataParallel::wrap(model(), &group).map(drop).unwrap_err().to_string()
    }) {
        assert!(error.contains("tensor `layers.1.weight` is QFloat"), "{error}");
    }
    // On one rank only: the others hear of it, too.
    for error in on_ranks(2, |group| {
        let model = if group.rank() == 0 { model() } else { Mlp::new(4, 2, &device()) };
        DistributedDataParallel::wrap(model, &group).map(drop).unwrap_err().to_string()
    }) {
        assert!(error.contains("tensor `layers.1.weight` is QFloat"), "{error}");
    }
    on_ranks(2, |group| {
        let options = DdpOptions::default().ignore(["layers.1.weight"]);
        let (ddp, model) = DistributedDataParallel::wrap_with(model(), &group, &options).unwrap();
        let mut digests = [0; 2];
        group.all_gather(&[ddp.parameters_digest(&model).unwrap()], &mut digests).unwrap();
        assert_eq!(digests[0], digests[1]);
    });
}
