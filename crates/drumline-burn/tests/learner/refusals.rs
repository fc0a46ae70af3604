//! Ranks that do not fit together: an error on all of them, before the first step.

use burn::{lr_scheduler::constant::ConstantLr, optim::SgdConfig, tensor::Device, train::Learner};
use drumline::ProcessGroup;
use drumline_burn::{DistributedDataParallel, ShardedOptimizer, distribute};
use tempfile::TempDir;

use crate::{
    network::{Network, Notes},
    training::{Setup, device, error, learner, on_ranks},
};

/// Trains on two ranks. Returns the errors, and the number of updates.
fn errors(
    setup: impl Fn(usize) -> Setup + Sync,
    width: impl Fn(usize) -> usize + Sync,
) -> Vec<String> {
    on_ranks(2, |group| {
        let notes = Notes::default();
        let directory = TempDir::new().unwrap();
        let model = Network::new(1, width(group.rank()), notes.clone(), &device());
        let training = setup(group.rank()).training(directory.path());
        let result = distribute(training, &group).launch(learner(model));
        assert!(notes.losses().is_empty(), "a step was run");
        error(&result)
    })
}

#[test]
fn settings_that_differ_are_named() {
    type Case = (fn(usize) -> Setup, &'static str);
    let cases: [Case; 4] = [
        (
            |rank| Setup { epochs: 1 + rank, ..Setup::new(0..32, 4) },
            "on rank 1: num_epochs is 2, but rank 0 has 1",
        ),
        (|rank| Setup::new(0..32, 4 + rank), "on rank 1: batch_size is 5, but rank 0 has 4"),
        (
            |rank| Setup { accumulation: Some(2 + rank), ..Setup::new(0..32, 4) },
            "on rank 1: grads_accumulation is 3, but rank 0 has 2",
        ),
        (
            |rank| Setup::new(0..32 + 2 * rank, 4),
            "on rank 1: items of the training data is 34, but rank 0 has 32",
        ),
    ];
    for (setup, expected) in cases {
        for error in errors(setup, |_| 8) {
            assert!(error.contains(expected), "{error}");
        }
    }
    for error in errors(|_| Setup::new(0..32, 4), |rank| 8 + rank) {
        assert!(error.contains("the model differs between ranks"), "{error}");
    }
}

#[test]
fn a_model_on_a_device_without_autodiff_is_refused() {
    for error in on_ranks(2, |group| {
        let directory = TempDir::new().unwrap();
        let model = Network::new(1, 8, Notes::default(), &Device::flex());
        let training = Setup::new(0..32, 4).training(directory.path());
        error(&distribute(training, &group).launch(learner(model)))
    }) {
        assert!(error.contains("no parameter to train"), "{error}");
        assert!(error.contains("create it on a device with autodiff"), "{error}");
    }
}

#[test]
fn fewer_samples_than_ranks_are_refused() {
    for error in errors(|_| Setup::new(0..1, 4), |_| 8) {
        assert!(error.contains("1 items for 2 ranks"), "{error}");
    }
    for error in errors(|_| Setup::new(0..0, 4), |_| 8) {
        assert!(error.contains("0 items for 2 ranks"), "{error}");
    }
}

#[test]
fn the_first_sample_that_one_rank_cannot_read_is_refused() {
    let setup = |rank| {
        let mut setup = Setup::new(0..32, 4);
        setup.train.unreadable = (rank == 1).then_some(16);
        setup
    };
    for error in errors(setup, |_| 8) {
        assert!(error.contains("rank 1: cannot read data: sample 16 is unreadable"), "{error}");
    }
}

#[test]
fn a_learner_on_another_model_than_the_wrapped_one_is_refused() {
    let launch = |group: &ProcessGroup, wrapped: Network, learned: Option<Network>, tells: bool| {
        let directory = TempDir::new().unwrap();
        let (ddp, wrapped) = DistributedDataParallel::wrap(wrapped, group).unwrap();
        let training = Setup::new(0..32, 4).training(directory.path());
        let training = distribute(training, group);
        let training = if tells { training.wrapped(&ddp) } else { training };
        error(&training.launch(learner(learned.unwrap_or(wrapped))))
    };
    let network = |width| Network::new(1, width, Notes::default(), &device());
    for error in on_ranks(2, |group| launch(&group, network(8), Some(network(8)), true)) {
        assert!(error.contains("has no gradient taps"), "{error}");
    }
    for error in on_ranks(2, |group| launch(&group, network(8), None, false)) {
        assert!(error.contains("was wrapped before"), "{error}");
    }
    // Only rank 1 has forgotten it.
    for error in on_ranks(2, |group| launch(&group, network(8), None, group.rank() == 0)) {
        assert!(error.contains("on rank 1: wrapped is false, but rank 0 has true"), "{error}");
    }
    for error in on_ranks(2, |group| {
        let other = (group.rank() == 1).then(|| network(8));
        launch(&group, network(8), other, true)
    }) {
        assert!(error.contains("rank 1: the model of the learner has no gradient taps"), "{error}");
    }
}

#[test]
fn a_model_that_was_wrapped_over_another_group_is_refused() {
    for error in on_ranks(2, |group| {
        let directory = TempDir::new().unwrap();
        let model = Network::new(1, 8, Notes::default(), &device());
        let (ddp, model) = DistributedDataParallel::wrap(model, &ProcessGroup::alone()).unwrap();
        let training = Setup::new(0..32, 4).training(directory.path());
        error(&distribute(training, &group).wrapped(&ddp).launch(learner(model)))
    }) {
        assert!(error.contains("the model was wrapped over group"), "{error}");
    }
}

#[test]
fn ranks_that_do_not_agree_on_who_deals_shares_are_named() {
    for error in on_ranks(2, |group| {
        let (directory, notes) = (TempDir::new().unwrap(), Notes::default());
        let model = Network::new(1, 8, notes.clone(), &device());
        let training = distribute(Setup::new(0..32, 4).training(directory.path()), &group);
        let training = if group.rank() == 1 { training.deals_shares() } else { training };
        let error = error(&training.launch(learner(model)));
        assert!(notes.losses().is_empty(), "a step was run");
        error
    }) {
        assert!(error.contains("on rank 1: deals_shares is true, but rank 0 has false"), "{error}");
    }
}

#[test]
fn ranks_with_another_optimizer_are_told_after_the_first_step() {
    for (error, updates) in on_ranks(2, |group| {
        let notes = Notes::default();
        let directory = TempDir::new().unwrap();
        let model = Network::new(1, 8, notes.clone(), &device());
        let rate = ConstantLr::new(if group.rank() == 0 { 0.1 } else { 0.2 });
        let learner = Learner::new(model, SgdConfig::new().init(), rate);
        let training = Setup::new(0..64, 4).training(directory.path());
        let result = distribute(training, &group).launch(learner);
        (error(&result), notes.rates().len())
    }) {
        assert!(error.contains("after step 1, parameter `"), "{error}");
        assert!(error.contains("on rank 1 differs from that of rank 0"), "{error}");
        assert_eq!(updates, 1);
    }
}

#[test]
fn a_rank_with_fewer_batches_is_named() {
    // As many items, but the loader of rank 1 deals shares that end early.
    for (error, updates) in on_ranks(2, |group| {
        let notes = Notes::default();
        let directory = TempDir::new().unwrap();
        let model = Network::new(1, 8, notes.clone(), &device());
        let setup = Setup::new(0..20, 4);
        let mut training = setup.training(directory.path());
        if group.rank() == 1 {
            let short = crate::network::ends_early(setup.train.loader(4, 0), 3);
            training = burn::train::SupervisedTraining::new(
                directory.path(),
                short,
                setup.valid.loader(4, 0),
            )
            .with_application_logger(None);
        }
        let result = distribute(training, &group).deals_shares().launch(learner(model));
        (error(&result), notes.rates().len())
    }) {
        assert!(error.contains("rank 1 has no batch after batch 3 of the epoch"), "{error}");
        assert_eq!(updates, 3);
    }
}

#[test]
fn a_model_of_a_sharded_optimizer_is_refused_with_what_to_do() {
    for is_wrapped in [false, true] {
        for error in on_ranks(2, |group| {
            let directory = TempDir::new().unwrap();
            let new = || Network::new(1, 8, Notes::default(), &device());
            let (_optimizer, model) =
                ShardedOptimizer::wrap(new(), SgdConfig::new(), &group).unwrap();
            let (ddp, _) = DistributedDataParallel::wrap(new(), &group).unwrap();
            let training = Setup::new(0..32, 4).training(directory.path());
            let training = distribute(training, &group);
            let training = if is_wrapped { training.wrapped(&ddp) } else { training };
            error(&training.launch(learner(model)))
        }) {
            assert!(error.contains("a `Learner` owns its optimizer"), "{error}");
            assert!(error.contains("train in a loop of your own"), "{error}");
        }
    }
}
