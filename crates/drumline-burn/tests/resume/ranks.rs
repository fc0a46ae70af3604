//! Several ranks: all resume the same, from the files of rank 0.

use std::fs;

use burn::optim::AdamWConfig;
use drumline_burn::{checkpoint::Checkpoints, parameters_digest};

use crate::{
    common::on_ranks,
    program::{Resume, file, new_state, train, train_resumed},
};

/// The random numbers of dropout are drawn from one generator by all threads, so `train` draws them one rank after
/// the other.
#[test]
fn ranks_that_stop_and_resume_end_with_the_same_bits() {
    const STEPS: u64 = 9; // an epoch has 6
    let directory = tempfile::tempdir().unwrap();
    let out = |name: &str| directory.path().join(name);
    let run = |name: &str, steps| {
        on_ranks(2, |group| train(&group, &out(name), AdamWConfig::new(), steps).unwrap());
    };
    run("whole", STEPS);
    (1..=STEPS).for_each(|steps| run("parts", steps));
    assert!(file(&out("parts"), STEPS) == file(&out("whole"), STEPS), "other bits");

    // A model that is wrapped keeps its taps when it is loaded.
    on_ranks(2, |group| {
        let (out, when) = (out("wrapped"), Resume::AfterWrapping);
        for steps in [3, 4, STEPS] {
            train_resumed(&group, &out, AdamWConfig::new(), steps, when).unwrap();
        }
    });
    assert!(file(&out("wrapped"), STEPS) == file(&out("whole"), STEPS), "other bits");

    // Rank 1 sees another directory, which stays empty.
    on_ranks(2, |group| {
        let seen = directory.path().join(["whole", "elsewhere"][group.rank()]);
        train(&group, &seen, AdamWConfig::new(), STEPS + 1).unwrap();
    });
    assert!(!out("elsewhere").exists());
    run("parts", STEPS + 1);
    assert!(file(&out("parts"), STEPS + 1) == file(&out("whole"), STEPS + 1), "other bits");
}

#[test]
fn every_rank_gets_what_rank_0_saved() {
    let directory = tempfile::tempdir().unwrap();
    on_ranks(3, |group| train(&group, directory.path(), AdamWConfig::new(), 2).unwrap());
    let resumed = on_ranks(3, |group| {
        let checkpoints = Checkpoints::open(directory.path(), &group).unwrap();
        let training = checkpoints.resume(new_state(&group, AdamWConfig::new()).unwrap()).unwrap();
        let losses = training.values.tensor("losses").unwrap().values::<f32>().unwrap();
        let state = training.sampler.state();
        (parameters_digest(&training.model).unwrap(), training.steps, state, losses)
    });
    assert_eq!(resumed[0], resumed[1]);
    assert_eq!(resumed[0], resumed[2]);
    assert_eq!((resumed[0].1, resumed[0].2.consumed, resumed[0].3.len()), (2, 30, 2));
}

#[test]
fn a_damaged_file_is_skipped_by_all() {
    let directory = tempfile::tempdir().unwrap();
    on_ranks(2, |group| train(&group, directory.path(), AdamWConfig::new(), 3).unwrap());
    let expected = file(directory.path(), 3);
    let newest = directory.path().join("step-00000003.safetensors");
    fs::write(&newest, &expected[..expected.len() - 9]).unwrap();
    on_ranks(2, |group| train(&group, directory.path(), AdamWConfig::new(), 3).unwrap());
    assert!(file(directory.path(), 3) == expected, "other bits");
}
