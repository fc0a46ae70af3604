//! Many ranks learn what one process learns from the same samples.

use drumline::metrics;
use drumline_burn::{
    DdpOptions, DistributedDataParallel, distribute, named_tensors, parameters_digest,
};
use tempfile::TempDir;

use crate::{
    network::{Network, Notes},
    training::{Setup, alone, device, error, learner, on_ranks},
};

/// Samples 0 to `ranks * steps * batch`, in the order in which one process with the batch of all ranks must take them
/// to see in each step what the ranks see, which take equal parts.
fn interleaved(ranks: usize, steps: usize, batch: usize) -> Vec<usize> {
    let part = steps * batch;
    (0..steps)
        .flat_map(|step| {
            (0..ranks)
                .flat_map(move |rank| (0..batch).map(move |it| rank * part + step * batch + it))
        })
        .collect()
}

/// Trains on `ranks` ranks. Returns the mean loss of each step, the learning rates and a digest, each alike on all
/// ranks.
fn on_many(ranks: usize, setup: &Setup, wraps: bool) -> (Vec<f32>, Vec<f64>, u64) {
    let of_ranks = on_ranks(ranks, |group| {
        let directory = TempDir::new().unwrap();
        let notes = Notes::default();
        let model = Network::new(1 + 50 * group.rank(), 8, notes.clone(), &device());
        let training = setup.training(directory.path());
        let result = if wraps {
            let options = DdpOptions::default().first_bucket_bytes(1).bucket_bytes(1);
            let (ddp, model) = DistributedDataParallel::wrap_with(model, &group, &options).unwrap();
            let result = distribute(training, &group).wrapped(&ddp).launch(learner(model));
            let stats = ddp.stats();
            assert_eq!(stats.steps as usize, notes.rates().len());
            assert!(stats.buckets_launched_early > 0, "{stats:?}");
            result
        } else {
            distribute(training, &group).launch(learner(model))
        };
        assert!(result.error.is_none(), "{}", error(&result));
        assert_eq!(result.interrupted, None);
        let digest = parameters_digest(&result.model).unwrap();
        (notes.losses(), notes.rates(), digest, notes.validated())
    });
    let (losses, rates, digest, validated) = &of_ranks[0];
    assert_eq!(*validated, setup.valid.numbers.len() * setup.epochs);
    let mut means = vec![0.0; losses.len()];
    for (rank, (losses, others, other, validated)) in of_ranks.iter().enumerate() {
        assert_eq!((others, other), (rates, digest), "rank {rank}");
        assert!(rank == 0 || *validated == 0, "rank {rank} has validated {validated}");
        means.iter_mut().zip(losses).for_each(|(mean, loss)| *mean += loss / ranks as f32);
    }
    (means, rates.clone(), *digest)
}

#[test]
fn the_mean_loss_of_each_step_is_that_of_one_process_with_the_batch_of_all_ranks() {
    for (ranks, accumulation, wraps) in [
        (2, None, false),
        (2, None, true),
        (3, None, false),
        (2, Some(2), false),
        (2, Some(3), true), // 50 is no multiple of 3: the last update of an epoch has fewer batches
    ] {
        let (steps, batch) = (50, 4);
        let setup =
            Setup { accumulation, epochs: 2, ..Setup::new(0..ranks * steps * batch, batch) };
        let (losses, rates, _) = on_many(ranks, &setup, wraps);

        let single = Setup { batch_size: ranks * batch, ..setup.clone() };
        let single = Setup {
            train: crate::network::Samples::new(interleaved(ranks, steps, batch)),
            ..single
        };
        let notes = Notes::default();
        let result = alone(&single, &notes);
        assert!(result.error.is_none());

        let case = format!("{ranks} ranks, accumulation {accumulation:?}, wrapped {wraps}");
        assert_eq!(losses.len(), 2 * steps, "{case}");
        assert_eq!(rates, notes.rates(), "{case}");
        for (step, (many, one)) in losses.iter().zip(notes.losses()).enumerate() {
            assert!((many - one).abs() < 1e-5, "{case}, step {step}: {many} and {one}");
        }
        assert!(losses[99] < losses[0] / 2.0, "{case}: nothing was learned: {losses:?}");
    }
}

#[test]
fn alone_it_is_burns_own_training() {
    let setup = Setup::new(0..32, 4);
    let (one, other) = (Notes::default(), Notes::default());
    let expected = alone(&setup, &one);
    let directory = TempDir::new().unwrap();
    let model = Network::new(1, 8, other.clone(), &device());
    let group = drumline::ProcessGroup::alone();
    let result = distribute(setup.training(directory.path()), &group).launch(learner(model));
    assert_eq!(one.losses(), other.losses());
    assert_eq!(named_tensors(&expected.model).unwrap(), named_tensors(&result.model).unwrap());
}

#[test]
fn loaders_with_threads_keep_ranks_equal() {
    // Batches come in any order, and the smaller one may come first.
    let setup = Setup { workers: 3, epochs: 4, accumulation: Some(2), ..Setup::new(0..60, 4) };
    for wraps in [false, true] {
        let (losses, rates, _) = on_many(2, &setup, wraps);
        assert_eq!((losses.len(), rates.len()), (4 * 8, 4 * 4));
    }
}

#[test]
fn accumulation_sends_once_in_k_steps() {
    let calls = |accumulation| {
        let setup = Setup { accumulation, ..Setup::new(0..96, 4) }; // 12 batches on each rank
        let calls = on_ranks(2, |group| {
            let directory = TempDir::new().unwrap();
            let model = Network::new(1, 8, Notes::default(), &device());
            let training = setup.training(directory.path());
            let result = distribute(training, &group).launch(learner(model));
            assert!(result.error.is_none(), "{}", error(&result));
            let text = metrics::text([&group]);
            let of = |operation: &str| {
                let line = text
                    .lines()
                    .find(|it| it.starts_with("drumline_calls_total") && it.contains(operation));
                line.unwrap().rsplit(' ').next().unwrap().parse::<usize>().unwrap()
            };
            of("\"all_reduce\"")
        });
        assert_eq!(calls[0], calls[1]);
        calls[0]
    };
    // A mark and one bucket for each update.
    let each = calls(None);
    assert_eq!([each, each - calls(Some(2)), each - calls(Some(4))], [each, 2 * 6, 2 * 9]);
    assert!(each >= 2 * 12);
}
