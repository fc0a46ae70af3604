//! Optimizers whose state is shared out between the ranks.

use std::collections::BTreeSet;

use crate::common::{Mlp, on_ranks, tensor};
use burn::{
    grad_clipping::GradientClippingConfig,
    module::ParamGroup,
    optim::{
        AdafactorConfig, AdamConfig, AdamWConfig, LionConfig, ModuleOptimizer, MuonConfig,
        SgdConfig, momentum::MomentumConfig,
    },
    tensor::{Device, Tensor},
};
use drumline::ProcessGroup;
use drumline_burn::{
    ClipGradNorm, DdpOptions, DistributedDataParallel, Divisor, ErrorKind, GradScaler, LossScale,
    NamedTensor, ShardedOptimizer, UnusedParameters, Wire, clip_grad_norm, named_tensors,
};

const WIDTH: usize = 16;

fn device() -> Device {
    Device::flex().autodiff()
}

fn optimizers() -> [(&'static str, ModuleOptimizer); 7] {
    let matrices = ParamGroup::from_predicate("weight");
    let muon = AdamWConfig::new().init().with_group(matrices, MuonConfig::new().build(), None);
    let clipping = GradientClippingConfig::Norm(0.05);
    [
        ("Adafactor", AdafactorConfig::new().init()),
        ("Adam", AdamConfig::new().with_grad_clipping(Some(clipping)).init()),
        ("AdamW", AdamWConfig::new().with_amsgrad(true).init()),
        ("Lion", LionConfig::new().init()),
        ("Muon", muon),
        ("SGD", SgdConfig::new().init()),
        ("momentum", SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init()),
    ]
}

/// What both kinds of training are told.
#[derive(Clone)]
struct Run {
    options: DdpOptions,
    /// The batches of each rank, by rank modulo their number.
    batches: Vec<usize>,
    clips: bool,
}

impl Run {
    fn new(options: DdpOptions) -> Self {
        Self { options, batches: vec![4], clips: false }
    }

    fn loss(model: &Mlp, rank: usize, step: usize, part: usize) -> Tensor<1> {
        let input = tensor([3, WIDTH], 100 * rank + 10 * step + part, &device());
        model.loss(input, Tensor::ones([3, 1], &device()))
    }

    /// Two micro-batches a step. Returns all tensors.
    fn plain(
        &self,
        start: &Mlp,
        mut optimizer: ModuleOptimizer,
        group: &ProcessGroup,
    ) -> Vec<NamedTensor> {
        let (ddp, mut model) =
            DistributedDataParallel::wrap_with(start.clone(), group, &self.options).unwrap();
        for step in 0.. {
            let gradients = match step < self.batches[group.rank() % self.batches.len()] {
                true => {
                    ddp.accumulate(Self::loss(&model, group.rank(), step, 1), &model).unwrap();
                    let loss = Self::loss(&model, group.rank(), step, 2);
                    Some(ddp.backward(loss, &model).unwrap())
                }
                false => ddp.shadow(&model).unwrap(),
            };
            let Some(mut gradients) = gradients else { break };
            if self.clips {
                clip_grad_norm(&mut gradients, &model, 0.1).unwrap();
            }
            model = optimizer.step(0.01, model, gradients);
        }
        named_tensors(&model).unwrap()
    }

    /// The same with state that is shared out.
    fn sharded(
        &self,
        start: &Mlp,
        optimizer: ModuleOptimizer,
        group: &ProcessGroup,
    ) -> Vec<NamedTensor> {
        let (mut optimizer, mut model) =
            ShardedOptimizer::wrap_with(start.clone(), optimizer, group, &self.options).unwrap();
        for step in 0.. {
            let gradients = match step < self.batches[group.rank() % self.batches.len()] {
                true => {
                    let loss = |part| Self::loss(&model, group.rank(), step, part);
                    optimizer.accumulate(loss(1), &model).unwrap();
                    Some(optimizer.backward(loss(2), &model).unwrap())
                }
                false => optimizer.shadow(&model).unwrap(),
            };
            let Some(mut gradients) = gradients else { break };
            if self.clips {
                clip_grad_norm(&mut gradients, &model, 0.1).unwrap();
            }
            model = optimizer.step(0.01, model, gradients).unwrap();
        }
        named_tensors(&model).unwrap()
    }

    fn ends_alike(&self, world_size: usize, what: &str, optimizer: &ModuleOptimizer) {
        let start = Mlp::new(WIDTH, 3, &device());
        let plain = on_ranks(world_size, |group| self.plain(&start, optimizer.clone(), &group));
        let sharded = on_ranks(world_size, |group| self.sharded(&start, optimizer.clone(), &group));
        assert_ne!(plain[0], named_tensors(&start).unwrap(), "{what}: nothing was learnt");
        for (rank, values) in sharded.iter().enumerate() {
            assert!(*values == plain[0], "{what}, rank {rank} of {world_size}: other bits");
        }
    }
}

#[test]
fn every_optimizer_ends_with_the_bits_of_plain_ddp() {
    let small = DdpOptions::default().first_bucket_bytes(100).bucket_bytes(1500);
    for (name, optimizer) in optimizers() {
        for world_size in [2, 4] {
            Run::new(small.clone()).ends_alike(world_size, name, &optimizer);
        }
    }
}

#[test]
fn so_does_every_option() {
    let default = DdpOptions::default();
    let small = default.clone().first_bucket_bytes(1).bucket_bytes(1);
    let ignoring = default.clone().unused_parameters(UnusedParameters::Ignore);
    let adam = AdamConfig::new().init();
    for (what, options) in [
        ("one bucket", default.clone()),
        ("a bucket for each", small),
        ("bf16", default.clone().wire(Wire::Bf16).first_bucket_bytes(700)),
        ("unused", ignoring),
    ] {
        for world_size in [1, 2, 3] {
            Run::new(options.clone()).ends_alike(world_size, what, &adam);
        }
    }
    for divisor in [Divisor::InitialWorld, Divisor::ActiveRanks] {
        let options = default.clone().divisor(divisor).first_bucket_bytes(700);
        let run = Run { batches: vec![3, 1, 0, 2], ..Run::new(options) };
        run.ends_alike(4, &format!("{divisor:?}"), &adam);
    }
    let run = Run { clips: true, ..Run::new(default) };
    for world_size in [1, 2, 4] {
        run.ends_alike(world_size, "clipped", &adam);
    }
}

#[test]
fn norms_have_the_bits_of_plain_ddp_and_problems_are_everyones() {
    let start = Mlp::new(WIDTH, 3, &device());
    for order in [1.0, 2.0, 3.5, f64::INFINITY] {
        let clip = ClipGradNorm::new(0.1).norm_type(order).error_if_nonfinite(true);
        let plain = on_ranks(3, |group| {
            let (ddp, model) = DistributedDataParallel::wrap(start.clone(), &group).unwrap();
            let loss = Run::loss(&model, group.rank(), 0, 0);
            clip.clip(&mut ddp.backward(loss, &model).unwrap(), &model).unwrap().to_bits()
        });
        let sharded = on_ranks(3, |group| {
            let (optimizer, model) =
                ShardedOptimizer::wrap(start.clone(), SgdConfig::new(), &group).unwrap();
            let loss = Run::loss(&model, group.rank(), 0, 0);
            let norm = clip.clip(&mut optimizer.backward(loss, &model).unwrap(), &model).unwrap();

            // One element of one owner's part is not finite.
            let loss = model.head.bias.as_ref().unwrap().val().sum() * f32::INFINITY
                + Run::loss(&model, group.rank(), 0, 0);
            let mut gradients = optimizer.backward(loss, &model).unwrap();
            let error = clip.clip(&mut gradients, &model).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NonFiniteNorm, "{error}");
            norm.to_bits()
        });
        assert_eq!(plain, sharded, "{order}");
    }
    for error in on_ranks(2, |group| {
        let (optimizer, model) =
            ShardedOptimizer::wrap(start.clone(), SgdConfig::new(), &group).unwrap();
        let mut gradients = optimizer.backward(Run::loss(&model, 0, 0, 0), &model).unwrap();
        ClipGradNorm::new(1.0).norm_type(0.0).clip(&mut gradients, &model).unwrap_err()
    }) {
        assert!(error.to_string().contains("an order above zero, not 0"), "{error}");
    }
}

