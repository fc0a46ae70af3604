//! Ten thousand jobs, half of them with a fault.

use drumline_sim::{run, run_all};

#[test]
fn nobody_hangs_no_sum_is_wrong_and_the_right_rank_is_blamed() {
    let problem = std::sync::Mutex::new(None);
    run_all(0..10_000, false, 1, &|result| {
        if let Err(what) = result {
            problem.lock().unwrap().get_or_insert(what);
        }
    });
    if let Some(problem) = problem.into_inner().unwrap() {
        panic!("{problem}");
    }
}

#[test]
fn a_seed_is_a_run() {
    for seed in 0..50 {
        assert_eq!(run(seed, false), run(seed, false), "seed {seed}");
    }
}
