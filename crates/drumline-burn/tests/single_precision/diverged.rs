//! Ranks that drift apart: found where the second step begins, or when the options say.

use crate::common::{Mlp, gradients_of, on_ranks, tensor};
use burn::{
    module::{Module, Param},
    nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig},
    optim::{ModuleOptimizer, SgdConfig},
    tensor::{Device, Tensor, quantization::QuantScheme},
};
use drumline::ProcessGroup;
use drumline_burn::{
    DdpOptions, DistributedDataParallel, ErrorKind, Result, ShardedOptimizer, TensorValues,
    Wrapped, backward_all, load_named_tensors, named_tensors, shadow_all,
};

fn device() -> Device {
    Device::flex().autodiff()
}

#[derive(Module, Debug)]
struct Normed {
    layers: Mlp,
    norm: BatchNorm,
}

impl Normed {
    fn new() -> Self {
        let norm = BatchNormConfig::new(4).init(&device());
        Self { layers: Mlp::new(4, 2, &device()), norm }
    }

    /// Changes the running statistics of the rank.
    fn loss(&self, seed: usize) -> Tensor<1> {
        let input = self.norm.forward(tensor::<2>([3, 4], seed, &device()));
        self.layers.forward(input).square().mean()
    }
}

/// The model with other values of one of its tensors.
fn with(model: Normed, name: &str, value: impl Fn(&mut f32)) -> Normed {
    let mut tensors = named_tensors(&model).unwrap();
    let tensor = tensors.iter_mut().find(|tensor| tensor.name == name).unwrap();
    let TensorValues::F32(values) = &mut tensor.values else { panic!() };
    values.iter_mut().for_each(value);
    load_named_tensors(model, tensors).unwrap()
}

/// Makes up to six steps, in which `spoil` may change the model, and choose the learning rate of a step. Returns each
/// rank's error, and the number of its steps.
fn train(
    options: &DdpOptions,
    steps: impl Fn(usize) -> usize + Sync,
    spoil: impl Fn(Normed, usize, usize) -> (Normed, f64) + Sync,
) -> Vec<(Option<String>, usize)> {
    on_ranks(3, |group| {
        let rank = group.rank();
        let (ddp, mut model) =
            DistributedDataParallel::wrap_with(Normed::new(), &group, options).unwrap();
        let mut optimizer = SgdConfig::new().init();
        for step in 0..6 {
            let rate;
            (model, rate) = spoil(model, rank, step);
            let gradients = if step < steps(rank) {
                let first = ddp.accumulate(model.loss(100 * rank + step), &model);
                first.and_then(|()| ddp.backward(model.loss(step), &model).map(Some))
            } else {
                ddp.shadow(&model)
            };
            match gradients {
                Ok(Some(gradients)) => model = optimizer.step(rate, model, gradients),
                Ok(None) => return (None, step),
                Err(error) => return (Some(error.to_string()), step),
            }
        }
        (None, 6)
    })
}

fn assert_found(ranks: &[(Option<String>, usize)], step: usize, wanted: &str) {
    for (error, steps) in ranks {
        let error = error.as_ref().unwrap();
        assert!(error.contains(wanted), "{error}");
        assert_eq!(*steps, step, "{error}");
    }
}

#[test]
fn a_rank_that_drifts_apart_is_named_with_the_parameter() {
    let default = DdpOptions::default();
    let rate = |model: Normed, rank, _| (model, if rank == 1 { 0.2 } else { 0.1 });
    let wanted = "after step 1, parameter `layers.layers.0.weight` (and 7 more) on rank 1 differs from that of rank 0";
    assert_found(&train(&default, |_| 6, rate), 1, wanted);
    // Whoever has data.
    assert_found(&train(&default, |rank| [1, 6, 0][rank], rate), 1, wanted);

    let loaded = |model, rank, step| match (rank, step) {
        (2, 0) => (with(model, "layers.head.bias", |it| *it = 7.0), 0.1),
        _ => (model, 0.1),
    };
    let wanted = "after step 1, parameter `layers.head.bias` on rank 2 differs from that of rank 0";
    assert_found(&train(&default.clone().ignore(["norm"]), |_| 6, loaded), 1, wanted);

    let late = |model, rank, step| (model, if rank == 0 && step == 2 { 0.2 } else { 0.1 });
    assert!(train(&default, |_| 6, late).iter().all(|it| *it == (None, 6)), "not looked at");
    let wanted = "after step 4, parameter `layers.layers.0.weight` (and 7 more) on rank 0 differs from that of rank 1";
    assert_found(&train(&default.check_every(2), |_| 6, late), 4, wanted);
}

