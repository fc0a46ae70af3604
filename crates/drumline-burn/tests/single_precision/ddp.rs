//! Data-parallel training of burn models, with ranks as threads.

use crate::common::{Mlp, gradients_of, on_ranks, single_weight, tensor};
use burn::{
    module::{Module, Param},
    nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig},
    optim::{GradientsParams, SgdConfig},
    tensor::{Device, Int, Tensor},
};
use drumline::{ProcessGroup, metrics::communication_time};
use drumline_burn::{
    DdpOptions, DistributedDataParallel, Error, NamedTensor, TensorValues, load_named_tensors,
    named_tensors, parameters_digest,
};

fn device() -> Device {
    Device::flex().autodiff()
}

#[test]
fn rank_0_wins_at_construction_and_gradients_are_averaged() {
    // loss = (w·1 - 1)², so the gradient is 2·w - 2. With a rate of 1 the weight goes 2, 0, 2.
    on_ranks(2, |group| {
        let device = device();
        let weight = if group.rank() == 0 { 2.0 } else { 200.0 };
        let (ddp, mut model) =
            DistributedDataParallel::wrap(single_weight(weight, &device), &group).unwrap();
        let mut optimizer = SgdConfig::new().init();
        for (before, gradient) in [(2.0, 2.0), (0.0, -2.0), (2.0, 2.0)] {
            assert_eq!(model.weight.base().into_scalar::<f32>(), before);
            let loss = (model.forward(Tensor::<2>::ones([1, 1], &device)) - 1).square().mean();
            let gradients = ddp.backward(loss, &model).unwrap();
            let found = gradients.get::<2>(model.weight.id).unwrap().into_scalar::<f32>();
            assert_eq!(found, gradient);
            model = optimizer.step(1.0, model, gradients);
        }
        // Targets 1 and 2 from w = 0: gradients -2 and -4 on the two ranks.
        let target = 1 + group.rank() as i32;
        model.weight = model.weight.map(|w| w.detach().zeros_like().require_grad());
        let (ddp, model) = DistributedDataParallel::wrap(ddp.unwrap(model), &group).unwrap();
        let loss = (model.forward(Tensor::<2>::ones([1, 1], &device)) - target).square().mean();
        let gradients = ddp.backward(loss, &model).unwrap();
        assert_eq!(gradients.get::<2>(model.weight.id).unwrap().into_scalar::<f32>(), -3.0);
    });
}

#[test]
fn tapped_gradients_have_the_bits_of_a_plain_backward() {
    let device = device();
    let model = Mlp::new(16, 3, &device);
    let loss = |model: &Mlp| model.loss(tensor([8, 16], 1, &device), tensor([8, 1], 2, &device));
    let plain = GradientsParams::from_grads(loss(&model).backward(), &model);
    let plain = gradients_of(&model, &plain);
    // The average of equal gradients is exact for one, two and four ranks.
    for world_size in [1, 2, 4] {
        for gradients in on_ranks(world_size, |group| {
            let (ddp, model) = DistributedDataParallel::wrap(model.clone(), &group).unwrap();
            let gradients = ddp.backward(loss(&model), &model).unwrap();
            gradients_of(&model, &gradients)
        }) {
            assert_eq!(gradients, plain, "{world_size} ranks");
        }
    }
}

