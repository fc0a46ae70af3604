//! A checkpoint that does not belong to a training is an error on every rank that names what differs.

use burn::{
    lr_scheduler::{
        exponential::ExponentialLrSchedulerConfig, module_lr_scheduler::ModuleLrScheduler,
    },
    module::{Module, Param},
    optim::{
        AdamConfig, AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig,
        momentum::MomentumConfig,
    },
    tensor::{self, DType, Device, TensorData},
};
use drumline::{
    ProcessGroup,
    checkpoint::{Checkpoint, Tensor},
    sampler::DistributedSampler,
};
use drumline_burn::{
    checkpoint::{
        Checkpoints, DataPosition, IntoOptimizer, OptimizerState, SchedulerState, TrainingState,
    },
    named_tensors,
};

use crate::{
    common::on_ranks,
    program::{BATCH, Net, SAMPLES, new_state, train},
};

const RANKS: usize = 2;

type Training = TrainingState<Net, ModuleOptimizer, ModuleLrScheduler, DistributedSampler>;

/// What both ranks say when they resume the state that `make` makes, from two steps of Adam.
fn problem<M: Module, O: OptimizerState, S: SchedulerState, P: DataPosition>(
    make: impl Fn(&ProcessGroup) -> TrainingState<M, O, S, P> + Sync,
) -> String {
    let directory = tempfile::tempdir().unwrap();
    on_ranks(RANKS, |group| train(&group, directory.path(), AdamConfig::new(), 2).unwrap());
    let errors = on_ranks(RANKS, |group| {
        let checkpoints = Checkpoints::open(directory.path(), &group).unwrap();
        checkpoints.resume(make(&group)).expect_err("it was resumed").to_string()
    });
    assert_eq!(errors[0], errors[1], "every rank gets the same text");
    errors[0].clone()
}

fn state_of<C: IntoOptimizer<Optimizer = ModuleOptimizer>>(
    optimizer: impl Fn() -> C + Sync,
) -> impl Fn(&ProcessGroup) -> Training + Sync {
    move |group| new_state(group, optimizer()).unwrap()
}

#[test]
fn another_model_is_named_by_parameter() {
    let error = problem(|group| {
        let Training { optimizer, scheduler, sampler, .. } =
            new_state(group, AdamConfig::new().init()).unwrap();
        let model = Net::new(6, &Device::flex().autodiff());
        TrainingState::new(model, optimizer).scheduler(scheduler).sampler(sampler)
    });
    assert!(error.contains("step-00000002.safetensors"), "{error}");
    assert!(error.contains("`first.weight` is f32[2, 4], the model has f32[2, 6]"), "{error}");
}

#[test]
fn a_model_that_differs_on_one_rank_only_stops_all() {
    let error = problem(|group| {
        let model = Net::new(4 + 2 * group.rank(), &Device::flex().autodiff());
        let whole = new_state(group, AdamConfig::new()).unwrap();
        TrainingState::new(model, AdamConfig::new())
            .scheduler(whole.scheduler)
            .sampler(whole.sampler)
    });
    assert!(error.contains("on rank 1: ") && !error.contains("on rank 0"), "{error}");
    assert!(error.contains("the model has f32[2, 6]"), "{error}");
}

#[test]
fn another_optimizer_is_named() {
    let error = problem(state_of(AdamWConfig::new));
    assert!(error.contains("it was made with optimizer AdamConfig {"), "{error}");
    assert!(error.contains("but this run has AdamWConfig {"), "{error}");
    assert!(error.contains("`init()`") && !error.contains('\n'), "{error}");

    let error = problem(state_of(|| AdamConfig::new().with_beta_1(0.8)));
    assert!(error.contains("\"beta_1\": 0.8") && error.contains("\"beta_1\": 0.9"), "{error}");

    // Without a configuration the form of the state is compared.
    let momentum = MomentumConfig::new();
    let error = problem(state_of(|| SgdConfig::new().with_momentum(Some(momentum.clone())).init()));
    assert!(error.contains("this one has no use for optimizer.first.bias."), "{error}");
}

#[test]
fn other_settings_on_purpose_are_fine() {
    let directory = tempfile::tempdir().unwrap();
    let group = ProcessGroup::alone();
    train(&group, directory.path(), AdamConfig::new(), 2).unwrap();
    let other = || AdamConfig::new().with_beta_1(0.8).init();
    train(&group, directory.path(), other(), 3).unwrap();
}

#[test]
fn another_scheduler_or_none_is_named() {
    let error = problem(|group| {
        let schedule = ExponentialLrSchedulerConfig::new(0.1, 0.9).init().unwrap();
        new_state(group, AdamConfig::new()).unwrap().scheduler(schedule)
    });
    assert!(error.contains("of another scheduler"), "{error}");
    assert!(error.contains("scheduler.0."), "{error}");
    let error = problem(|group| new_state(group, AdamConfig::new()).unwrap().scheduler(()));
    assert!(error.contains("this run has no use for scheduler.0.current_iter"), "{error}");
}

#[test]
fn other_data_or_none_is_named() {
    let error = problem(|group| {
        let sampler = DistributedSampler::builder(SAMPLES + 1, RANKS, group.rank()).seed(5);
        new_state(group, AdamConfig::new()).unwrap().sampler(sampler.build().unwrap())
    });
    assert!(error.contains("the state is of samples 60, but this sampler has 61"), "{error}");
    let error = problem(|group| new_state(group, AdamConfig::new()).unwrap().sampler(()));
    assert!(error.contains("holds the state of a sampler, but this run has none"), "{error}");
}