#[test]
fn an_infinity_of_one_owner_skips_the_step_of_all() {
    let start = Mlp::new(WIDTH, 1, &device());
    let ranks = on_ranks(3, |group| {
        let (mut optimizer, mut model) =
            ShardedOptimizer::wrap(start.clone(), AdamConfig::new(), &group).unwrap();
        let scale = LossScale::default().init_scale(8.0).growth_interval(2);
        let (mut scaler, mut made) = (GradScaler::new(scale), Vec::new());
        for step in 0..4 {
            let bias = model.head.bias.as_ref().unwrap().val().sum();
            let factor = if (step, group.rank()) == (2, 1) { f32::INFINITY } else { 0.0 };
            let loss = Run::loss(&model, group.rank(), step, 0) + bias * factor;
            let mut gradients = optimizer.backward(scaler.scale(loss), &model).unwrap();
            if scaler.unscale(&mut gradients, &model).unwrap() {
                made.push(step);
                model = optimizer.step(0.1, model, gradients).unwrap();
            }
            scaler.update();
        }
        assert_eq!((made, scaler.loss_scale().value()), (vec![0, 1, 3], 8.0));
        named_tensors(&model).unwrap()
    });
    assert!(ranks.iter().all(|values| *values == ranks[0]));
}

#[test]
fn a_rank_keeps_the_state_of_its_own_parameters_alone() {
    let start = Mlp::new(WIDTH, 3, &device());
    let parameters = named_tensors(&start).unwrap();
    let bytes = |tensor: &NamedTensor| tensor.values.as_bytes().len();
    let total: usize = parameters.iter().map(bytes).sum();
    let largest = parameters.iter().map(bytes).max().unwrap();
    for world_size in 1..=4 {
        let ranks = on_ranks(world_size, |group| {
            let (mut optimizer, mut model) =
                ShardedOptimizer::wrap(start.clone(), AdamConfig::new(), &group).unwrap();
            for step in 0..2 {
                let loss = Run::loss(&model, group.rank(), step, 0);
                let gradients = optimizer.backward(loss, &model).unwrap();
                let own: usize = parameters
                    .iter()
                    .filter(|it| optimizer.owner(&it.name) == Some(group.rank()))
                    .count();
                assert_eq!(gradients.here().len(), own);
                model = optimizer.step(0.01, model, gradients).unwrap();
            }
            let stats = optimizer.stats();
            let gathered = if world_size == 1 { 0 } else { stats.steps * total as u64 };
            assert_eq!(stats.bytes_gathered, gathered);
            // Adam keeps two moments.
            let state = optimizer.part().into_bytes().unwrap();
            (state_bytes(&state), optimizer.owners().bytes(group.rank()))
        });
        let all: usize = ranks.iter().map(|(state, _)| state).sum();
        assert_eq!(all, 2 * total, "nothing twice, nothing missing");
        for (state, own) in ranks {
            assert_eq!(state, 2 * own);
            assert!(state <= 2 * (total / world_size + largest));
        }
    }
}