#[test]
fn the_bits_do_not_depend_on_the_bucket_size() {
    let device = device();
    let start = Mlp::new(384, 5, &device); // 3 MiB of gradients: one to 12 buckets
    let input = tensor([3 * 4, 384], 1, &device);
    let train = |bucket_bytes: usize| {
        let digests = on_ranks(3, |group| {
            let options =
                DdpOptions::default().first_bucket_bytes(bucket_bytes).bucket_bytes(bucket_bytes);
            let (ddp, mut model) =
                DistributedDataParallel::wrap_with(start.clone(), &group, &options).unwrap();
            let mut optimizer = burn::optim::AdamConfig::new().init();
            let mine = group.rank() * 4..group.rank() * 4 + 4;
            for _ in 0..2 {
                let loss =
                    model.loss(input.clone().slice([mine.clone()]), Tensor::ones([4, 1], &device));
                let gradients = ddp.backward(loss, &model).unwrap();
                model = optimizer.step(0.01, model, gradients);
            }
            parameters_digest(&model).unwrap()
        });
        assert!(digests.iter().all(|digest| *digest == digests[0]));
        digests[0]
    };
    let wanted = train(1);
    assert_ne!(wanted, parameters_digest(&start).unwrap());
    for bucket_bytes in [5000, 1 << 20, 5 << 20, 25 << 20] {
        assert_eq!(train(bucket_bytes), wanted, "buckets of {bucket_bytes} bytes");
    }
}

#[test]
fn different_models_are_refused_on_every_rank_by_name() {
    let answers = on_ranks(3, |group| {
        let width = if group.rank() == 1 { 12 } else { 16 };
        let model = Mlp::new(width, 2, &device());
        DistributedDataParallel::wrap(model, &group).map(drop).unwrap_err().to_string()
    });
    for answer in answers {
        let wanted = "rank 1: parameter `layers.0.weight` is f32[12, 12], rank 0 has f32[16, 16]";
        assert!(answer.contains(wanted), "{answer}");
    }
}

#[test]
fn a_module_used_twice_gets_the_sum_of_both_uses() {
    let device = device();
    let model = Mlp::new(4, 1, &device);
    let loss = |model: &Mlp| {
        let hidden = model.layers[0].forward(tensor([3, 4], 1, &device));
        model.head.forward(model.layers[0].forward(hidden)).square().mean()
    };
    let plain = GradientsParams::from_grads(loss(&model).backward(), &model);
    let plain = gradients_of(&model, &plain);
    on_ranks(2, |group| {
        let options = DdpOptions::default().first_bucket_bytes(1).bucket_bytes(1);
        let (ddp, model) =
            DistributedDataParallel::wrap_with(model.clone(), &group, &options).unwrap();
        for step in 1..=3 {
            let gradients = ddp.backward(loss(&model), &model).unwrap();
            assert_eq!(gradients_of(&model, &gradients), plain);
            let stats = ddp.stats();
            assert_eq!(stats.buckets_launched_early, 4 * step, "no tap waits for `finish`");
        }
    });
}

#[test]
fn passes_outside_of_ddp_backward_do_no_harm() {
    let device = device();
    let model = Mlp::new(4, 1, &device);
    let loss = |model: &Mlp| model.loss(tensor([3, 4], 1, &device), tensor([3, 1], 2, &device));
    let plain = GradientsParams::from_grads(loss(&model).backward(), &model);
    let plain = gradients_of(&model, &plain);
    on_ranks(2, |group| {
        let (ddp, model) = DistributedDataParallel::wrap(model.clone(), &group).unwrap();
        drop(loss(&model)); // thrown away at once
        let kept = loss(&model); // still alive while another loss goes backward
        for _ in 0..2 {
            let gradients = ddp.backward(loss(&model), &model).unwrap();
            assert_eq!(gradients_of(&model, &gradients), plain);
        }
        let gradients = ddp.backward(kept, &model).unwrap();
        assert_eq!(gradients_of(&model, &gradients), plain);
        let validation = model.valid();
        let output = validation.forward(tensor([3, 4], 1, &Device::flex()));
        assert!(!output.is_autodiff());
        // Past the handle, a wrapped model gives this rank's own gradients and sends nothing.
        let launched = ddp.stats().buckets_launched;
        let own = GradientsParams::from_grads(loss(&model).backward(), &model);
        assert_eq!(gradients_of(&model, &own), plain);
        assert_eq!(ddp.stats().buckets_launched, launched);
        // Two micro-batches in one backward: their gradients add up.
        let gradients = ddp.backward(loss(&model) + loss(&model), &model).unwrap();
        let doubled: Vec<Vec<f32>> =
            plain.iter().map(|g| g.iter().map(|x| 2.0 * x).collect()).collect();
        assert_eq!(gradients_of(&model, &gradients), doubled);
    });
}

