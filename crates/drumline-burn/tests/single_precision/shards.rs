//! Steps of shards: one model, whatever the number of ranks.

use burn::{
    module::{Module, ModuleMapper, Param},
    nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig},
    optim::AdamConfig,
    tensor::{Device, Tensor, activation::relu},
};
use drumline::ProcessGroup;
use drumline_burn::{
    DdpOptions, DistributedDataParallel, Error, ErrorKind, Result, ShardedOptimizer,
    SyncBatchNormConfig, UnusedParameters, clip_grad_norm, named_tensors, parameters_digest,
};

use crate::common::{Mlp, on_ranks, tensor};

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    norm: BatchNorm,
    /// Not trained, and no running statistic.
    frozen: Linear,
    last: Linear,
}

impl Net {
    /// With numbers instead of random weights: the generator belongs to all threads.
    fn new(device: &Device) -> Self {
        struct Numbers(usize);
        impl ModuleMapper for Numbers {
            fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
                self.0 += 1;
                param.map(|it| tensor(it.dims(), self.0, &it.device()).require_grad())
            }
        }
        let linear =
            |from, to| LinearConfig::new(from, to).init(device).map(&mut Numbers(from + to));
        Self {
            first: linear(3, 9),
            norm: BatchNormConfig::new(9).init(device),
            frozen: linear(9, 9).no_grad(),
            last: linear(9, 1),
        }
    }

    fn loss(&self, input: Tensor<2>) -> Tensor<1> {
        let hidden = relu(self.norm.forward(self.first.forward(input)));
        self.last.forward(self.frozen.forward(hidden)).square().mean()
    }
}

/// What training gives on each rank: the losses, and the model with its running statistics.
fn train_plainly(group: &ProcessGroup, options: &DdpOptions) -> Result<(Vec<f64>, u64)> {
    let device = Device::flex().autodiff();
    let (ddp, mut model) = DistributedDataParallel::wrap_with(Net::new(&device), group, options)?;
    let mut optimizer = AdamConfig::new().init();
    let mut losses = Vec::new();
    for number in 0..4 {
        let batch =
            |shard| tensor([5, 3], number as usize * 100 + shard, &device) * (shard + 1) as f32;
        let mut step = ddp.step(number, |shard| Ok(model.loss(batch(shard))), &model)?;
        clip_grad_norm(&mut step.gradients, &model, 0.1)?;
        model = optimizer.step(0.01, model, step.gradients);
        losses.push(step.loss);
    }
    Ok((losses, parameters_digest(&model)?))
}

#[test]
fn any_number_of_ranks_gives_the_same_bits() {
    for shards in [4, 6] {
        let options = DdpOptions::default().first_bucket_bytes(1).bucket_bytes(64).shards(shards);
        let alone = train_plainly(&ProcessGroup::alone(), &options).unwrap();
        for ranks in 2..=4 {
            for of_rank in on_ranks(ranks, |group| train_plainly(&group, &options).unwrap()) {
                assert_eq!(of_rank, alone, "{shards} shards, {ranks} ranks");
            }
        }
    }
    // It would notice a difference.
    let of = |shards| {
        train_plainly(&ProcessGroup::alone(), &DdpOptions::default().shards(shards)).unwrap()
    };
    assert_ne!(of(4), of(6));
}

#[test]
fn a_sharded_optimizer_ends_with_the_same_parameters() {
    let options = DdpOptions::default().first_bucket_bytes(1).bucket_bytes(64).shards(6);
    let train = |group: &ProcessGroup| {
        let (device, config) = (Device::flex().autodiff(), AdamConfig::new());
        let (mut optimizer, mut model) =
            ShardedOptimizer::wrap_with(Net::new(&device), config, group, &options)?;
        let mut losses = Vec::new();
        for number in 0..4 {
            let batch =
                |shard| tensor([5, 3], number as usize * 100 + shard, &device) * (shard + 1) as f32;
            let loss = |shard| Ok(model.loss(batch(shard)));
            let mut step = optimizer.backward_shards(number, loss, &model)?;
            clip_grad_norm(&mut step.gradients, &model, 0.1)?;
            model = optimizer.step(0.01, model, step.gradients)?;
            losses.push(step.loss);
        }
        Ok::<_, Error>((losses, parameters_digest(&model)?))
    };
    let alone = train_plainly(&ProcessGroup::alone(), &options).unwrap();
    for ranks in 1..=4 {
        for of_rank in on_ranks(ranks, |group| train(&group).unwrap()) {
            assert_eq!(of_rank, alone, "{ranks} ranks");
        }
    }
}

