//! State that is shared out between the ranks: its files are those of one that is not, and any number of ranks goes on
//! from them.

use std::{
    env, fs,
    path::Path,
    process::{Child, Stdio},
    thread,
    time::{Duration, Instant},
};

use burn::{
    module::ParamGroup,
    optim::{
        AdafactorConfig, AdamConfig, AdamWConfig, LionConfig, ModuleOptimizer, MuonConfig,
        SgdConfig, momentum::MomentumConfig,
    },
};
use drumline::{ProcessGroup, checkpoint::CheckpointDirectory};
use drumline_burn::{
    DdpOptions, DistributedDataParallel, Result, ShardedOptimizer,
    checkpoint::{Checkpoints, TrainingState},
    parameters_digest,
};
use drumline_testing::itself;

use crate::{
    common::on_ranks,
    program::{file, new_net, run, with_the_rest},
};

/// The samples of a step, of all ranks together.
const SAMPLES_PER_STEP: usize = 12;

fn optimizers() -> [(&'static str, ModuleOptimizer); 6] {
    let matrices = ParamGroup::from_predicate("weight");
    let muon = AdamWConfig::new().init().with_group(matrices, MuonConfig::new().build(), None);
    let momentum = Some(MomentumConfig::new());
    [
        ("Adafactor", AdafactorConfig::new().init()),
        ("Adam", AdamConfig::new().init()),
        ("AdamW", AdamWConfig::new().with_amsgrad(true).init()),
        ("Lion", LionConfig::new().init()),
        ("Muon", muon),
        ("SGD", SgdConfig::new().with_momentum(momentum).init()),
    ]
}

/// Goes on with the training in `out` up to `steps` steps.
fn train(
    group: &ProcessGroup,
    out: &Path,
    optimizer: ModuleOptimizer,
    steps: u64,
    is_sharded: bool,
) -> Result<()> {
    let batch = SAMPLES_PER_STEP / group.world_size();
    let checkpoints = Checkpoints::open(out, group)?;
    if is_sharded {
        let (optimizer, model) = ShardedOptimizer::wrap(new_net(), optimizer, group)?;
        let state = with_the_rest(group, TrainingState::new(model, optimizer), batch)?;
        let training = checkpoints.resume(state)?;
        return run(group, &checkpoints, training, steps, batch, |optimizer, rate, model, loss| {
            let gradients = optimizer.backward(loss, &model)?;
            optimizer.step(rate, model, gradients)
        });
    }
    let (ddp, model) = DistributedDataParallel::wrap(new_net(), group)?;
    let state = with_the_rest(group, TrainingState::new(model, optimizer), batch)?;
    let training = checkpoints.resume(state)?;
    run(group, &checkpoints, training, steps, batch, |optimizer, rate, model, loss| {
        let gradients = ddp.backward(loss, &model)?;
        Ok(optimizer.step(rate, model, gradients))
    })
}

fn train_on(world_size: usize, out: &Path, optimizer: &ModuleOptimizer, steps: u64, shared: bool) {
    on_ranks(world_size, |group| train(&group, out, optimizer.clone(), steps, shared).unwrap());
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        if entry.path().extension().is_some_and(|it| it == "safetensors") {
            fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
}

#[test]
fn files_are_the_same_bytes_and_any_number_of_ranks_goes_on_from_them() {
    for (name, optimizer) in optimizers() {
        let directory = tempfile::tempdir().unwrap();
        let out = |what: &str| directory.path().join(what);
        train_on(2, &out("plain"), &optimizer, 3, false);
        train_on(2, &out("sharded"), &optimizer, 3, true);
        assert!(file(&out("sharded"), 3) == file(&out("plain"), 3), "{name}: other bytes");
        for world_size in [1, 3, 4] {
            let [plain, sharded] =
                ["plain", "sharded"].map(|what| out(&format!("{what} on {world_size}")));
            copy(&out("sharded"), &plain);
            copy(&out("sharded"), &sharded);
            train_on(world_size, &plain, &optimizer, 6, false);
            train_on(world_size, &sharded, &optimizer, 6, true);
            let same = file(&sharded, 6) == file(&plain, 6);
            assert!(same, "{name}: other bytes on {world_size} ranks");
        }
    }
}

#[test]
fn a_file_of_another_optimizer_or_model_is_refused_on_every_rank() {
    let directory = tempfile::tempdir().unwrap();
    train_on(2, directory.path(), &AdamConfig::new().init(), 2, true);
    let errors = on_ranks(3, |group| {
        let optimizer = SgdConfig::new().init();
        train(&group, directory.path(), optimizer, 3, true).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    assert!(errors[0].contains("it is of another optimizer"), "{}", errors[0]);
}

/// What every rank keeps for itself is rank 0's in a file, as without sharding.
#[test]
fn ignored_parameters_are_those_of_rank_0() {
    let directory = tempfile::tempdir().unwrap();
    let options = DdpOptions::default().ignore(["first"]);
    let saved = on_ranks(3, |group| {
        let checkpoints = Checkpoints::open(directory.path(), &group).unwrap();
        let (optimizer, model) =
            ShardedOptimizer::wrap_with(new_net(), AdamConfig::new(), &group, &options).unwrap();
        let mut training = TrainingState::new(model, optimizer);
        let input =
            crate::program::batch(&[group.rank(), 7], &burn::tensor::Device::flex().autodiff());
        let loss = {
            let _guard = crate::program::generator();
            training.model.loss(input)
        };
        let gradients = training.optimizer.backward(loss, &training.model).unwrap();
        training.model = training.optimizer.step(0.1, training.model, gradients).unwrap();
        training.steps += 1;
        checkpoints.save(&training).unwrap();
        parameters_digest(&training.model).unwrap()
    });
    let resumed = on_ranks(2, |group| {
        let checkpoints = Checkpoints::open(directory.path(), &group).unwrap();
        let (optimizer, model) =
            ShardedOptimizer::wrap_with(new_net(), AdamConfig::new(), &group, &options).unwrap();
        let training = checkpoints.resume(TrainingState::new(model, optimizer)).unwrap();
        parameters_digest(&training.model).unwrap()
    });
    assert_eq!(resumed, [saved[0]; 2]);
}

const OUT: &str = "TEST_SHARDED_OUT";
const STEPS: u64 = 30;
/// Far more than anything here takes: it only tells a hang from slowness.
const HANG: Duration = Duration::from_secs(120);

/// The process that the test below kills, with two ranks. Does nothing when the tests run.
#[test]
fn program_to_kill() {
    let Some(out) = env::var_os(OUT) else { return };
    train_on(2, Path::new(&out), &AdamWConfig::new().init(), STEPS, true);
}

fn start(out: &Path) -> Child {
    itself("sharded::program_to_kill").env(OUT, out).stdout(Stdio::null()).spawn().unwrap()
}

#[test]
fn killed_on_two_ranks_it_goes_on_with_four() {
    let optimizer = AdamWConfig::new().init();
    for after in [1, 4, 9] {
        let directory = tempfile::tempdir().unwrap();
        let out = |what: &str| directory.path().join(what);
        let files = CheckpointDirectory::new(out("killed"));
        let mut child = start(&out("killed"));
        let started = Instant::now();
        while files.steps().unwrap().last().is_none_or(|last| *last < after) {
            assert!(started.elapsed() < HANG, "the program hangs");
            assert!(child.try_wait().unwrap().is_none(), "the program ended by itself");
            thread::sleep(Duration::from_micros(200));
        }
        thread::sleep(Duration::from_micros(700 * after)); // anywhere within a step
        child.kill().unwrap(); // SIGKILL
        child.wait().unwrap();

        copy(&out("killed"), &out("plain"));
        train_on(4, &out("plain"), &optimizer, STEPS, false);
        train_on(4, &out("killed"), &optimizer, STEPS, true);
        assert!(file(&out("killed"), STEPS) == file(&out("plain"), STEPS), "other bits");
    }
}
