//! Batches by step and shard.

use std::{
    error::Error as _,
    sync::{Condvar, Mutex},
    time::Duration,
};

use burn::data::{
    dataloader::DataLoader,
    dataset::{Dataset, DatasetError},
};
use drumline::{ProcessGroup, sampler::shards_of_rank};
use drumline_burn::{ErrorKind, checkpoint::DataPosition, data::DataLoaderBuilder};

use crate::{
    common::on_ranks,
    source::{Indices, Keep, Loader, pass},
};

const WORKERS: [usize; 2] = [0, 2];

fn loader(
    [samples, batch_size, shards]: [usize; 3],
    workers: usize,
    drop_last: bool,
    group: &ProcessGroup,
) -> Loader {
    let builder = DataLoaderBuilder::new(Keep).batch_size(batch_size).num_workers(workers);
    builder.shuffle(3).drop_last(drop_last).shards(shards).build(Indices(samples), group).unwrap()
}

/// The batches of all shards in all steps that are left, as iterators deliver them.
fn of_iterators(
    of: &(dyn Fn(&ProcessGroup) -> Loader + Sync),
    ranks: usize,
    shards: usize,
) -> Vec<Vec<usize>> {
    let of_ranks = on_ranks(ranks, |group| {
        let own = shards_of_rank(shards, ranks, group.rank()).unwrap().len();
        let batches = pass(&*of(&group));
        batches.chunks(own).map(<[_]>::to_vec).collect::<Vec<_>>()
    });
    let steps = of_ranks[0].len();
    assert!(of_ranks.iter().all(|of_rank| of_rank.len() == steps));
    (0..steps)
        .flat_map(|step| of_ranks.iter().flat_map(move |of_rank| of_rank[step].clone()))
        .collect()
}

#[test]
fn every_rank_gets_every_batch_in_any_order_and_as_often_as_it_asks() {
    for case @ [_, _, shards] in [[64, 4, 8], [61, 4, 8], [61, 3, 5], [7, 2, 3], [9, 100, 3]] {
        for drop_last in [false, true] {
            for ranks in [1, 2, 3] {
                let of = |group: &ProcessGroup| loader(case, 0, drop_last, group);
                let expected = of_iterators(&of, ranks, shards);
                for workers in WORKERS {
                    on_ranks(ranks, |group| {
                        let loader = loader(case, workers, drop_last, &group);
                        let mut batches = loader.steps().unwrap();
                        let steps = expected.len() / shards;
                        assert_eq!(batches.left(), 0..steps);
                        let mut expect = |step: usize, shard: usize| {
                            let batch = batches.of(step, shard).unwrap();
                            assert_eq!(
                                batch,
                                expected[step * shards + shard],
                                "{case:?}: {step}, {shard}"
                            );
                        };
                        let own = shards_of_rank(shards, ranks, group.rank()).unwrap();
                        for step in 0..steps {
                            own.clone().for_each(|shard| expect(step, shard));
                        }
                        // Backwards, all shards; then a step that is tried twice, by more shards the second time.
                        for step in (0..steps).rev() {
                            (0..shards).rev().for_each(|shard| expect(step, shard));
                        }
                        for step in 0..steps {
                            own.clone().chain(0..shards).for_each(|shard| expect(step, shard));
                        }
                    });
                }
            }
        }
    }
}

#[test]
fn the_epoch_ends_behind_its_last_step() {
    for workers in WORKERS {
        let group = ProcessGroup::alone();
        let [by_iterator, by_step] = [0, workers].map(|it| loader([23, 2, 3], it, false, &group));
        for epoch in 0..3 {
            let expected = pass(&*by_iterator);
            let mut batches = by_step.steps().unwrap();
            let mut seen = Vec::new();
            while let Some(step) = batches.next() {
                assert_eq!(by_step.epoch(), Some(epoch));
                seen.extend((0..3).map(|shard| batches.of(step, shard).unwrap()));
            }
            assert_eq!(seen, expected);
            assert!(
                batches.left().is_empty() && batches.next().is_none(),
                "the end does not count twice"
            );
            assert_eq!(by_step.epoch(), Some(epoch + 1));
        }
    }
}

