//! Every optimizer of burn, stopped after every step.

use burn::{
    module::{Module, ParamGroup},
    nn::LinearConfig,
    optim::{
        AdaGradConfig, AdafactorConfig, AdamConfig, AdamWConfig, AdanConfig, GradientsParams,
        LBFGSConfig, LambConfig, LionConfig, ModuleOptimizer, MuonConfig, RmsPropConfig, SgdConfig,
        decay::WeightDecayConfig, momentum::MomentumConfig,
    },
    tensor::Device,
};
use drumline::{ProcessGroup, checkpoint::Checkpoint};
use drumline_burn::{
    checkpoint::{Checkpoints, IntoOptimizer, TrainingState},
    named_tensors,
};

use crate::program::{batch, file, train};

const STEPS: u64 = 15; // an epoch has 12

/// Returns the checkpoint after the last step.
fn ends_with_the_same_bits<C: IntoOptimizer<Optimizer = ModuleOptimizer>>(
    optimizer: impl Fn() -> C,
) -> Checkpoint {
    let directory = tempfile::tempdir().unwrap();
    let group = ProcessGroup::alone();
    let out = |name: &str| directory.path().join(name);
    train(&group, &out("whole"), optimizer(), STEPS).unwrap();
    // Nothing is left of a run but its files.
    for steps in 1..=STEPS {
        train(&group, &out("parts"), optimizer(), steps).unwrap();
    }
    let whole = file(&out("whole"), STEPS);
    assert!(file(&out("parts"), STEPS) == whole, "other bits");
    let path = out("whole").join(format!("step-{STEPS:08}.safetensors"));
    Checkpoint::read(&path).unwrap()
}

/// The fields that a checkpoint holds of the optimizer of `first.weight`.
fn fields(checkpoint: &Checkpoint) -> Vec<String> {
    let section = checkpoint.section("optimizer.first.weight.");
    section.map(|(field, _)| field.to_owned()).collect()
}

#[test]
fn sgd_with_momentum() {
    let momentum = MomentumConfig { momentum: 0.9, dampening: 0.0, nesterov: true };
    let end = ends_with_the_same_bits(|| SgdConfig::new().with_momentum(Some(momentum.clone())));
    assert_eq!(fields(&end), ["__rank", "momentum.velocity"]);
    assert_eq!(end.tensor("losses").unwrap().shape(), [STEPS as usize]);
    assert_eq!(end.metadata["sampler"].split(' ').next(), Some("epoch=1"), "{:?}", end.metadata);
    assert!(end.tensor("scheduler.0.current_iter").is_some());
}

#[test]
fn adam() {
    let end = ends_with_the_same_bits(AdamConfig::new);
    assert_eq!(fields(&end), ["__rank", "momentum.moment_1", "momentum.moment_2", "momentum.time"]);
}

#[test]
fn adam_w() {
    ends_with_the_same_bits(|| AdamWConfig::new().with_amsgrad(true));
}

#[test]
fn ada_grad() {
    let decay = WeightDecayConfig::new(0.01);
    ends_with_the_same_bits(|| AdaGradConfig::new().with_weight_decay(Some(decay.clone())));
}

#[test]
fn adafactor() {
    let end = ends_with_the_same_bits(AdafactorConfig::new);
    assert!(fields(&end).contains(&"column_second_moment".to_owned()), "{:?}", fields(&end));
}

#[test]
fn adan() {
    ends_with_the_same_bits(AdanConfig::new);
}

#[test]
fn lamb() {
    ends_with_the_same_bits(LambConfig::new);
}

#[test]
fn lion() {
    ends_with_the_same_bits(LionConfig::new);
}

#[test]
fn rms_prop() {
    ends_with_the_same_bits(|| RmsPropConfig::new().with_centered(true));
}

/// Muon takes matrices only, so the vectors have another optimizer: a group is found by name on resuming.
#[test]
fn muon_for_matrices_and_adam_for_vectors() {
    let muon = || {
        let matrices = ParamGroup::from_predicate("weight");
        AdamWConfig::new().init().with_group(matrices, MuonConfig::new().build(), None)
    };
    let end = ends_with_the_same_bits(muon);
    assert_eq!(fields(&end), ["__rank", "momentum.velocity"]);
    assert!(end.tensor("optimizer.norm.gamma.momentum.moment_2").is_some());
}

/// Its state belongs to no single parameter, and its step computes several losses.
#[test]
fn lbfgs() {
    let directory = tempfile::tempdir().unwrap();
    let (group, device) = (ProcessGroup::alone(), Device::flex().autodiff());
    let input = batch(&[1, 5, 9, 13, 17, 21], &device);
    let target = input.clone().square().sum_dim(1);
    let run = |name: &str, steps: u64| {
        let model = LinearConfig::new(2, 1)
            .with_initializer(burn::nn::Initializer::Constant { value: 0.1 })
            .init(&device);
        let config = LBFGSConfig::new().with_max_iter(2).with_history_size(3);
        let checkpoints = Checkpoints::open(directory.path().join(name), &group).unwrap();
        let mut training = checkpoints.resume(TrainingState::new(model, config)).unwrap();
        while training.steps < steps {
            let closure = |model: burn::nn::Linear| {
                let loss = (model.forward(input.clone()) - target.clone()).square().mean();
                let value: f64 = loss.clone().into_scalar::<f32>().into();
                (value, GradientsParams::from_grads(loss.backward(), &model))
            };
            (training.model, _) = training.optimizer.step(0.1, training.model, closure);
            training.steps += 1;
            checkpoints.save(&training).unwrap();
        }
        assert_eq!(training.model.num_params(), 3);
        named_tensors(&training.model).unwrap()
    };
    let whole = run("whole", 5);
    (1..5).for_each(|steps| drop(run("parts", steps)));
    assert_eq!(run("parts", 5), whole);
    let out = |name: &str| directory.path().join(name);
    assert!(file(&out("parts"), 5) == file(&out("whole"), 5), "other bits");
}
