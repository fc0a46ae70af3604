//! `SyncBatchNorm` on several ranks against burn's own layer on the whole batch, in double
//! precision.

use crate::{
    common::{self, tensor},
    device,
};
use burn::{
    module::Module,
    nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig},
    optim::{GradientsParams, ModuleOptimizer, SgdConfig},
    tensor::{Device, Tensor, activation::tanh},
};
use drumline::ProcessGroup;
use drumline_burn::{
    DistributedDataParallel, Result, SyncBatchNorm, SyncBatchNormConfig, TensorValues,
    load_named_tensors, named_tensors, parameters_digest,
};

const FEATURES: usize = 4;
const STEPS: usize = 5;

/// Normalises in two places: over vectors, and over little images.
#[derive(Module, Debug)]
struct Reference {
    first: Linear,
    norm: BatchNorm,
    image_norm: BatchNorm,
    last: Linear,
}

/// The same with layers that look at all ranks.
#[derive(Module, Debug)]
struct Synced {
    first: Linear,
    norm: SyncBatchNorm,
    image_norm: SyncBatchNorm,
    last: Linear,
}

fn linear(inputs: usize, outputs: usize) -> Linear {
    LinearConfig::new(inputs, outputs).init(&device())
}

impl Reference {
    fn new() -> Self {
        Self {
            first: linear(3, FEATURES),
            norm: BatchNormConfig::new(FEATURES).init(&device()),
            image_norm: BatchNormConfig::new(2).with_epsilon(0.01).init(&device()),
            last: linear(FEATURES, 1),
        }
    }

    /// The sum over samples, so that parts of a batch add up to the whole.
    fn loss(&self, input: Tensor<2>) -> Tensor<1> {
        let hidden = tanh(self.norm.forward(self.first.forward(input)));
        let samples = hidden.dims()[0];
        let image = self.image_norm.forward(hidden.reshape([samples, 2, 1, 2]));
        (self.last.forward(image.reshape([samples, FEATURES])) - 0.5).square().sum()
    }
}

impl Synced {
    fn new(group: &ProcessGroup) -> Self {
        Self {
            first: linear(3, FEATURES),
            norm: SyncBatchNormConfig::new(FEATURES).init(group, &device()),
            image_norm: SyncBatchNormConfig::new(2).with_epsilon(0.01).init(group, &device()),
            last: linear(FEATURES, 1),
        }
    }

    fn loss(&self, input: Tensor<2>) -> Result<Tensor<1>> {
        let hidden = tanh(self.norm.forward(self.first.forward(input))?);
        let samples = hidden.dims()[0];
        let image = self.image_norm.forward(hidden.reshape([samples, 2, 1, 2]))?;
        Ok((self.last.forward(image.reshape([samples, FEATURES])) - 0.5).square().sum())
    }
}

/// Runs `rank` on a thread per rank, with a group for gradients and one for statistics.
fn on_ranks<T: Send>(
    world_size: usize,
    rank: impl Fn(ProcessGroup, ProcessGroup) -> T + Sync,
) -> Vec<T> {
    let statistics = drumline::rendezvous::local_world(world_size).unwrap();
    let statistics = std::sync::Mutex::new(statistics.into_iter().map(Some).collect::<Vec<_>>());
    common::on_ranks(world_size, |group| {
        let statistics = statistics.lock().unwrap()[group.rank()].take().unwrap();
        rank(group, statistics)
    })
}

fn values(model: &impl Module) -> Vec<(String, Vec<f64>)> {
    let tensors = named_tensors(model).unwrap().into_iter();
    let floats = tensors.map(|tensor| match tensor.values {
        TensorValues::F64(values) => (tensor.name, values),
        other => panic!("{} is {}", tensor.name, other.dtype()),
    });
    floats.collect()
}