/// Goes through `steps` steps. `again` says how often this rank asks for a batch.
fn go(loader: &Loader, steps: usize, own: std::ops::Range<usize>, again: usize) -> Vec<usize> {
    let mut batches = loader.steps().unwrap();
    let mut seen = Vec::new();
    for step in batches.left().take(steps) {
        for _ in 0..again {
            own.clone().for_each(|shard| drop(batches.of(step, shard).unwrap()));
        }
        seen.extend(own.clone().flat_map(|shard| batches.of(step, shard).unwrap()));
    }
    seen
}

#[test]
fn an_epoch_goes_on_with_other_ranks_behind_the_steps_that_were_made() {
    const CASE: [usize; 3] = [100, 3, 6];
    let whole = pass(&*loader(CASE, 0, false, &ProcessGroup::alone()));
    let steps = whole.len() / 6;
    for (before, after) in [(1, 1), (1, 3), (2, 1), (3, 2)] {
        for workers in WORKERS {
            for done in [0, 1, 4, steps] {
                let states = on_ranks(before, |group| {
                    let loader = loader(CASE, workers, false, &group);
                    let own = shards_of_rank(6, before, group.rank()).unwrap();
                    // The ranks ask in different ways, and have one place.
                    go(&loader, done, own, group.rank());
                    loader.state().unwrap()
                });
                assert!(states.iter().all(|state| *state == states[0]), "{states:?}");
                assert_eq!(states[0].consumed, whole[..6 * done].concat().len());
                let left = on_ranks(after, |group| {
                    let mut loader = loader(CASE, workers, false, &group);
                    loader.resume(&states[0]).unwrap();
                    assert_eq!(loader.steps().unwrap().left(), done..steps);
                    let left = go(&loader, steps, 0..6, 0);
                    loader.resume(&states[0]).unwrap();
                    let mut batches = loader.steps().unwrap();
                    assert_eq!(batches.by_ref().count(), steps - done);
                    assert_eq!(loader.epoch(), Some(1));
                    left
                });
                assert!(
                    left.iter().all(|left| *left == whole[6 * done..].concat()),
                    "{done} steps"
                );
            }
        }
    }
}

#[test]
fn only_the_newest_pass_moves_the_place() {
    let loader = loader([24, 2, 3], 0, false, &ProcessGroup::alone());
    let mut old = loader.steps().unwrap();
    old.of(1, 0).unwrap();
    assert_eq!(loader.state().unwrap().consumed, 12);
    old.of(0, 2).unwrap();
    assert_eq!(loader.state().unwrap().consumed, 6, "a step that is repeated is not over");
    let mut new = loader.steps().unwrap();
    old.of(3, 0).unwrap();
    assert_eq!((new.left(), loader.state().unwrap().consumed), (1..4, 6));
    assert_eq!(new.next(), Some(1));
    new.of(1, 0).unwrap();
    assert_eq!(loader.iter().map(Result::unwrap).collect::<Vec<_>>().concat().len(), 12);
}

/// Whose sample 10 is not there before sample 14 is.
#[derive(Default)]
struct Late {
    has_14: Mutex<bool>,
    changed: Condvar,
}

impl Dataset<usize> for Late {
    fn get(&self, index: usize) -> Result<usize, DatasetError> {
        let mut has_14 = self.has_14.lock().unwrap();
        if index == 14 {
            *has_14 = true;
            self.changed.notify_all();
        }
        if index == 10 {
            let limit = Duration::from_secs(60);
            let waited = self.changed.wait_timeout_while(has_14, limit, |has| !*has).unwrap();
            assert!(!waited.1.timed_out(), "sample 14 was not loaded ahead");
        }
        Ok(index)
    }

    fn len(&self) -> usize {
        20
    }
}

