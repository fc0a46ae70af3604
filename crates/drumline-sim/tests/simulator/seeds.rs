//! Ten thousand jobs, half of them with a fault.

use std::sync::atomic::{AtomicU64, Ordering};

const SEEDS: u64 = 10_000;

#[test]
fn nobody_hangs_no_sum_is_wrong_and_the_right_rank_is_blamed() {
    let next = AtomicU64::new(0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= SEEDS {
                        break;
                    }
                    if let Err(problem) = drumline_sim::run(seed, false) {
                        panic!("seed {seed}: {problem}\nreplay: {}", drumline_sim::replay(seed));
                    }
                }
            });
        }
    });
}

#[test]
fn a_seed_is_a_run() {
    for seed in 0..50 {
        assert_eq!(drumline_sim::run(seed, false), drumline_sim::run(seed, false), "seed {seed}");
    }
}
