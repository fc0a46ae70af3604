//! Loaders that deal the samples anew in each epoch.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
};

use burn::{
    data::{
        dataloader::DataLoader,
        dataset::{Dataset, DatasetError},
    },
    train::SupervisedTraining,
};
use drumline::ProcessGroup;
use drumline_burn::{data::DataLoaderBuilder, distribute, parameters_digest};
use tempfile::TempDir;

use crate::{
    network::{Batch, Network, Notes, Samples, Stack, ends_early},
    training::{device, error, learner, on_ranks},
};

/// Samples 0 to 11 that note which ones were read.
#[derive(Clone, Default)]
struct Read(Arc<Mutex<Vec<usize>>>);

impl Dataset<usize> for Read {
    fn get(&self, index: usize) -> Result<usize, DatasetError> {
        self.0.lock().unwrap().push(index);
        Ok(index)
    }

    fn len(&self) -> usize {
        12
    }
}

fn loader(data: impl Dataset<usize> + 'static, group: &ProcessGroup) -> Arc<dyn DataLoader<Batch>> {
    DataLoaderBuilder::new(Stack)
        .batch_size(3)
        .shuffle(5)
        .num_workers(2)
        .build(data, group)
        .unwrap()
}

#[test]
fn every_rank_sees_other_samples_in_each_epoch_and_all_ranks_see_each_once() {
    // Nobody has to say that the loader deals shares, not even where it is within another one.
    for is_wrapped in [false, true] {
        let of_ranks = on_ranks(2, |group| {
            let directory = TempDir::new().unwrap();
            let (read, notes) = (Read::default(), Notes::default());
            let train = loader(read.clone(), &group);
            let train = if is_wrapped { ends_early(train, usize::MAX) } else { train };
            let training =
                SupervisedTraining::new(directory.path(), train, Samples::new(0..4).loader(4, 0))
                    .num_epochs(3)
                    .with_application_logger(None);
            let model = Network::new(1, 8, notes.clone(), &device());
            let result = distribute(training, &group).launch(learner(model));
            assert!(result.error.is_none(), "{}", error(&result));
            assert_eq!(notes.losses().len(), 3 * 2);
            let read = read.0.lock().unwrap().clone();
            (read, parameters_digest(&result.model).unwrap())
        });
        assert_eq!(of_ranks[0].1, of_ranks[1].1);
        let epochs = |rank: usize| -> Vec<BTreeSet<usize>> {
            of_ranks[rank].0.chunks(6).map(|epoch| epoch.iter().copied().collect()).collect()
        };
        let [first, second] = [0, 1].map(epochs);
        assert_eq!((first.len(), second.len()), (3, 3));
        for (one, other) in first.iter().zip(&second) {
            assert_eq!((one.len(), other.len()), (6, 6));
            assert_eq!(one.union(other).count(), 12);
        }
        assert!(first[0] != first[1] && first[1] != first[2], "{first:?}");
    }
}

/// What both ranks say to these loaders of training and of validation.
fn errors(
    loaders: impl Fn(&ProcessGroup) -> [Arc<dyn DataLoader<Batch>>; 2] + Sync,
) -> Vec<String> {
    on_ranks(2, |group| {
        let (directory, notes) = (TempDir::new().unwrap(), Notes::default());
        let [train, valid] = loaders(&group);
        let training =
            SupervisedTraining::new(directory.path(), train, valid).with_application_logger(None);
        let model = Network::new(1, 8, notes.clone(), &device());
        let error = error(&distribute(training, &group).launch(learner(model)));
        assert!(error.is_empty() || notes.losses().is_empty(), "a step was run");
        error
    })
}

#[test]
fn a_loader_of_another_rank_or_group_is_refused() {
    let valid = || Samples::new(0..4).loader(4, 0);
    let for_other = |rank: usize| {
        format!(
            "on rank {rank}: the loader of the training data was built for rank 0 of 1, but this is rank {rank} of 2"
        )
    };
    for error in errors(|_| [loader(Read::default(), &ProcessGroup::alone()), valid()]) {
        assert!(error.contains(&for_other(0)) && error.contains(&for_other(1)), "{error}");
        assert!(error.contains("the group that `distribute` gets"), "{error}");
    }
    for error in errors(|group| {
        let alone = ProcessGroup::alone();
        let whole = loader(Read::default(), group);
        let own = if group.rank() == 1 { loader(Read::default(), &alone) } else { whole };
        [own, valid()]
    }) {
        assert!(error.contains(&for_other(1)) && !error.contains("on rank 0: "), "{error}");
    }
}

#[test]
fn rank_0_validates_on_all_data_or_not_at_all() {
    let train = || Samples::new(0..8).loader(2, 0);
    for error in errors(|group| {
        let builder = DataLoaderBuilder::new(Stack).batch_size(2);
        [train(), builder.build_shard(Samples::new(0..4), group).unwrap()]
    }) {
        assert!(error.contains("the validation data yields one of 2 shares"), "{error}");
    }
    // One that was built for a world of one has all data.
    for error in errors(|_| [train(), loader(Read::default(), &ProcessGroup::alone())]) {
        assert_eq!(error, "");
    }
}