/// The bytes of the tensors in a record.
fn state_bytes(record: &burn::tensor::Bytes) -> usize {
    let reader = burn_pack::Reader::from_bytes(record.clone()).unwrap();
    let tensors = reader.into_tensors().unwrap().into_iter();
    tensors.map(|tensor| tensor.into_parts().unwrap().4.len()).sum()
}

#[test]
fn ignored_parameters_stay_with_every_rank() {
    let ranks = on_ranks(3, |group| {
        let own = Mlp::new(WIDTH, 2, &device()); // random
        let before = named_tensors(&own).unwrap();
        let options = DdpOptions::default().ignore(["layers.0"]);
        let (mut optimizer, mut model) =
            ShardedOptimizer::wrap_with(own, AdamConfig::new(), &group, &options).unwrap();
        assert_eq!(optimizer.owner("layers.0.weight"), None);
        for step in 0..2 {
            let loss = Run::loss(&model, group.rank(), step, 0);
            let mut gradients = optimizer.backward(loss, &model).unwrap();
            let norm = ClipGradNorm::new(0.1).ignore(["layers.0"]);
            norm.clip(&mut gradients, &model).unwrap();
            model = optimizer.step(0.01, model, gradients).unwrap();
        }
        let after = named_tensors(&model).unwrap();
        assert!(before.iter().zip(&after).all(|(before, after)| before != after), "all learn");
        let (kept, shared): (Vec<_>, Vec<_>) =
            after.into_iter().partition(|tensor| tensor.name.starts_with("layers.0."));
        (optimizer.parameters_digest(&model).unwrap(), kept, shared)
    });
    assert!(ranks.iter().all(|rank| (rank.0, &rank.2) == (ranks[0].0, &ranks[0].2)));
    assert!(ranks[1].1 != ranks[0].1 && ranks[2].1 != ranks[0].1);
}