#[test]
fn ranks_with_less_data_stay_in_step_with_the_others() {
    let start = Mlp::new(4, 1, &device());
    for world_size in [1, 3] {
        let digests = on_ranks(world_size, |group| {
            let device = device();
            let (ddp, mut model) = DistributedDataParallel::wrap(start.clone(), &group).unwrap();
            // Adam remembers; it must have seen the same on all ranks.
            let mut optimizer = burn::optim::AdamConfig::new().init();
            for epoch in 0..2 {
                for step in 0..2 * group.rank() + epoch {
                    let input = tensor([2, 4], 10 * step + group.rank(), &device);
                    let loss = model.loss(input, Tensor::ones([2, 1], &device));
                    let gradients = ddp.backward(loss, &model).unwrap();
                    model = optimizer.step(0.1, model, gradients);
                }
                while let Some(gradients) = ddp.shadow(&model).unwrap() {
                    model = optimizer.step(0.1, model, gradients);
                }
            }
            let most = 2 * (world_size as u64 - 1);
            assert_eq!(ddp.stats().steps, 2 * most + 1);
            parameters_digest(&model).unwrap()
        });
        assert!(digests.iter().all(|digest| *digest == digests[0]));
        assert_ne!(digests[0], parameters_digest(&start).unwrap());
    }
}

#[derive(Module, Debug)]
struct Normed {
    first: Linear,
    norm: BatchNorm,
    frozen: Linear,
    count: Param<Tensor<1, Int>>,
}

impl Normed {
    fn new(seed: i32, device: &Device) -> Self {
        let layer = || LinearConfig::new(4, 4).init(device);
        Self {
            first: layer(),
            norm: BatchNormConfig::new(4).init(device),
            frozen: layer().no_grad(),
            count: Param::initialized(
                burn::module::ParamId::new(),
                Tensor::<1, Int>::from_data([seed, 7], device),
            ),
        }
    }

    fn loss(&self, input: Tensor<2>) -> Tensor<1> {
        self.frozen.forward(self.norm.forward(self.first.forward(input))).square().mean()
    }
}

fn find(tensors: &[NamedTensor], name: &str) -> NamedTensor {
    tensors.iter().find(|tensor| tensor.name == name).unwrap().clone()
}

#[test]
fn buffers_and_frozen_parameters_follow_rank_0() {
    let ranks = on_ranks(2, |group| {
        let device = device();
        let model = Normed::new(10 + group.rank() as i32, &device);
        let (ddp, mut model) = DistributedDataParallel::wrap(model, &group).unwrap();
        let wrapped = named_tensors(&model).unwrap();
        let mut optimizer = SgdConfig::new().init();
        for step in 0..3 {
            let input = tensor([6, 4], 10 * group.rank() + step, &device);
            let gradients = ddp.backward(model.loss(input), &model).unwrap();
            assert_eq!(gradients.len(), 4, "two of `first`, two of `norm`");
            model = optimizer.step(0.1, model, gradients);
        }
        let trained = named_tensors(&model).unwrap();
        let model = ddp.sync_buffers(model).unwrap();
        let synced = named_tensors(&model).unwrap();
        // burn keeps updates aside and takes them in here: they must not undo the synchronisation.
        let validated = named_tensors(&model.valid()).unwrap();
        [wrapped, trained, synced, validated]
    });
    let [zero, one] = &ranks[..] else { panic!("two ranks") };
    let [wrapped, trained, synced, validated] = zero;

    assert_eq!(*wrapped, one[0], "rank 0's values win");
    let count = find(wrapped, "count");
    assert_eq!((count.shape, count.values), (vec![2], TensorValues::I64(vec![10, 7])));
    for name in ["norm.running_mean", "norm.running_var"] {
        assert_ne!(find(trained, name), find(&one[1], name), "each rank has its own data");
        assert_ne!(find(trained, name), find(wrapped, name));
        assert_eq!(find(synced, name), find(trained, name), "rank 0 keeps its values");
    }
    assert_eq!(find(trained, "first.weight"), find(&one[1], "first.weight"));
    assert_eq!(find(trained, "frozen.weight"), find(wrapped, "frozen.weight"));
    assert_eq!(*synced, one[2]);
    assert_eq!(*validated, one[3]);
    assert_eq!(validated, synced);
}

