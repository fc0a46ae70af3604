//! All ranks stop after the same step.

use std::{sync::Arc, thread, time::Duration};

use burn::train::{EarlyStoppingStrategy, Interrupter, metric::store::EventStoreClient};
use drumline_burn::{DistributedDataParallel, distribute, parameters_digest};
use tempfile::TempDir;

use crate::{
    network::{Network, Notes},
    training::{Setup, device, error, learner, on_ranks, on_ranks_within},
};

/// Why a training stops.
#[derive(Clone, Copy, Debug)]
enum Why {
    Wish,
    DataError,
    EarlyStop,
}

#[derive(Clone)]
struct StopAt(usize);

impl EarlyStoppingStrategy for StopAt {
    fn should_stop(&mut self, epoch: usize, _: &EventStoreClient) -> bool {
        epoch >= self.0
    }
}

/// Numbers that look random.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % bound
    }
}

fn rounds() -> u64 {
    std::env::var("LEARNER_TEST_ROUNDS").map_or(30, |rounds| rounds.parse().unwrap())
}

#[test]
fn a_rank_that_stops_stops_all_after_the_same_step() {
    const BATCHES: usize = 8;
    for round in 0..rounds() {
        let mut dice = Dice(round);
        let why = [Why::Wish, Why::DataError, Why::EarlyStop][round as usize % 3];
        let ranks = 2 + dice.below(2);
        let epochs = 3;
        let who = dice.below(ranks);
        let step = 1 + dice.below(BATCHES * epochs); // of that rank
        let accumulation = [None, Some(2), Some(3)][dice.below(3)];
        let wraps = dice.below(2) == 1;
        let case = format!(
            "round {round}: {why:?} of rank {who} of {ranks} at step {step}, accumulation \
             {accumulation:?}, wrapped {wraps}"
        );
        let unreadable = who * BATCHES * 2 + (step - 1) % BATCHES * 2;

        let of_ranks = on_ranks(ranks, |group| {
            let is_it = group.rank() == who;
            let mut setup = Setup { epochs, accumulation, ..Setup::new(0..ranks * BATCHES * 2, 2) };
            let interrupter = Interrupter::new();
            let mut notes = Notes::default();
            match why {
                Why::Wish if is_it => {
                    let interrupter = interrupter.clone();
                    notes = notes.at_step(move |at| {
                        if at == step {
                            interrupter.stop(Some("I am tired"));
                        }
                    });
                }
                Why::DataError if is_it => setup.train.unreadable = Some(unreadable),
                _ => {}
            }
            let directory = TempDir::new().unwrap();
            let training =
                setup.training(directory.path()).with_interrupter(interrupter).early_stopping(
                    StopAt(if matches!(why, Why::EarlyStop) { 1 + step % 2 } else { 99 }),
                );
            let model = Network::new(1, 8, notes.clone(), &device());
            let result = if wraps {
                let (ddp, model) = DistributedDataParallel::wrap(model, &group).unwrap();
                distribute(training, &group).wrapped(&ddp).launch(learner(model))
            } else {
                distribute(training, &group).launch(learner(model))
            };
            // The group is whole.
            group.barrier().unwrap();
            let digest = parameters_digest(&result.model).unwrap();
            let reason = result.interrupted.clone().and_then(|it| it.reason);
            (notes.rates().len(), digest, reason, error(&result))
        });

        let (updates, digest, ..) = of_ranks[0];
        for (rank, (others, other, reason, error)) in of_ranks.iter().enumerate() {
            assert_eq!((*others, *other), (updates, digest), "{case}, rank {rank}");
            match why {
                Why::Wish => {
                    let reason = reason.clone().unwrap();
                    assert_eq!(error, "", "{case}");
                    assert!(reason.contains("I am tired"), "{case}, rank {rank}: {reason}");
                    let names = reason.contains(&format!("rank {who}"));
                    assert_eq!(names, rank != who, "{case}, rank {rank}: {reason}");
                }
                Why::DataError => {
                    let sample = format!("sample {unreadable} is unreadable");
                    assert!(error.contains(&sample), "{case}, rank {rank}: {error}");
                    // At the start of an epoch all get one text, which names the rank.
                    let names = error.contains(&format!("rank {who}"))
                        || error.contains(&format!("device {who}"));
                    assert!(names || rank == who, "{case}, rank {rank}: {error}");
                }
                Why::EarlyStop => {
                    assert_eq!((reason, &error[..]), (&None, ""), "{case}, rank {rank}");
                }
            }
        }

        let each = accumulation.unwrap_or(1);
        let per_epoch = BATCHES.div_ceil(each);
        match why {
            // The wish is made in a step, and goes out with the next gradients.
            Why::Wish => {
                let (epoch, batch) = ((step - 1) / BATCHES, (step - 1) % BATCHES);
                let update = epoch * per_epoch + batch / each + 1;
                // A step that sends has sent its mark before.
                let sends = (batch + 1).is_multiple_of(each) || batch + 1 == BATCHES;
                let is_last_of_epoch = batch + 1 == BATCHES;
                let expected = if sends && !is_last_of_epoch { update + 1 } else { update };
                assert_eq!(updates, expected, "{case}");
            }
            Why::DataError => {
                // The first read fails: the updates before it, without those of an incomplete accumulation.
                assert_eq!(updates, (step - 1) % BATCHES / each, "{case}");
            }
            Why::EarlyStop => assert_eq!(updates, per_epoch * (1 + step % 2), "{case}"),
        }
    }
}