/// Micro-batches of the next step may come before the step that is due. They lie in the memory through which values
/// travel.
#[test]
fn micro_batches_before_a_step_are_not_lost() {
    let start = Mlp::new(WIDTH, 2, &device());
    let loss = |model: &Mlp, group: &ProcessGroup, data| Run::loss(model, group.rank(), data, 0);
    let plain = on_ranks(2, |group| {
        let (ddp, mut model) = DistributedDataParallel::wrap(start.clone(), &group).unwrap();
        let mut optimizer = SgdConfig::new().init();
        for step in 0..4 {
            let gradients = ddp.backward(loss(&model, &group, step), &model).unwrap();
            ddp.accumulate(loss(&model, &group, step + 10), &model).unwrap();
            model = optimizer.step(0.1, model, gradients);
        }
        named_tensors(&model).unwrap()
    });
    let sharded = on_ranks(2, |group| {
        let (mut optimizer, mut model) =
            ShardedOptimizer::wrap(start.clone(), SgdConfig::new(), &group).unwrap();
        for step in 0..4 {
            let gradients = optimizer.backward(loss(&model, &group, step), &model).unwrap();
            optimizer.accumulate(loss(&model, &group, step + 10), &model).unwrap();
            model = optimizer.step(0.1, model, gradients).unwrap();
        }
        named_tensors(&model).unwrap()
    });
    assert!(sharded.iter().all(|values| *values == plain[0]));
}

#[test]
fn a_fault_is_named_on_every_rank_and_the_next_step_works() {
    for error in on_ranks(3, |group| {
        let (mut optimizer, model) =
            ShardedOptimizer::wrap(Mlp::new(WIDTH, 1, &device()), AdamConfig::new(), &group)
                .unwrap();
        let loss = match group.rank() {
            1 => model.head.weight.val().sum(),
            rank => Run::loss(&model, rank, 0, 0),
        };
        let error = optimizer.backward(loss, &model).unwrap_err().to_string();
        let gradients = optimizer.backward(Run::loss(&model, 0, 0, 0), &model).unwrap();
        optimizer.step(0.1, model, gradients).unwrap();
        error
    }) {
        let wanted = "`layers.0.weight`, `layers.0.bias`, `head.bias` got no gradient on rank 1";
        assert!(error.contains(wanted), "{error}");
    }
}