#[test]
fn an_evaluation_on_one_rank_alone_communicates_nothing() {
    on_ranks(2, |group| {
        let device = device();
        let (ddp, mut model) =
            DistributedDataParallel::wrap(Normed::new(1, &device), &group).unwrap();
        let mut optimizer = SgdConfig::new().init();
        for step in 0..4 {
            // What torch does with `broadcast_buffers=True`.
            model = ddp.sync_buffers(model).unwrap();
            let input = tensor([6, 4], 10 * group.rank() + step, &device);
            let gradients = ddp.backward(model.loss(input), &model).unwrap();
            model = optimizer.step(0.1, model, gradients);
            // Now rank 1 evaluates, and rank 0 does not. Were anything sent, its message would
            // meet another call of rank 0 and be refused.
            if group.rank() == 1 {
                let before = communication_time(&group);
                let evaluated = model.valid();
                let output = evaluated.loss(tensor([6, 4], 7, &Device::flex()));
                assert!(output.into_scalar::<f32>().is_finite());
                let error = ddp.sync_buffers(evaluated).map(drop).unwrap_err();
                assert!(error.to_string().contains("validation mode"), "{error}");
                assert_eq!(communication_time(&group), before);
            }
        }
        parameters_digest(&ddp.sync_buffers(model).unwrap()).unwrap()
    })
    .windows(2)
    .for_each(|ranks| assert_eq!(ranks[0], ranks[1]));
}

#[test]
fn tensors_go_out_and_in_by_name_with_and_without_taps() {
    on_ranks(2, |group| {
        let device = device();
        let model = Normed::new(1, &device);
        let (ddp, model) = DistributedDataParallel::wrap(model, &group).unwrap();
        let tensors = named_tensors(&model).unwrap();
        let names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "first.weight",
                "first.bias",
                "norm.gamma",
                "norm.beta",
                "norm.running_mean",
                "norm.running_var",
                "frozen.weight",
                "frozen.bias",
                "count",
            ]
        );
        let digest = parameters_digest(&model).unwrap();

        // Into another model, through bytes, in another order.
        let reversed = tensors.iter().rev().map(|tensor| {
            let NamedTensor { name, shape, values } = tensor.clone();
            NamedTensor::from_bytes(name, shape, values.dtype(), values.as_bytes()).unwrap()
        });
        let other = load_named_tensors(Normed::new(2, &device), reversed.collect()).unwrap();
        assert_eq!(parameters_digest(&other).unwrap(), digest);
        assert!(other.first.weight.is_require_grad());
        assert!(!other.frozen.weight.is_require_grad());

        // Into the wrapped model: it still trains with the others.
        let model = load_named_tensors(model, tensors).unwrap();
        let gradients = ddp.backward(model.loss(tensor([6, 4], 1, &device)), &model).unwrap();
        assert_eq!(gradients.len(), 4);

        let model = ddp.unwrap(load_named_tensors(model, named_tensors(&other).unwrap()).unwrap());
        assert_eq!(named_tensors(&model).unwrap(), named_tensors(&other).unwrap());
        let plain = model.loss(tensor([6, 4], 1, &device)).backward();
        assert!(model.first.weight.base().grad(&plain).is_some(), "still to be trained");
    });
}