/// The others do not see the metrics, so they cannot judge.
#[test]
fn early_stopping_is_rank_0s() {
    // The epochs after which the ranks would stop, and the one after which all do.
    for (of_ranks, expected) in [([2, 1, 99], 2), ([99, 1, 1], 4), ([1, 99, 99], 1)] {
        for epochs in on_ranks(3, |group| {
            let setup = Setup { epochs: 4, ..Setup::new(0..3 * 8, 2) };
            let notes = Notes::default();
            let directory = TempDir::new().unwrap();
            let stops = StopAt(of_ranks[group.rank()]);
            let training = setup.training(directory.path()).early_stopping(stops);
            let model = Network::new(1, 8, notes.clone(), &device());
            let result = distribute(training, &group).launch(learner(model));
            assert_eq!((error(&result), result.interrupted), (String::new(), None));
            notes.rates().len() / 4
        }) {
            assert_eq!(epochs, expected, "{of_ranks:?}");
        }
    }
}

#[test]
fn the_others_wait_for_validation_beyond_the_time_limit_of_a_call() {
    for error in on_ranks_within(Duration::from_secs(3), 2, |group| {
        let notes = Notes::default().at_validation(|| thread::sleep(Duration::from_secs(5)));
        let directory = TempDir::new().unwrap();
        let mut setup = Setup::new(0..16, 4);
        setup.valid.numbers.truncate(1);
        let model = Network::new(1, 8, notes, &device());
        let training = setup.training(directory.path());
        error(&distribute(training, &group).launch(learner(model)))
    }) {
        assert_eq!(error, "");
    }
}

#[test]
fn a_rank_that_panics_ends_the_others() {
    let groups = drumline::rendezvous::local_world(2).unwrap();
    let threads: Vec<_> = groups
        .into_iter()
        .map(|group| {
            thread::spawn(move || {
                let rank = group.rank();
                let notes = Notes::default().at_step(move |at| {
                    assert!(rank == 0 || at < 3, "rank 1 gives up");
                });
                let directory = Arc::new(TempDir::new().unwrap());
                let setup = Setup::new(0..64, 4);
                let model = Network::new(1, 8, notes, &device());
                let training = setup.training(directory.path());
                error(&distribute(training, &group).launch(learner(model)))
            })
        })
        .collect();
    let [first, second] =
        threads.into_iter().map(|it| it.join()).collect::<Vec<_>>().try_into().unwrap();
    assert!(second.is_err());
    let error = first.unwrap();
    assert!(error.contains("rank 1"), "{error}");
}
