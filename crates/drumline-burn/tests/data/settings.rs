//! Settings that cannot work are an error on every rank, when the loader is built.

use drumline::ProcessGroup;
use drumline_burn::data::DataLoaderBuilder;

use crate::{
    common::on_ranks,
    source::{Indices, Keep},
};

type Builder = DataLoaderBuilder<usize, Vec<usize>>;

/// What all ranks of three say.
fn problem(set: impl Fn(&ProcessGroup, Builder) -> (Builder, usize) + Sync) -> String {
    let errors = on_ranks(3, |group| {
        let (builder, samples) = set(&group, DataLoaderBuilder::new(Keep).batch_size(2).shuffle(1));
        builder.build(Indices(samples), &group).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    errors[0].clone()
}

#[test]
fn settings_that_differ_are_named_with_the_rank() {
    let error = problem(|group, builder| (builder, 10 + group.rank() / 2));
    assert!(error.contains("on rank 2: number of samples is 11, but rank 0 has 10"), "{error}");
    let error = problem(|group, builder| (builder.batch_size(2 + group.rank() % 2), 10));
    assert!(error.contains("on rank 1: batch size is 3, but rank 0 has 2"), "{error}");
    let error = problem(|group, builder| (builder.shuffle(group.rank() as u64), 10));
    assert!(error.contains("on rank 1: seed is 1, but rank 0 has 0"), "{error}");
    assert!(error.contains("on rank 2: seed is 2, but rank 0 has 0"), "{error}");
    let error = problem(|group, builder| {
        let plain = DataLoaderBuilder::new(Keep).batch_size(2);
        (if group.rank() == 1 { plain } else { builder }, 10)
    });
    assert!(error.contains("on rank 1: seed is none, but rank 0 has 1"), "{error}");
    let error = problem(|group, builder| (builder.drop_last(group.rank() > 0), 10));
    assert!(error.contains("drop_last is true, but rank 0 has false"), "{error}");
    // Workers and device may differ.
    on_ranks(3, |group| {
        let builder = DataLoaderBuilder::new(Keep).num_workers(group.rank());
        builder.build(Indices(3), &group).unwrap();
    });
}

#[test]
fn settings_that_cannot_work_are_named() {
    let error = problem(|_, builder| (builder.batch_size(0), 10));
    assert!(error.contains("the batch size is 0"), "{error}");
    let error = problem(|_, builder| (builder, 2));
    assert!(error.contains("2 samples are too few for 3 ranks; use fewer ranks"), "{error}");
    let error = problem(|_, builder| (builder, 0));
    assert!(error.contains("0 samples are too few for 3 ranks"), "{error}");
}
