//! Models of random shape end on every rank where one process ends that has the data of all ranks.

use burn::{
    module::Module,
    nn::{Linear, LinearConfig},
    optim::{GradientsParams, SgdConfig},
    tensor::{Tensor, activation::tanh},
};
use drumline_burn::{
    DdpOptions, DistributedDataParallel, TensorValues, UnusedParameters, named_tensors,
    parameters_digest,
};
use proptest::prelude::*;

use crate::{
    common::{on_ranks, tensor},
    device,
};

const WIDTH: usize = 5;
const STEPS: usize = 3;

#[derive(Module, Debug)]
struct Net {
    layers: Vec<Linear>,
}

impl Net {
    /// Takes these layers one after the other: one more than once, or one not at all.
    fn loss(&self, path: &[usize], data: usize) -> Tensor<1> {
        let input: Tensor<2> = tensor([3, WIDTH], data, &device());
        let output = path.iter().fold(input, |x, &at| tanh(self.layers[at].forward(x)));
        (output - 0.5).square().mean()
    }
}

#[derive(Clone, Debug)]
struct Case {
    is_frozen: Vec<bool>,
    /// The way through the layers, by rank.
    paths: Vec<Vec<usize>>,
    first_bucket_bytes: usize,
    bucket_bytes: usize,
    /// The number of backward passes of a step.
    micro_batches: usize,
}

fn cases() -> impl Strategy<Value = Case> {
    (1_usize..6, 1_usize..=4).prop_flat_map(|(depth, world_size)| {
        let path = prop::collection::vec(0..depth, 1..7);
        (
            prop::collection::vec(prop::bool::weighted(0.25), depth),
            prop::collection::vec(path, world_size),
            1_usize..400,
            1_usize..900,
            1_usize..3,
        )
            .prop_map(|(is_frozen, paths, first_bucket_bytes, bucket_bytes, micro_batches)| Case {
                is_frozen,
                paths,
                first_bucket_bytes,
                bucket_bytes,
                micro_batches,
            })
            .prop_filter("some rank has something to train", |case| {
                case.paths.iter().all(|path| path.iter().any(|&at| !case.is_frozen[at]))
            })
    })
}

fn values(model: &Net) -> Vec<f64> {
    let tensors = named_tensors(model).unwrap().into_iter();
    tensors
        .flat_map(|tensor| match tensor.values {
            TensorValues::F64(values) => values,
            other => panic!("{} is {}", tensor.name, other.dtype()),
        })
        .collect()
}

fn check(case: &Case) {
    let layer = |&is_frozen: &bool| {
        let layer: Linear = LinearConfig::new(WIDTH, WIDTH).init(&device());
        if is_frozen { layer.no_grad() } else { layer }
    };
    let start = Net { layers: case.is_frozen.iter().map(layer).collect() };
    let world_size = case.paths.len();
    let data = |rank: usize, step: usize, part: usize| 100 * rank + 10 * step + part;

    let mut one = start.clone();
    let mut optimizer = SgdConfig::new().init();
    for step in 0..STEPS {
        let each =
            (0..world_size).flat_map(|rank| (0..case.micro_batches).map(move |part| (rank, part)));
        let losses = each.map(|(rank, part)| one.loss(&case.paths[rank], data(rank, step, part)));
        let loss = losses.reduce(|a, b| a + b).unwrap() * (1.0 / world_size as f64);
        let gradients = GradientsParams::from_grads(loss.backward(), &one);
        one = optimizer.step(0.1, one, gradients);
    }
    let one = values(&one);

    let ranks = on_ranks(world_size, |group| {
        let rank = group.rank();
        let options = DdpOptions::default()
            .first_bucket_bytes(case.first_bucket_bytes)
            .bucket_bytes(case.bucket_bytes)
            .unused_parameters(UnusedParameters::Ignore);
        let (ddp, mut model) =
            DistributedDataParallel::wrap_with(start.clone(), &group, &options).unwrap();
        let mut optimizer = SgdConfig::new().init();
        for step in 0..STEPS {
            let loss = |part| model.loss(&case.paths[rank], data(rank, step, part));
            for part in 1..case.micro_batches {
                ddp.accumulate(loss(part), &model).unwrap();
            }
            let gradients = ddp.backward(loss(0), &model).unwrap();
            model = optimizer.step(0.1, model, gradients);
        }
        (parameters_digest(&model).unwrap(), values(&model))
    });
    for (digest, values) in &ranks {
        assert_eq!(*digest, ranks[0].0, "the ranks differ in bits");
        let differences = values.iter().zip(&one).map(|(a, b)| (a - b).abs());
        let largest = differences.fold(0.0, f64::max);
        assert!(largest < 1e-9, "{largest:e}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_model_learns_on_one_to_four_ranks_as_in_one_process(case in cases()) {
        check(&case);
    }
}