#[test]
fn workers_load_ahead_as_the_shards_of_the_step_before_were_asked_for() {
    // This rank has all four shards. The program asks for two of them.
    let builder = DataLoaderBuilder::new(Keep).num_workers(3).shards(4);
    let loader = builder.build(Late::default(), &ProcessGroup::alone()).unwrap();
    let mut batches = loader.steps().unwrap();
    while let Some(step) = batches.next() {
        for shard in [2, 3] {
            assert_eq!(batches.of(step, shard).unwrap(), [4 * step + shard]);
        }
    }
}

/// Whose sample 6 can be read the second time.
#[derive(Default)]
struct Broken(Mutex<bool>);

impl Dataset<usize> for Broken {
    fn get(&self, index: usize) -> Result<usize, DatasetError> {
        match index == 6 && !std::mem::replace(&mut *self.0.lock().unwrap(), true) {
            true => Err(DatasetError::new(std::fmt::Error)),
            false => Ok(index),
        }
    }

    fn len(&self) -> usize {
        12
    }
}

#[test]
fn a_batch_that_cannot_be_loaded_holds_the_place_and_may_be_asked_for_again() {
    for workers in WORKERS {
        let builder = DataLoaderBuilder::new(Keep).batch_size(2).num_workers(workers).shards(2);
        let loader = builder.build(Broken::default(), &ProcessGroup::alone()).unwrap();
        let mut batches = loader.steps().unwrap();
        for (step, shard) in [(0, 0), (0, 1)] {
            batches.of(step, shard).unwrap();
        }
        let error = batches.of(1, 0).unwrap_err();
        let error = error.source().unwrap().downcast_ref::<drumline_burn::Error>().unwrap();
        assert_eq!(error.kind(), ErrorKind::Data);
        assert!(error.to_string().starts_with("rank 0 cannot load samples 4, 6: "), "{error}");
        assert_eq!(batches.next(), None, "no step after an error");
        let state = loader.state().unwrap();
        assert_eq!((state.epoch, state.consumed), (0, 4));
        assert_eq!(batches.of(1, 0).unwrap(), [4, 6]);
        assert_eq!(batches.next(), Some(2));
    }
}

#[test]
fn what_is_not_there_is_named() {
    let group = ProcessGroup::alone();
    let loader = loader([24, 2, 3], 2, false, &group);
    let mut batches = loader.steps().unwrap();
    batches.of(1, 2).unwrap();
    let refused = |error: DatasetError| {
        let error = error.source().unwrap().downcast_ref::<drumline_burn::Error>().unwrap().clone();
        assert_eq!(error.kind(), ErrorKind::Argument);
        error.to_string()
    };
    let error = refused(batches.of(0, 3).unwrap_err());
    assert!(error.contains("there is no shard 3: a step has 3, from 0 on"), "{error}");
    let error = refused(batches.of(usize::MAX, 0).unwrap_err());
    assert!(error.contains("the first is 0, the last 3"), "{error}");
    assert_eq!(loader.state().unwrap().consumed, 12, "it does not move the place");
    assert_eq!(batches.next(), Some(2));
    let mut later = loader.steps().unwrap();
    let error = refused(later.of(1, 0).unwrap_err());
    assert!(error.contains("there is no step 1: the first is 2, the last 3"), "{error}");
    later.of(3, 0).unwrap();
    let error = refused(loader.steps().unwrap().of(3, 0).unwrap_err());
    assert!(error.contains("there is no step 3: all 4 steps are over"), "{error}");

    let builder = || DataLoaderBuilder::new(Keep).batch_size(2);
    let plain = builder().build(Indices(24), &group).unwrap();
    let evaluated = builder().shards(3).build_shard(Indices(24), &group).unwrap();
    for loader in [plain, evaluated] {
        let error = loader.steps().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Argument);
        assert!(
            error.to_string().contains("give `DataLoaderBuilder::shards` their number"),
            "{error}"
        );
    }
}