#[test]
fn what_may_differ_is_no_fault() {
    let each = DdpOptions::default().check_every(1);
    let nan = |model, rank: usize, step| match step {
        // As sums may have other payloads.
        1 => (
            with(model, "layers.head.weight", |it| *it = f32::from_bits(0x7fc0_0000 + rank as u32)),
            0.1,
        ),
        _ => (model, 0.1),
    };
    let own =
        |model, rank: usize, _| (with(model, "layers.head.weight", |it| *it = rank as f32), 0.1);
    for steps in [[6, 6, 6], [4, 2, 3], [0, 0, 3]] {
        let most = *steps.iter().max().unwrap();
        let ends = |ranks: Vec<(Option<String>, usize)>| {
            assert!(ranks.iter().all(|it| *it == (None, most)), "{ranks:?}");
        };
        ends(train(&each, |rank| steps[rank], |model, _, _| (model, 0.1)));
        ends(train(&each, |rank| steps[rank], nan));
        // The other layers get other gradients on each rank, and the same averages.
        ends(train(&each.clone().ignore(["layers.head"]), |rank| steps[rank], own));
    }
}

#[test]
fn the_model_from_before_wrapping_is_not_the_one_to_train() {
    for error in on_ranks(2, |group| {
        let mut own = Mlp::new(4, 1, &device()); // random
        let (ddp, _wrapped) = DistributedDataParallel::wrap(own.clone(), &group).unwrap();
        let mut optimizer = SgdConfig::new().init();
        let mut step = || -> Result<()> {
            let loss = own.forward(tensor([3, 4], group.rank(), &device())).square().mean();
            let gradients = ddp.backward(loss, &own)?;
            own = optimizer.step(0.1, own.clone(), gradients);
            Ok(())
        };
        step().unwrap();
        step().unwrap_err().to_string()
    }) {
        assert!(error.contains("train the model that was wrapped"), "{error}");
        assert!(error.contains("`layers.0.weight` (and 3 more) on rank 1 differs"), "{error}");
    }
}

#[test]
fn after_the_error_nothing_is_left_of_the_step() {
    on_ranks(2, |group| {
        let rank = group.rank();
        let (ddp, mut model) =
            DistributedDataParallel::wrap(Mlp::new(4, 1, &device()), &group).unwrap();
        let loss = |model: &Mlp, seed| model.forward(tensor([3, 4], seed, &device())).mean();
        let gradients = ddp.backward(loss(&model, rank), &model).unwrap();
        let good = model.clone();
        model = SgdConfig::new().init().step(0.1 + rank as f64, model, gradients);
        ddp.accumulate(loss(&model, 1), &model).unwrap();
        let error = ddp.backward(loss(&model, 2), &model).map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ParametersDiffer, "{error}");
        let found = ddp.backward(loss(&good, rank), &good).unwrap();
        let mut sum = [0, 1].map(|rank| {
            let own = loss(&good, rank).backward();
            let own = burn::optim::GradientsParams::from_grads(own, &good);
            gradients_of(&good, &own)[0].clone()
        });
        let [first, second] = &mut sum;
        first.iter_mut().zip(second).for_each(|(a, b)| *a = (*a + *b) / 2.0);
        assert_eq!(gradients_of(&good, &found)[0], sum[0]);
    });
}

