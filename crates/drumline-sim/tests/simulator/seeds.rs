//! A thousand jobs, half of them with a fault, and histories of their hosts. `make soak` runs 100,000 of each.

use drumline_sim::{Simulated, run, run_all};

fn succeeds(what: Simulated, seeds: std::ops::Range<u64>) {
    let problem = std::sync::Mutex::new(None);
    run_all(what, seeds, false, 1, &|result| {
        if let Err(what) = result {
            problem.lock().unwrap().get_or_insert(what);
        }
    });
    if let Some(problem) = problem.into_inner().unwrap() {
        panic!("{problem}");
    }
}

#[test]
fn nobody_hangs_no_sum_is_wrong_and_the_right_rank_is_blamed() {
    succeeds(Simulated::Job, 0..500);
}

#[test]
fn two_worlds_never_run_at_once_and_no_job_is_stuck() {
    succeeds(Simulated::Membership, 0..300);
}

#[test]
fn a_seed_is_a_run() {
    for seed in 0..25 {
        assert_eq!(run(seed, false), run(seed, false), "seed {seed}");
        let membership = || Simulated::Membership.run(seed, false);
        assert_eq!(membership(), membership(), "seed {seed}");
    }
}