#[test]
fn tensors_that_do_not_fit_are_all_named_and_nothing_is_loaded() {
    let device = device();
    let model = Mlp::new(4, 1, &device);
    let before = parameters_digest(&model).unwrap();
    let mut tensors = named_tensors(&model).unwrap();
    tensors[0].name = "layers.9.weight".to_owned();
    tensors[1].shape = vec![2, 2];
    tensors[2].values = TensorValues::F64(vec![0.0; 4]);
    let error = load_named_tensors(model.clone(), tensors).map(drop).unwrap_err().to_string();
    for wanted in [
        "`layers.0.weight` f32[4, 4] is missing",
        "`layers.0.bias` f32[4] cannot be f32[2, 2]",
        "`head.weight` f32[4, 1] cannot be f64[4, 1]",
    ] {
        assert!(error.contains(wanted), "{error}");
    }
    let mut tensors = named_tensors(&model).unwrap();
    tensors.push(NamedTensor { name: "spare".to_owned(), ..tensors[0].clone() });
    let error = load_named_tensors(model.clone(), tensors).map(drop).unwrap_err().to_string();
    assert!(error.contains("the model has no `spare` f32[4, 4]"), "{error}");
    assert_eq!(parameters_digest(&model).unwrap(), before);
    assert!(NamedTensor::from_bytes("short", [3], drumline::DType::F32, &[0; 8]).is_err());
}

#[test]
fn what_cannot_be_trained_is_refused_with_the_reason() {
    let device = device();
    let group = ProcessGroup::alone();
    let refuse = |result: Result<(), Error>, wanted: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    };
    let wrap = |model: Mlp| DistributedDataParallel::wrap(model, &group).map(drop);

    let frozen = Mlp::new(4, 1, &device).no_grad();
    refuse(wrap(frozen), "no parameter to train");
    refuse(wrap(Mlp::new(4, 1, &Device::flex())), "no parameter to train");

    let mut shared = Mlp::new(4, 2, &device);
    shared.layers[1] = shared.layers[0].clone();
    refuse(wrap(shared), "parameters `layers.0.weight` and `layers.1.weight` have the same id");

    let (ddp, model) = DistributedDataParallel::wrap(Mlp::new(4, 1, &device), &group).unwrap();
    let input = tensor([2, 4], 1, &Device::flex());
    let loss = model.valid().forward(input).mean();
    refuse(ddp.backward(loss, &model).map(drop), "the loss has no gradient");
}

#[test]
fn a_wrapped_model_cannot_be_wrapped_again() {
    on_ranks(2, |group| {
        let (_ddp, model) =
            DistributedDataParallel::wrap(Mlp::new(4, 1, &device()), &group).unwrap();
        let error = DistributedDataParallel::wrap(model, &group).map(drop).unwrap_err();
        assert!(error.to_string().contains("was wrapped before"), "{error}");
    });
}

#[test]
fn a_rank_that_has_gone_is_named_by_backward() {
    on_ranks(2, |group| {
        let device = device();
        let (ddp, model) = DistributedDataParallel::wrap(Mlp::new(4, 1, &device), &group).unwrap();
        if group.rank() == 1 {
            return;
        }
        for _ in 0..2 {
            let loss = model.loss(tensor([2, 4], 1, &device), tensor([2, 1], 1, &device));
            let error = ddp.backward(loss, &model).map(drop).unwrap_err().to_string();
            assert!(error.contains("rank 1"), "{error}");
        }
    });
}

#[test]
fn a_work_that_fails_fits_the_results_of_this_crate() {
    fn sum(group: &ProcessGroup) -> Result<Vec<f32>, Error> {
        Ok(group.all_reduce_async(vec![1.0], drumline::ReduceOp::Sum).unwrap().wait()?)
    }
    let group = drumline::rendezvous::local_world(1).unwrap().remove(0);
    assert_eq!(sum(&group).unwrap(), [1.0]);
    group.abort();
    let text = format!("{:?}", sum(&group).unwrap_err());
    assert!(text.contains("this rank has aborted the group"), "{text}");
    assert!(text.contains("(drumline explain "), "{text}");
}
