use burn::data::dataloader::DataLoader;
use drumline::ProcessGroup;
use drumline_burn::data::{DataLoaderBuilder, Totals};

use crate::{
    common::on_ranks,
    source::{Indices, Keep, pass},
};

#[test]
fn shards_have_every_sample_once() {
    for (samples, ranks) in [(10, 3), (7, 2), (2, 4), (0, 2)] {
        for workers in [0, 2] {
            let seen = on_ranks(ranks, |group| {
                let builder = DataLoaderBuilder::new(Keep).batch_size(2).num_workers(workers);
                let loader = builder.build_shard(Indices(samples), &group).unwrap();
                assert_eq!(loader.epoch(), None);
                let (first, second) = (pass(&*loader).concat(), pass(&*loader).concat());
                assert_eq!(first, second, "every iterator goes through the whole share");
                assert_eq!(first.len(), loader.num_items());
                first
            });
            assert_eq!(seen.concat(), (0..samples).collect::<Vec<_>>());
        }
    }
}

#[test]
fn totals_are_those_of_all_ranks() {
    let totals = on_ranks(4, |group| {
        let loader =
            DataLoaderBuilder::new(Keep).batch_size(2).build_shard(Indices(3), &group).unwrap();
        let mut totals = Totals::default();
        for batch in loader.iter().map(Result::unwrap) {
            let sum: usize = batch.iter().sum();
            totals.add([sum as f64, 1.0], batch.len() as u64);
        }
        assert_eq!(totals.count(), u64::from(group.rank() < 3), "the last rank has no sample");
        totals.over(&group).unwrap()
    });
    for total in totals {
        assert_eq!((total.sums(), total.count(), total.means()), ([3.0, 3.0], 3, [1.0, 1.0]));
    }
    let [nothing] = Totals::<1>::default().over(&ProcessGroup::alone()).unwrap().means();
    assert!(nothing.is_nan());
}
