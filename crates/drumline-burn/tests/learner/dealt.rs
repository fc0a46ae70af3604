//! A loader that deals the samples anew in each epoch.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
};

use burn::{
    data::dataset::{Dataset, DatasetError},
    train::SupervisedTraining,
};
use drumline_burn::{data::DataLoaderBuilder, distribute, parameters_digest};
use tempfile::TempDir;

use crate::{
    network::{Network, Notes, Samples, Stack},
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

#[test]
fn every_rank_sees_other_samples_in_each_epoch_and_all_ranks_see_each_once() {
    let of_ranks = on_ranks(2, |group| {
        let directory = TempDir::new().unwrap();
        let (read, notes) = (Read::default(), Notes::default());
        let train = DataLoaderBuilder::new(Stack)
            .batch_size(3)
            .shuffle(5)
            .num_workers(2)
            .build(read.clone(), &group)
            .unwrap();
        let training =
            SupervisedTraining::new(directory.path(), train, Samples::new(0..4).loader(4, 0))
                .num_epochs(3)
                .with_application_logger(None);
        let model = Network::new(1, 8, notes.clone(), &device());
        let result = distribute(training, &group).deals_shares().launch(learner(model));
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