#[test]
fn all_ranks_together_normalise_and_learn_like_one_with_the_whole_batch() {
    let start = Reference::new();
    let start_tensors = named_tensors(&start).unwrap();
    for samples_by_rank in [&[8][..], &[4, 4], &[5, 2], &[3, 3, 3], &[4, 1, 3], &[6, 0, 1]] {
        let (world_size, total) = (samples_by_rank.len(), samples_by_rank.iter().sum::<usize>());
        let batch = |step| tensor([total, 3], step, &device()) * 3.0 + 10.0;
        let optimizer = || -> ModuleOptimizer { SgdConfig::new().init() };

        // Not a clone: that would share its running statistics with `start`.
        let mut one = load_named_tensors(Reference::new(), start_tensors.clone()).unwrap();
        let mut sgd = optimizer();
        for step in 0..STEPS {
            let loss = one.loss(batch(step)) * (1.0 / total as f64);
            let gradients = GradientsParams::from_grads(loss.backward(), &one);
            one = sgd.step(0.1, one, gradients);
        }

        let ranks = on_ranks(world_size, |group, statistics| {
            // The values of burn's layers fit, under the same names.
            let model =
                load_named_tensors(Synced::new(&statistics), start_tensors.clone()).unwrap();
            let (ddp, mut model) = DistributedDataParallel::wrap(model, &group).unwrap();
            let mut sgd = optimizer();
            let first: usize = samples_by_rank[..group.rank()].iter().sum();
            let rows = first..first + samples_by_rank[group.rank()];
            for step in 0..STEPS {
                let input = batch(step).slice([rows.clone()]);
                // Averaged over the ranks, this is the mean over all samples.
                let weight = world_size as f64 / total as f64;
                let loss = model.loss(input).unwrap() * weight;
                let gradients = ddp.backward(loss, &model).unwrap();
                model = sgd.step(0.1, model, gradients);
            }
            (parameters_digest(&model).unwrap(), values(&model))
        });

        let one = values(&one);
        for (digest, values) in &ranks {
            assert_eq!(*digest, ranks[0].0, "{samples_by_rank:?}: buffers and all");
            for ((name, ours), (wanted_name, wanted)) in values.iter().zip(&one) {
                assert_eq!(name, wanted_name);
                for (ours, wanted) in ours.iter().zip(wanted) {
                    let wanted = match name.ends_with("running_var") {
                        // burn's layer takes the variance of the samples for that of what they
                        // were drawn from.
                        true => {
                            let first = 0.9_f64.powi(STEPS as i32); // what is left of the first, 1
                            let count = if name == "norm.running_var" { total } else { 2 * total };
                            first + (wanted - first) * count as f64 / (count as f64 - 1.0)
                        }
                        false => *wanted,
                    };
                    assert!(
                        (ours - wanted).abs() < 1e-9,
                        "{samples_by_rank:?}: {name} is {ours}, not {wanted}"
                    );
                }
            }
        }
        let learnt = values_of(&one, "first.weight") != values_of(&values(&start), "first.weight");
        assert!(learnt);
    }
}

fn values_of(values: &[(String, Vec<f64>)], name: &str) -> Vec<f64> {
    values.iter().find(|(found, _)| found == name).unwrap().1.clone()
}

#[test]
fn validation_on_one_rank_alone_communicates_nothing() {
    on_ranks(2, |group, statistics| {
        let (ddp, mut model) =
            DistributedDataParallel::wrap(Synced::new(&statistics), &group).unwrap();
        let mut sgd = SgdConfig::new().init();
        for step in 0..3 {
            let loss = model.loss(tensor([4, 3], 2 * step + group.rank(), &device())).unwrap();
            let gradients = ddp.backward(loss, &model).unwrap();
            model = sgd.step(0.1, model, gradients);
            if group.rank() == 1 {
                let times = || [&group, &statistics].map(drumline::metrics::communication_time);
                let before = times();
                let loss = model.valid().loss(tensor([4, 3], 9, &Device::flex())).unwrap();
                assert!(loss.into_scalar::<f64>().is_finite());
                let frozen = model.clone().freeze();
                let loss = frozen.loss(tensor([4, 3], 9, &device())).unwrap();
                assert!(loss.into_scalar::<f64>().is_finite());
                assert_eq!(before, times());
            }
        }
    });
}

#[test]
fn a_rank_that_leaves_before_backward_is_named_by_backward() {
    on_ranks(2, |group, statistics| {
        let (ddp, model) = DistributedDataParallel::wrap(Synced::new(&statistics), &group).unwrap();
        let loss = model.loss(tensor([4, 3], group.rank(), &device())).unwrap();
        if group.rank() == 1 {
            return;
        }
        let error = ddp.backward(loss, &model).map(drop).unwrap_err().to_string();
        assert!(error.contains("rank 1"), "{error}");
        let error = model.loss(tensor([4, 3], 1, &device())).map(drop).unwrap_err().to_string();
        assert!(error.contains("rank 1"), "the group is poisoned: {error}");
    });
}

#[test]
fn what_cannot_be_normalised_is_refused_with_the_reason() {
    let layer = SyncBatchNormConfig::new(3).init(&ProcessGroup::alone(), &device());
    let refuse = |result: Result<()>, wanted: &str| {
        let error = result.unwrap_err();
        assert!(error.to_string().contains("cannot normalise"), "{error}");
        assert!(error.to_string().contains(wanted), "{error}");
    };
    let forward = |samples, channels| {
        layer.forward(Tensor::<2>::ones([samples, channels], &device())).map(drop)
    };
    refuse(forward(4, 2), "its shape is [4, 2], not [_, 3, ...]");
    refuse(layer.forward(Tensor::<1>::ones([3], &device())).map(drop), "its shape is [3]");
    refuse(forward(1, 3), "less than two values per channel");
    assert!(forward(2, 3).is_ok());
}