#[test]
fn models_of_one_loss_are_compared_together() {
    for ends_with_shadow in [false, true] {
        for error in on_ranks(2, |group| {
            let rank = group.rank();
            let wrap = || DistributedDataParallel::wrap(Mlp::new(4, 1, &device()), &group).unwrap();
            let ((ddp, first), (other, mut second)) = (wrap(), wrap());
            let mut optimizer: ModuleOptimizer = SgdConfig::new().init();
            let both = |second: &Mlp| {
                let input = tensor([3, 4], rank, &device());
                let loss = first.forward(input.clone()).mean() + second.forward(input).mean();
                let models: [Wrapped<'_>; 2] = [ddp.with(&first), other.with(second)];
                backward_all(loss, models)
            };
            let [_, gradients] = both(&second).unwrap();
            second = optimizer.step(0.1 + rank as f64, second, gradients);
            match ends_with_shadow && rank == 1 {
                true => shadow_all([ddp.with(&first), other.with(&second)]).map(drop),
                false => both(&second).map(drop),
            }
            .unwrap_err()
            .to_string()
        }) {
            let wanted = "parameter `layers.0.weight of model 2` (and 3 more) on rank 1 differs";
            assert!(error.contains(wanted), "{error}");
        }
    }
}

/// Nothing is known of its value, so it does not count as equal: not even if no rank can read it.
#[test]
fn a_parameter_that_can_be_read_no_more_is_named_on_every_rank() {
    for quantized_on in [[true, true], [false, true]] {
        let told = on_ranks(2, |group| {
            let layer = LinearConfig::new(4, 4).init(&device());
            let (ddp, mut model): (_, Linear) =
                DistributedDataParallel::wrap(layer, &group).unwrap();
            let loss = |model: &Linear| model.forward(tensor([3, 4], 1, &device())).mean();
            drop(ddp.backward(loss(&model), &model).unwrap());
            let next = loss(&model);
            if quantized_on[group.rank()] {
                let weight = model.weight.val().inner();
                model.weight = Param::from_tensor(weight.quantize_dynamic(&QuantScheme::default()));
            }
            ddp.backward(next, &model).map(drop).unwrap_err()
        });
        for (error, is_quantized) in told.iter().zip(quantized_on) {
            assert!(error.to_string().contains("tensor `weight` is QFloat"), "{error}");
            match is_quantized {
                true => assert_eq!(error.kind(), ErrorKind::Model, "{error}"),
                false => assert_eq!(error.kind(), ErrorKind::OtherRanks, "{error}"),
            }
        }
    }
}

#[test]
fn the_learning_rates_of_a_sharded_optimizer_are_compared() {
    for error in on_ranks(3, |group: ProcessGroup| {
        let model = Mlp::new(4, 1, &device());
        let (mut optimizer, model) =
            ShardedOptimizer::wrap(model, SgdConfig::new(), &group).unwrap();
        let loss = model.forward(tensor([3, 4], 1, &device())).mean();
        let gradients = optimizer.backward(loss, &model).unwrap();
        let rate = if group.rank() == 2 { 0.2 } else { 0.1 };
        optimizer.step(rate, model, gradients).map(drop).unwrap_err().to_string()
    }) {
        let wanted = "on rank 2: the learning rate of `layers.0.weight` is 0.2, but rank 0 has 0.1";
        assert!(error.contains(wanted), "{error}");
    }
}

/// Freezes a layer of a model that is trained.
fn freeze(mut model: Mlp, layer: usize) -> Mlp {
    model.layers[layer] = model.layers[layer].clone().no_grad();
    model
}

#[test]
fn ranks_with_other_buffers_are_named() {
    // As many bytes on each rank.
    for frozen in [[0, 1, 0], [0, 0, 1]] {
        for error in on_ranks(3, |group| {
            let (ddp, model) =
                DistributedDataParallel::wrap(Mlp::new(4, 2, &device()), &group).unwrap();
            let model = freeze(model, frozen[group.rank()]);
            ddp.sync_buffers(model).map(drop).unwrap_err().to_string()
        }) {
            let rank = frozen.iter().position(|it| *it == 1).unwrap();
            let wanted =
                format!("rank {rank} has buffer `layers.1.weight` f32[4, 4] where rank 0 has");
            assert!(error.contains(&wanted), "{error}");
        }
    }
}

#[test]
fn buffers_are_those_of_rank_0_and_parameters_stay_also_if_the_optimizer_is_sharded() {
    on_ranks(3, |group| {
        let options = DdpOptions::default().check_every(1);
        let (mut optimizer, mut model) =
            ShardedOptimizer::wrap_with(Normed::new(), SgdConfig::new(), &group, &options).unwrap();
        for step in 0..3 {
            optimizer.accumulate(model.loss(10 * group.rank()), &model).unwrap();
            let gradients = optimizer.backward(model.loss(group.rank() + step), &model).unwrap();
            model = optimizer.step(0.1, model, gradients).unwrap();
            let before = named_tensors(&model).unwrap();
            model = optimizer.sync_buffers(model).unwrap();
            for (before, after) in before.into_iter().zip(named_tensors(&model).unwrap()) {
                let is_buffer = after.name.contains("running");
                assert!(is_buffer || before == after, "{}", after.name);
            }
            let mut digests = [0; 3];
            let own = optimizer.parameters_digest(&model).unwrap();
            group.all_gather(&[own], &mut digests).unwrap();
            assert_eq!(digests, [own; 3]);
        }
        while optimizer.shadow(&model).unwrap().is_some() {}
    });
}