#[test]
fn settings_are_compared_with_the_checkpoint_and_between_ranks() {
    let error =
        problem(|group| new_state(group, AdamConfig::new()).unwrap().setting("data", "digits"));
    assert!(error.contains("it does not say its data; this run has digits"), "{error}");
    let error = problem(|group| {
        let size = BATCH * RANKS + group.rank();
        new_state(group, AdamConfig::new()).unwrap().setting("samples per step", size)
    });
    let differs = "on rank 1: samples per step is 11, but rank 0 has 10";
    assert!(error.contains(differs), "{error}");
    let error = problem(|group| new_state(group, AdamConfig::new()).unwrap().seed(12));
    assert!(error.contains("it was made with seed 11, but this run has 12"), "{error}");
}

#[test]
fn a_file_of_another_program_says_what_it_lacks() {
    let directory = tempfile::tempdir().unwrap();
    let group = ProcessGroup::alone();
    let checkpoints = Checkpoints::open(directory.path(), &group).unwrap();
    let model = || Net::new(4, &Device::flex().autodiff());
    let mut foreign = Checkpoint::default();
    for tensor in named_tensors(&model()).unwrap() {
        let bytes = tensor.values.as_bytes().to_vec();
        let name = format!("model.{}", tensor.name);
        foreign.insert(Tensor::new(name, tensor.values.dtype(), tensor.shape, bytes).unwrap());
    }
    let path = directory.path().join("foreign.safetensors");
    let resume = |foreign: &Checkpoint| {
        foreign.write(&path).unwrap();
        checkpoints.resume_from(&path, TrainingState::new(model(), SgdConfig::new()))
    };
    let problem = |foreign: &Checkpoint| resume(foreign).expect_err("resumed").to_string();
    assert!(problem(&foreign).contains("it does not say its steps"), "{}", problem(&foreign));
    foreign.metadata.insert("steps".into(), "many".into());
    assert!(problem(&foreign).contains("\"many\" is no number of steps"));
    foreign.metadata.insert("steps".into(), "7".into());
    let found = resume(&foreign).unwrap();
    assert_eq!((found.steps, found.resumed_from()), (7, Some(&*path)));

    // A state with other dimensions than the optimizer has: burn panics.
    let rank = Tensor::from_values("optimizer.first.weight.__rank", [], &[2_i64]).unwrap();
    foreign.insert(rank);
    let name = "optimizer.first.weight.momentum.velocity";
    foreign.insert(Tensor::from_values(name, [3], &[0.0_f32; 3]).unwrap());
    let text = problem(&foreign);
    assert!(text.contains("burn cannot load the state of the optimizer"), "{text}");
}

#[test]
fn values_must_have_names_of_their_own() {
    let directory = tempfile::tempdir().unwrap();
    let taken: [fn(&mut Checkpoint); 3] = [
        |values| drop(values.metadata.insert("steps".into(), "9".into())),
        |values| drop(values.metadata.insert("samples per step".into(), "9".into())),
        |values| {
            values.insert(Tensor::from_values("optimizer.mine", [], &[1_i64]).unwrap());
        },
    ];
    for take in taken {
        let errors = on_ranks(RANKS, |group| {
            let checkpoints = Checkpoints::open(directory.path(), &group).unwrap();
            let mut state = new_state(&group, AdamConfig::new()).unwrap();
            if group.rank() == 0 {
                take(&mut state.values);
            }
            checkpoints.save(&state).unwrap_err().to_string()
        });
        for error in errors {
            assert!(error.contains("is a name of the training state itself"), "{error}");
        }
    }
}

#[test]
fn a_directory_that_cannot_be_written_is_an_error_on_every_rank() {
    let errors = on_ranks(RANKS, |group| {
        Checkpoints::open("/proc/self/nothing", &group).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|e| e.contains("/proc/self/nothing")), "{errors:?}");
    let directory = tempfile::tempdir().unwrap();
    let nothing = directory.path().join("nothing");
    let errors = on_ranks(RANKS, |group| {
        let checkpoints = Checkpoints::open(directory.path(), &group).unwrap();
        let state = new_state(&group, AdamConfig::new()).unwrap();
        checkpoints.resume_from(&nothing, state).err().unwrap().to_string()
    });
    assert!(errors.iter().all(|e| e.contains("holds no checkpoint")), "{errors:?}");
}

/// burn would load the velocity as f32, the type of the default device.
#[test]
fn a_state_that_burn_would_round_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (group, device) = (ProcessGroup::alone(), Device::flex().autodiff());
    let double = || {
        let data = TensorData::new(vec![0.1_f64, 0.2], [2, 1]);
        burn::nn::Linear {
            weight: Param::from_tensor(tensor::Tensor::from_data(data, (&device, DType::F64))),
            bias: None,
        }
    };
    let state = || {
        let config = SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
        TrainingState::new(double(), config)
    };
    let checkpoints = Checkpoints::open(directory.path(), &group).unwrap();
    let mut training = state();
    let loss = (training.model.weight.val() * 0.3).square().sum();
    let gradients = GradientsParams::from_grads(loss.backward(), &training.model);
    training.model = training.optimizer.step(0.1, training.model, gradients);
    checkpoints.save(&training).unwrap();
    let error = checkpoints.resume(state()).unwrap_err().to_string();
    let expected = "optimizer.weight.momentum.velocity is f64, but burn loads it as f32";
    assert!(error.contains(expected) && error.contains("configure"), "{error}");
}