#[test]
fn a_wrong_combination_is_an_error_on_every_rank() {
    let start = Mlp::new(WIDTH, 1, &device());
    let distinct = |errors: Vec<String>| errors.into_iter().collect::<BTreeSet<_>>();

    // An optimizer that has taken steps for all parameters.
    let alone = ProcessGroup::alone();
    let (ddp, model) = DistributedDataParallel::wrap(start.clone(), &alone).unwrap();
    let mut used = AdamConfig::new().init();
    let gradients = ddp.backward(Run::loss(&model, 0, 0, 0), &model).unwrap();
    let model = used.step(0.1, model, gradients);
    let errors = distinct(on_ranks(2, |group| {
        ShardedOptimizer::wrap(model.clone(), used.clone(), &group).unwrap_err().to_string()
    }));
    let [error] = &Vec::from_iter(errors)[..] else { panic!("the ranks differ") };
    for wanted in [
        "on rank 0: the optimizer has state already for parameter `layers.0.bias`, which rank 1 owns",
        "on rank 1: the optimizer has state already for parameter `layers.0.weight`, which rank 0 owns",
    ] {
        assert!(error.contains(wanted), "{error}");
    }

    // Averages that are shared out, for an optimizer that is not.
    let errors = distinct(on_ranks(2, |group| {
        let options = DdpOptions::default().sharded(true);
        let wrapped = DistributedDataParallel::wrap_with(start.clone(), &group, &options);
        wrapped.map(drop).unwrap_err().to_string()
    }));
    assert!(errors.iter().all(|error| error.contains("use `ShardedOptimizer::wrap_with`")));
    assert_eq!(errors.len(), 1);

    // Ranks of both kinds.
    let errors = distinct(on_ranks(2, |group| match group.rank() {
        0 => ShardedOptimizer::wrap(start.clone(), AdamConfig::new(), &group)
            .map(drop)
            .unwrap_err()
            .to_string(),
        _ => {
            DistributedDataParallel::wrap(start.clone(), &group).map(drop).unwrap_err().to_string()
        }
    }));
    let wanted = "rank 1: option `sharded optimizer` is false, rank 0 has true";
    assert!(errors.iter().all(|error| error.contains(wanted)), "{errors:?}");

    on_ranks(2, |group| {
        let wrap = || ShardedOptimizer::wrap(start.clone(), AdamConfig::new(), &group).unwrap();
        let ((first, model), (mut second, other)) = (wrap(), wrap());
        let gradients = first.backward(Run::loss(&model, 0, 0, 0), &model).unwrap();
        let error = second.step(0.1, other, gradients).unwrap_err().to_string();
        assert!(error.contains("computed by another `ShardedOptimizer`"), "{error}");

        let again = DistributedDataParallel::wrap(model.clone(), &group).map(drop).unwrap_err();
        let again = again.to_string();
        assert!(again.contains("`layers.0.weight` was wrapped by a `ShardedOptimizer`"), "{again}");
        assert!(again.to_string().contains("`Learner` owns its optimizer"), "{again}");
        assert!(DistributedDataParallel::wrap(first.unwrap(model), &group).is_ok());
    });
}

#[cfg(feature = "ndarray")]
#[test]
fn parameters_of_other_devices_are_shared_out_too() {
    let device = crate::other_device();
    let start = Mlp::new(WIDTH, 2, &device);
    let loss = |model: &Mlp, rank: usize, step: usize| {
        let input = tensor([3, WIDTH], 10 * rank + step, &device);
        model.loss(input, Tensor::ones([3, 1], &device))
    };
    let plain = on_ranks(2, |group| {
        let (ddp, mut model) = DistributedDataParallel::wrap(start.clone(), &group).unwrap();
        let mut optimizer = AdamConfig::new().init();
        for step in 0..3 {
            let gradients = ddp.backward(loss(&model, group.rank(), step), &model).unwrap();
            model = optimizer.step(0.1, model, gradients);
        }
        named_tensors(&model).unwrap()
    });
    let sharded = on_ranks(2, |group| {
        let (mut optimizer, mut model) =
            ShardedOptimizer::wrap(start.clone(), AdamConfig::new(), &group).unwrap();
        for step in 0..3 {
            let gradients = optimizer.backward(loss(&model, group.rank(), step), &model).unwrap();
            model = optimizer.step(0.1, model, gradients).unwrap();
        }
        named_tensors(&model).unwrap()
    });
    assert!(sharded.iter().all(|values| *values == plain[0]));
}
