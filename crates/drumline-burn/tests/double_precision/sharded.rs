//! Models of random shape end with the bits of plain data-parallel training if the optimizer's state is shared out.

use burn::{
    module::Module,
    nn::{Linear, LinearConfig},
    optim::{AdamConfig, ModuleOptimizer, SgdConfig, momentum::MomentumConfig},
    tensor::{Tensor, activation::tanh},
};
use drumline_burn::{
    DdpOptions, DistributedDataParallel, NamedTensor, ShardedOptimizer, UnusedParameters,
    clip_grad_norm, named_tensors,
};
use proptest::prelude::*;

use crate::{
    common::{on_ranks, tensor},
    device,
};

const STEPS: usize = 3;

/// Layers from each width to the next, and back. One may be used several times, or not at all.
#[derive(Module, Debug)]
struct Net {
    down: Vec<Linear>,
    up: Vec<Linear>,
}

const WIDTH: usize = 5;

impl Net {
    fn loss(&self, path: &[usize], data: usize) -> Tensor<1> {
        let input: Tensor<2> = tensor([3, WIDTH], data, &device());
        let through = |x, at: &usize| {
            let x: Tensor<2> = tanh(self.down[*at].forward(x));
            self.up[*at].forward(x)
        };
        let output = path.iter().fold(input, through);
        (output - 0.5).square().mean()
    }
}

#[derive(Clone, Debug)]
struct Case {
    /// The width in the middle, and whether the layer is frozen.
    layers: Vec<(usize, bool)>,
    /// The way through the layers, by rank.
    paths: Vec<Vec<usize>>,
    bucket_bytes: [usize; 2],
    micro_batches: usize,
    clips: bool,
    has_adam: bool,
}

fn cases() -> impl Strategy<Value = Case> {
    (1_usize..5, 1_usize..=4).prop_flat_map(|(depth, world_size)| {
        let path = prop::collection::vec(0..depth, 1..6);
        (
            prop::collection::vec((1_usize..12, prop::bool::weighted(0.25)), depth),
            prop::collection::vec(path, world_size),
            [1_usize..400, 1_usize..900],
            1_usize..3,
            any::<(bool, bool)>(),
        )
            .prop_map(|(layers, paths, bucket_bytes, micro_batches, (clips, has_adam))| Case {
                layers,
                paths,
                bucket_bytes,
                micro_batches,
                clips,
                has_adam,
            })
            .prop_filter("each rank has something to train", |case| {
                case.paths.iter().all(|path| path.iter().any(|&at| !case.layers[at].1))
            })
    })
}

impl Case {
    fn start(&self) -> Net {
        let layers = |back: bool| {
            let layer = |&(width, is_frozen): &(usize, bool)| {
                let [from, to] = if back { [width, WIDTH] } else { [WIDTH, width] };
                let layer: Linear = LinearConfig::new(from, to).init(&device());
                if is_frozen { layer.no_grad() } else { layer }
            };
            self.layers.iter().map(layer).collect()
        };
        Net { down: layers(false), up: layers(true) }
    }

    fn options(&self) -> DdpOptions {
        let [first, rest] = self.bucket_bytes;
        let options = DdpOptions::default().first_bucket_bytes(first).bucket_bytes(rest);
        options.unused_parameters(UnusedParameters::Ignore)
    }

    fn optimizer(&self) -> ModuleOptimizer {
        match self.has_adam {
            true => AdamConfig::new().init(),
            false => SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init(),
        }
    }

    fn loss(&self, model: &Net, rank: usize, step: usize, part: usize) -> Tensor<1> {
        model.loss(&self.paths[rank], 100 * rank + 10 * step + part)
    }
}

fn check(case: &Case) {
    let start = case.start();
    let plain: Vec<Vec<NamedTensor>> = on_ranks(case.paths.len(), |group| {
        let (ddp, mut model) =
            DistributedDataParallel::wrap_with(start.clone(), &group, &case.options()).unwrap();
        let mut optimizer = case.optimizer();
        for step in 0..STEPS {
            let loss = |part| case.loss(&model, group.rank(), step, part);
            for part in 1..case.micro_batches {
                ddp.accumulate(loss(part), &model).unwrap();
            }
            let mut gradients = ddp.backward(loss(0), &model).unwrap();
            if case.clips {
                clip_grad_norm(&mut gradients, &model, 0.05).unwrap();
            }
            model = optimizer.step(0.1, model, gradients);
        }
        named_tensors(&model).unwrap()
    });
    let sharded = on_ranks(case.paths.len(), |group| {
        let options = case.options();
        let (mut optimizer, mut model) =
            ShardedOptimizer::wrap_with(start.clone(), case.optimizer(), &group, &options).unwrap();
        for step in 0..STEPS {
            let loss = |part| case.loss(&model, group.rank(), step, part);
            for part in 1..case.micro_batches {
                optimizer.accumulate(loss(part), &model).unwrap();
            }
            let mut gradients = optimizer.backward(loss(0), &model).unwrap();
            if case.clips {
                clip_grad_norm(&mut gradients, &model, 0.05).unwrap();
            }
            model = optimizer.step(0.1, model, gradients).unwrap();
        }
        named_tensors(&model).unwrap()
    });
    for values in &sharded {
        assert!(*values == plain[0], "other bits");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_model_ends_with_the_bits_of_plain_training(case in cases()) {
        check(&case);
    }
}
