//! Rank 0 alone writes files.

use std::{
    fs,
    path::{Path, PathBuf},
};

use burn::train::{SupervisedTraining, checkpoint::KeepLastNCheckpoints, metric::LossMetric};
use drumline_burn::{distribute, parameters_digest};
use tempfile::TempDir;

use crate::{
    network::{Network, Notes},
    training::{Setup, device, error, learner, on_ranks},
};

/// All files below `directory`.
pub(crate) fn files(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found
}

/// burn's own choice of files. Only the logger of the process is left out, because the ranks are threads of one.
pub(crate) fn training(setup: &Setup, directory: &Path) -> SupervisedTraining<Network> {
    SupervisedTraining::new(
        directory,
        setup.train.clone().loader(setup.batch_size, 0),
        setup.valid.clone().loader(4, 0),
    )
    .num_epochs(setup.epochs)
    .metric_train_numeric(LossMetric::new())
    .metric_valid_numeric(LossMetric::new())
    .with_default_checkpointers()
    .with_checkpointing_strategy(KeepLastNCheckpoints::new(9))
    .with_application_logger(None)
    .summary()
}

#[test]
fn ranks_other_than_0_write_nothing() {
    let setup = Setup { epochs: 2, ..Setup::new(0..64, 4) };
    let directories: Vec<TempDir> = (0..3).map(|_| TempDir::new().unwrap()).collect();
    on_ranks(3, |group| {
        let model = Network::new(1, 8, Notes::default(), &device());
        let training = training(&setup, directories[group.rank()].path());
        let result = distribute(training, &group).launch(learner(model));
        assert!(result.error.is_none(), "{}", error(&result));
    });
    let written = files(directories[0].path());
    for name in ["model-1.bpk", "optim-2.bpk", "scheduler-2.bpk", "Loss.log"] {
        assert!(written.iter().any(|path| path.ends_with(name)), "{name}: {written:?}");
    }
    for other in &directories[1..] {
        assert_eq!(files(other.path()), Vec::<PathBuf>::new());
    }
}

#[test]
fn a_training_that_resumes_gets_the_bits_of_one_that_was_not_interrupted() {
    let run = |directory: &Path, epochs: usize, from: Option<usize>| {
        let setup = Setup { epochs, ..Setup::new(0..64, 4) };
        let digests = on_ranks(2, |group| {
            let model = Network::new(1 + group.rank(), 8, Notes::default(), &device());
            let mut training = training(&setup, directory);
            if let Some(epoch) = from {
                training = training.checkpoint(epoch);
            }
            let result = distribute(training, &group).launch(learner(model));
            assert!(result.error.is_none(), "{}", error(&result));
            parameters_digest(&result.model).unwrap()
        });
        assert_eq!(digests[0], digests[1]);
        digests[0]
    };
    let (whole, parts) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let expected = run(whole.path(), 3, None);
    let early = run(parts.path(), 1, None);
    assert_ne!(early, expected);
    assert_eq!(run(parts.path(), 3, Some(1)), expected);
}
