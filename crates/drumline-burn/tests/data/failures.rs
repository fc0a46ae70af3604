use std::{error::Error as _, fmt};

use burn::{
    data::{
        dataloader::{DataLoader, batcher::Batcher},
        dataset::{Dataset, DatasetError},
    },
    tensor::Device,
};
use drumline::ProcessGroup;
use drumline_burn::{ErrorKind, data::DataLoaderBuilder};

use crate::{
    common::on_ranks,
    source::{Indices, Keep},
};

#[derive(Debug)]
struct Unreadable;

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the disk is gone")
    }
}

impl std::error::Error for Unreadable {}

/// Whose sample 6 cannot be read.
struct Broken;

impl Dataset<usize> for Broken {
    fn get(&self, index: usize) -> Result<usize, DatasetError> {
        if index == 6 { Err(DatasetError::new(Unreadable)) } else { Ok(index) }
    }

    fn len(&self) -> usize {
        12
    }
}

#[test]
fn a_sample_that_cannot_be_read_is_named() {
    for workers in [0, 1, 4] {
        let seen = on_ranks(2, |group| {
            let builder = DataLoaderBuilder::new(Keep).batch_size(2).num_workers(workers);
            let loader = builder.build(Broken, &group).unwrap();
            let batches: Vec<_> = loader.iter().collect();
            assert_eq!(loader.epoch(), Some(u64::from(group.rank() == 1)), "no end after an error");
            batches
        });
        // Rank 0 has 0 2, 4 6, 8 10.
        assert_eq!(seen[0][0].as_ref().unwrap(), &[0, 2]);
        let error = seen[0][1].as_ref().unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("rank 0 cannot load samples 4, 6: the disk is gone ("), "{text}");
        let error = error.source().unwrap().downcast_ref::<drumline_burn::Error>().unwrap();
        assert_eq!(error.kind(), ErrorKind::Data);
        assert!(error.detail::<DatasetError>().is_some());
        assert_eq!(seen[0].len(), 2, "the iterator has ended");
        assert_eq!(seen[1].iter().filter(|batch| batch.is_ok()).count(), 3);
    }
}

/// Panics at sample 6.
struct Panics;

impl Batcher<usize, Vec<usize>> for Panics {
    fn batch(&self, items: Vec<usize>, _: &Device) -> Vec<usize> {
        assert!(!items.contains(&6), "no picture in sample 6");
        items
    }
}

#[test]
fn a_panic_is_an_error_and_no_hang() {
    for workers in [0, 1, 4] {
        let builder = DataLoaderBuilder::new(Panics).batch_size(3).num_workers(workers);
        let loader = builder.build(Indices(12), &ProcessGroup::alone()).unwrap();
        let batches: Vec<_> = loader.iter().collect();
        assert_eq!(batches.len(), 3, "{workers} workers");
        let error = batches[2].as_ref().unwrap_err().to_string();
        let expected = "rank 0 cannot load samples 6, 7, 8: the data set or the batcher panicked: \
                        no picture in sample 6 (drumline explain models-of-burn)";
        assert_eq!(error, expected);
        // The threads still work.
        let again: Vec<_> = loader.iter().collect();
        assert!(again.len() == 1 && again[0].is_err(), "it goes on at the batch that failed");
    }
}
