use std::{
    sync::{Condvar, Mutex},
    time::Duration,
};

use burn::{
    data::{
        dataloader::DataLoader,
        dataset::{Dataset, DatasetError},
    },
    tensor::Device,
};
use drumline::{ProcessGroup, sampler::DistributedSampler};
use drumline_burn::data::DataLoaderBuilder;

use crate::{
    common::on_ranks,
    source::{Indices, Keep, loader, pass},
};

/// `torch.randperm(10, generator=torch.Generator().manual_seed(seed))` of torch 2.15.0 for seeds 0 and 1, which are the
/// orders of the first two epochs of a sampler with seed 0.
const TORCH: [[usize; 10]; 2] = [[4, 1, 7, 5, 3, 9, 0, 8, 6, 2], [5, 6, 1, 2, 0, 8, 9, 3, 7, 4]];

#[test]
fn the_order_is_that_of_torch() {
    for workers in [0, 1, 4] {
        let seen = on_ranks(2, |group| {
            let builder = DataLoaderBuilder::new(Keep).batch_size(2).num_workers(workers);
            let loader = builder.shuffle(0).build(Indices(10), &group).unwrap();
            [pass(&*loader), pass(&*loader)]
        });
        for (rank, epochs) in seen.into_iter().enumerate() {
            for (batches, order) in epochs.iter().zip(TORCH) {
                let own: Vec<usize> = order.into_iter().skip(rank).step_by(2).collect();
                let expected: Vec<&[usize]> = own.chunks(2).collect();
                assert_eq!(*batches, expected, "rank {rank}, {workers} workers");
            }
        }
    }
}

#[test]
fn workers_change_nothing() {
    for ranks in [1, 2, 3] {
        for batch_size in [1, 4, 1000] {
            let of = |workers| {
                on_ranks(ranks, |group| {
                    let loader = loader(101, batch_size, workers, &group);
                    [pass(&*loader), pass(&*loader), pass(&*loader)]
                })
            };
            let expected: Vec<_> = (0..ranks)
                .map(|rank| {
                    let sampler = DistributedSampler::builder(101, ranks, rank).seed(3);
                    let mut sampler = sampler.build().unwrap();
                    [0, 1, 2].map(|epoch| {
                        sampler.set_epoch(epoch);
                        let indices: Vec<usize> = sampler.iter().collect();
                        indices.chunks(batch_size).map(<[usize]>::to_vec).collect::<Vec<_>>()
                    })
                })
                .collect();
            for workers in [0, 1, 2, 7] {
                assert_eq!(of(workers), expected, "{ranks} ranks, {workers} workers");
            }
        }
    }
}

/// Whose sample 0 is not there before sample 3 is.
#[derive(Default)]
struct Late {
    has_three: Mutex<bool>,
    changed: Condvar,
}

impl Dataset<usize> for Late {
    fn get(&self, index: usize) -> Result<usize, DatasetError> {
        let mut has_three = self.has_three.lock().unwrap();
        if index == 3 {
            *has_three = true;
            self.changed.notify_all();
        }
        if index == 0 {
            let limit = Duration::from_secs(60);
            let waited = self.changed.wait_timeout_while(has_three, limit, |has| !*has).unwrap();
            assert!(!waited.1.timed_out(), "sample 3 was not loaded ahead");
        }
        Ok(index)
    }

    fn len(&self) -> usize {
        8
    }
}

#[test]
fn batches_are_loaded_ahead_and_wait_for_their_turn() {
    let builder = DataLoaderBuilder::new(Keep).num_workers(2);
    let loader = builder.build(Late::default(), &ProcessGroup::alone()).unwrap();
    let expected: Vec<Vec<usize>> = (0..8).map(|index| vec![index]).collect();
    assert_eq!(pass(&*loader), expected);
}

#[test]
fn what_does_not_divide_is_repeated_or_dropped() {
    let of = |drop_last| {
        on_ranks(3, |group| {
            let builder = DataLoaderBuilder::new(Keep).batch_size(2).drop_last(drop_last);
            pass(&*builder.build(Indices(7), &group).unwrap()).concat()
        })
    };
    assert_eq!(of(false), [vec![0, 3, 6], vec![1, 4, 0], vec![2, 5, 1]]);
    assert_eq!(of(true), [vec![0, 3], vec![1, 4], vec![2, 5]]);
}

/// burn's own strategies move loaders and cut them.
#[test]
fn a_loader_can_be_moved_and_cut() {
    let group = ProcessGroup::alone();
    let whole = loader(20, 3, 2, &group);
    let epochs = [pass(&*whole).concat(), pass(&*whole).concat()];

    let loader = loader(20, 3, 2, &group);
    let moved = loader.to_device(&Device::flex());
    assert_eq!(moved.iter().next().unwrap().unwrap(), epochs[0][..3]);
    assert_eq!(pass(&*loader).concat(), epochs[0][3..], "they share the place");

    let parts = [loader.slice(0, 8), loader.slice(8, 99)];
    assert_eq!(parts.iter().map(|part| part.num_items()).sum::<usize>(), 20);
    let both =
        |parts: &[_; 2]| parts.each_ref().map(|part: &std::sync::Arc<_>| pass(&**part).concat());
    assert_eq!(both(&parts).concat(), epochs[1]);
    assert_ne!(both(&parts).concat(), epochs[1], "another epoch has another order");
    assert_eq!(parts[1].slice(2, 5).iter().next().unwrap().unwrap().len(), 3);
    assert_eq!(pass(&*loader).concat(), epochs[1], "parts have a place of their own");
}