#[test]
fn running_statistics_are_those_of_shard_0() {
    let device = Device::flex().autodiff();
    let (alone, model) = (ProcessGroup::alone(), Net::new(&device));
    let options = DdpOptions::default().shards(3);
    let (ddp, model) = DistributedDataParallel::wrap_with(model, &alone, &options).unwrap();
    let reference = Net::new(&device);
    let batch = |shard| tensor([5, 3], shard, &device);
    for number in 0..2 {
        ddp.step(number, |shard| Ok(model.loss(batch(shard))), &model).unwrap();
        reference.loss(batch(0));
        assert_eq!(named_tensors(&model).unwrap(), named_tensors(&reference).unwrap());
    }
}

#[test]
fn a_closure_that_fails_is_an_error_on_all_ranks_and_changes_nothing() {
    let options = DdpOptions::default().shards(5);
    let errors = on_ranks(3, |group| {
        let device = Device::flex().autodiff();
        let (ddp, model) =
            DistributedDataParallel::wrap_with(Net::new(&device), &group, &options).unwrap();
        let before = parameters_digest(&model).unwrap();
        let loss = |shard| {
            if shard == 3 {
                return Err("no data".into());
            }
            Ok(model.loss(tensor([5, 3], shard, &device)))
        };
        let error = ddp.step(0, loss, &model).unwrap_err();
        assert_eq!(parameters_digest(&model).unwrap(), before);
        ddp.step(0, |shard| Ok(model.loss(tensor([5, 3], shard, &device))), &model).unwrap();
        error
    });
    let failed = errors.iter().filter(|it| it.to_string().contains("failed: no data")).count();
    assert_eq!(failed, 1, "{errors:?}");
    let told = |it: &&Error| it.to_string().contains("the step failed in the program on rank ");
    assert_eq!(errors.iter().filter(told).count(), 2, "{errors:?}");
    assert!(errors.iter().all(|it| it.kind() == ErrorKind::Gradients));
}

#[test]
fn a_parameter_that_one_shard_does_not_use_is_named_or_counts_as_zeros() {
    let device = Device::flex().autodiff();
    let loss = |model: &Mlp, shard: usize| {
        let input = tensor([2, 3], shard, &device);
        match shard {
            1 => model.head.forward(input).sum(), // without the layers
            _ => model.forward(input).sum(),
        }
    };
    let options = DdpOptions::default().shards(4);
    let group = ProcessGroup::alone();
    let wrap = |options| {
        DistributedDataParallel::wrap_with(Mlp::new(3, 1, &device), &group, &options).unwrap()
    };
    let (ddp, model) = wrap(options.clone());
    let error = ddp.step(0, |shard| Ok(loss(&model, shard)), &model).unwrap_err().to_string();
    assert!(error.contains("`layers.0.weight`") && !error.contains("head"), "{error}");
    let (ddp, model) = wrap(options.unused_parameters(UnusedParameters::Ignore));
    let step = ddp.step(0, |shard| Ok(loss(&model, shard)), &model).unwrap();
    assert_eq!(step.gradients.len(), 4);
}

#[test]
fn what_has_no_place_beside_shards_says_so() {
    let device = Device::flex().autodiff();
    let group = ProcessGroup::alone();
    let model = || Mlp::new(3, 1, &device);
    let loss = |model: &Mlp| model.forward(tensor([2, 3], 0, &device)).sum();
    let options = DdpOptions::default().shards(2);
    let (ddp, wrapped) = DistributedDataParallel::wrap_with(model(), &group, &options).unwrap();
    for refused in [
        ddp.backward(loss(&wrapped), &wrapped).map(drop),
        ddp.accumulate(loss(&wrapped), &wrapped),
        ddp.shadow(&wrapped).map(drop),
    ] {
        let error = refused.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Argument);
        assert!(error.to_string().contains("a step is one call of `step`"), "{error}");
    }
    let norm = SyncBatchNormConfig::new(3).init(&group, &device);
    let of_norm = |_| Ok(norm.forward(tensor::<2>([2, 3], 0, &device))?.sum());
    let error = ddp.step(0, of_norm, &wrapped).unwrap_err().to_string();
    assert!(error.contains("a shard is computed alone"), "{error}");
    let (ddp, wrapped) = DistributedDataParallel::wrap(model(), &group).unwrap();
    let error = ddp.step(0, |_| Ok(loss(&wrapped)), &wrapped).unwrap_err().to_string();
    assert!(error.contains("`DdpOptions::default().shards(count)`"), "{error}");
}
