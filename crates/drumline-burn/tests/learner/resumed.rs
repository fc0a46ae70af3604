//! Trainings that resume from burn's checkpoints.

use std::{collections::BTreeMap, fs, path::Path};

use burn::{
    lr_scheduler::linear::LinearLrSchedulerConfig,
    optim::{AdamConfig, AdamWConfig, ModuleOptimizer, SgdConfig},
    train::{Learner, SupervisedTraining, metric::LossMetric},
};
use burn_pack::Reader;
use drumline::ProcessGroup;
use drumline_burn::{
    DistributedDataParallel, data::DataLoaderBuilder, distribute, newest_epoch, parameters_digest,
};
use tempfile::TempDir;

use crate::{
    network::{Network, Notes, Samples, Stack},
    training::{device, error, on_ranks},
};

/// How a rank trains.
pub(crate) struct Program {
    pub(crate) epochs: usize,
    pub(crate) width: usize,
    pub(crate) optimizer: ModuleOptimizer,
    pub(crate) wraps: bool,
    pub(crate) notes: Notes,
}

impl Program {
    pub(crate) fn new(epochs: usize) -> Self {
        let optimizer = AdamWConfig::new().init();
        Self { epochs, width: 8, optimizer, wraps: false, notes: Notes::default() }
    }

    /// Goes on after the newest epoch in `directory`, which only rank 0 needs, or after epoch `from`. Returns the
    /// digest of the parameters, or the error.
    pub(crate) fn run(
        self,
        group: &ProcessGroup,
        directory: &Path,
        from: Option<usize>,
    ) -> Result<u64, String> {
        let train = DataLoaderBuilder::new(Stack)
            .batch_size(3)
            .shuffle(5)
            .num_workers(1)
            .build(Samples::new(0..60), group)
            .unwrap();
        let mut training =
            SupervisedTraining::new(directory, train, Samples::new(9000..9006).loader(4, 0))
                .num_epochs(self.epochs)
                .metric_valid_numeric(LossMetric::new())
                .with_default_checkpointers()
                .with_application_logger(None);
        if let Some(epoch) = from.or(newest_epoch(directory, group).unwrap()) {
            training = training.checkpoint(epoch);
        }
        let model = Network::new(1 + group.rank(), self.width, self.notes, &device());
        let schedule = LinearLrSchedulerConfig::new(0.05, 0.001, 90).init().unwrap();
        let result = if self.wraps {
            let (ddp, model) = DistributedDataParallel::wrap(model, group).unwrap();
            let learner = Learner::new(model, self.optimizer, schedule);
            distribute(training, group).wrapped(&ddp).launch(learner)
        } else {
            distribute(training, group).launch(Learner::new(model, self.optimizer, schedule))
        };
        match result.error {
            None => Ok(parameters_digest(&result.model).unwrap()),
            Some(_) => Err(error(&result)),
        }
    }
}

/// All that burn has saved of an epoch. (It writes the tensors of an optimizer in any order.)
pub(crate) fn saved(directory: &Path, epoch: usize) -> BTreeMap<String, Vec<u8>> {
    let mut content = BTreeMap::new();
    for kind in ["model", "optim", "scheduler"] {
        let path = directory.join("checkpoint").join(format!("{kind}-{epoch}.bpk"));
        let reader = Reader::from_file(&path).unwrap();
        for (name, scalar) in reader.scalars() {
            content.insert(format!("{kind} {name}"), format!("{scalar:?}").into_bytes());
        }
        for tensor in reader.into_tensors().unwrap() {
            let (name, _, _, _, bytes) = tensor.into_parts().unwrap();
            content.insert(format!("{kind} {name}"), bytes.to_vec());
        }
    }
    content
}

/// Copies the checkpoints of a training that is to go on in another directory.
pub(crate) fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to.join("checkpoint")).unwrap();
    for entry in fs::read_dir(from.join("checkpoint")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, to.join("checkpoint").join(path.file_name().unwrap())).unwrap();
    }
}

