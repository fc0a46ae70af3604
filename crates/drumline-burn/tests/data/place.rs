use burn::data::dataloader::DataLoader;
use drumline::ProcessGroup;
use drumline_burn::checkpoint::DataPosition;

use crate::{
    common::on_ranks,
    source::{Loader, loader, pass},
};

/// The samples of the next `batches` batches.
fn take(loader: &Loader, batches: usize) -> Vec<usize> {
    loader.iter().take(batches).map(Result::unwrap).collect::<Vec<_>>().concat()
}

#[test]
fn an_epoch_goes_on_with_other_ranks_and_workers_and_uses_every_sample_once() {
    const SAMPLES: usize = 240;
    const BATCH: usize = 12; // so that any number of ranks divides what is left
    for (before, after) in [(1, 1), (2, 2), (2, 3), (3, 1), (1, 4), (4, 2)] {
        for (workers_before, workers_after) in [(0, 1), (1, 4), (4, 0), (4, 4)] {
            for batches in [0, 1, 3, 5] {
                let (done, states): (Vec<_>, Vec<_>) = on_ranks(before, |group| {
                    let loader = loader(SAMPLES, BATCH, workers_before, &group);
                    drop(pass(&*loader)); // an epoch before
                    let done = take(&loader, batches);
                    (done, loader.state().unwrap())
                })
                .into_iter()
                .unzip();
                let state = states[0];
                assert!(states.iter().all(|other| *other == state), "alike on all ranks");
                assert_eq!((state.epoch, state.consumed), (1, batches * BATCH * before));

                let left = on_ranks(after, |group| {
                    let mut loader = loader(SAMPLES, BATCH, workers_after, &group);
                    loader.resume(&state).unwrap();
                    let left = pass(&*loader).concat();
                    assert_eq!(loader.epoch(), Some(2));
                    left
                });
                let mut all = [done.concat(), left.concat()].concat();
                all.sort_unstable();
                let expected: Vec<usize> = (0..SAMPLES).collect();
                assert_eq!(all, expected, "{before} to {after} ranks after {batches} batches");
            }
        }
    }
}

#[test]
fn batches_that_were_loaded_ahead_do_not_count() {
    let group = ProcessGroup::alone();
    let whole = loader(60, 2, 0, &group);
    let expected = [pass(&*whole), pass(&*whole)].concat().concat();
    for workers in [0, 1, 4] {
        let loader = loader(60, 2, workers, &group);
        // Iterators that are dropped in the middle, one after the other.
        let mut seen = take(&loader, 7);
        seen.extend(take(&loader, 3));
        seen.extend(take(&loader, 0));
        assert_eq!(loader.state().unwrap().consumed, seen.len());
        let mut batches = loader.iter();
        assert_eq!(batches.progress().items_processed, 20);
        assert_eq!(batches.progress().items_total, 60);
        seen.extend(batches.by_ref().flat_map(Result::unwrap));
        assert!(batches.next().is_none(), "the end does not count twice");
        assert_eq!(loader.epoch(), Some(1));
        drop(batches);
        seen.extend(pass(&*loader).concat());
        assert_eq!(seen, expected, "{workers} workers");
    }
}

#[test]
fn only_the_newest_iterator_moves_the_place() {
    let loader = loader(10, 1, 0, &ProcessGroup::alone());
    let mut old = loader.iter();
    old.next().unwrap().unwrap();
    let mut new = loader.iter();
    new.next().unwrap().unwrap();
    old.by_ref().for_each(|batch| drop(batch.unwrap()));
    assert_eq!((loader.epoch(), loader.state().unwrap().consumed), (Some(0), 2));

    loader.set_epoch(5);
    new.by_ref().for_each(|batch| drop(batch.unwrap()));
    assert_eq!((loader.epoch(), loader.state().unwrap().consumed), (Some(5), 0));
}

#[test]
fn the_place_in_other_data_is_refused() {
    let group = ProcessGroup::alone();
    let state = loader(10, 1, 0, &group).state().unwrap();
    let mut other = loader(11, 1, 0, &group);
    let error = other.resume(&state).unwrap_err().to_string();
    assert!(error.contains("the state is of samples 10, but this sampler has 11"), "{error}");
}