#[test]
fn every_rank_resumes_with_the_state_of_rank_0_and_needs_no_files() {
    const EPOCHS: usize = 4;
    for (ranks, wraps) in [(2, false), (3, true)] {
        let directory = TempDir::new().unwrap();
        let run = |name: &str, epochs: usize| {
            let digests = on_ranks(ranks, |group| {
                // The directories of the other ranks stay empty.
                let name = format!("{name}-{}", group.rank());
                let program = Program { wraps, ..Program::new(epochs) };
                program.run(&group, &directory.path().join(name), None).unwrap()
            });
            assert!(digests.iter().all(|digest| *digest == digests[0]), "{digests:?}");
            digests[0]
        };
        // burn names parameters by numbers of chance, so both go on from one epoch.
        run("first", 1);
        for name in ["whole-0", "parts-0"] {
            copy(&directory.path().join("first-0"), &directory.path().join(name));
        }
        let whole = run("whole", EPOCHS);
        let parts: Vec<u64> = (2..=EPOCHS).map(|epochs| run("parts", epochs)).collect();
        assert_eq!(parts.last(), Some(&whole), "{ranks} ranks, wrapped {wraps}");
        let [whole, parts] =
            ["whole-0", "parts-0"].map(|name| saved(&directory.path().join(name), EPOCHS));
        assert!(whole == parts, "{ranks} ranks, wrapped {wraps}: another state of the optimizer");
        assert!(whole.keys().any(|name| name.contains("moment")), "{:?}", whole.keys());
    }
}

/// What both ranks say when `resume` goes on from an epoch that was trained with Adam.
fn errors(from: Option<usize>, resume: impl Fn() -> Program + Sync) -> Vec<String> {
    let directory = TempDir::new().unwrap();
    let adam = || Program { optimizer: AdamConfig::new().init(), ..Program::new(1) };
    on_ranks(2, |group| adam().run(&group, directory.path(), None).unwrap());
    on_ranks(2, |group| {
        let program = resume();
        let notes = program.notes.clone();
        let error = program.run(&group, directory.path(), from).unwrap_err();
        assert!(notes.losses().is_empty(), "a step was run");
        error
    })
}

#[test]
fn a_checkpoint_that_is_not_there_is_an_error_on_every_rank() {
    for error in errors(Some(7), || Program::new(9)) {
        assert!(error.contains("on rank 0: burn cannot begin this training"), "{error}");
        assert!(error.contains("Can load model checkpoint"), "{error}");
        assert!(error.contains("model-7.bpk"), "{error}");
    }
}

#[test]
fn a_checkpoint_of_another_model_is_an_error_on_every_rank() {
    for error in errors(None, || Program { width: 9, ..Program::new(2) }) {
        assert!(error.contains("on rank 0: burn cannot begin this training"), "{error}");
        assert!(error.contains("hidden.weight: shape mismatch"), "{error}");
    }
}

#[test]
fn a_checkpoint_of_another_optimizer_is_an_error_on_every_rank() {
    let directory = TempDir::new().unwrap();
    let sgd = || Program { optimizer: SgdConfig::new().init(), ..Program::new(1) };
    on_ranks(2, |group| sgd().run(&group, directory.path(), None).unwrap());
    for error in on_ranks(2, |group| {
        let program = Program::new(2);
        let notes = program.notes.clone();
        let error = program.run(&group, directory.path(), None).unwrap_err();
        assert!(notes.losses().is_empty(), "a step was run");
        error
    }) {
        assert!(error.contains("on rank 0: the checkpoint holds no state that this"), "{error}");
    }
}

#[test]
fn ranks_that_go_on_after_other_epochs_are_named() {
    let directory = TempDir::new().unwrap();
    on_ranks(2, |group| Program::new(2).run(&group, directory.path(), None).unwrap());
    for error in on_ranks(2, |group| {
        Program::new(3).run(&group, directory.path(), Some(1 + group.rank())).unwrap_err()
    }) {
        assert!(error.contains("on rank 1: checkpoint is 2, but rank 0 has 1"), "{error}");
    }
}
