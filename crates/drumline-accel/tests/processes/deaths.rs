//! A rank is killed in each stage of a call: the others name it, lose nothing, and go on without it.

use crate::job::{Ended, run};

const WORLD: usize = 4;

const SIGKILL: i32 = 9;

/// Where a rank is killed, and which. In scans the last ranks combine values.
pub(crate) const STAGES: [(&str, usize); 8] = [
    ("copy out", 0),
    ("sum", 1),
    ("copy in", 2),
    ("staged copy out", 3),
    ("staged sum", 2),
    ("staged copy in", 1),
    ("look at events", 3),
    ("between calls", 0),
];

/// Over what ranks talk: their sums lie in slices, in whole windows, in whole windows.
const WAYS: [&str; 3] = ["shared", "unix", "tcp"];

#[test]
fn survivors_name_the_rank_that_was_killed_and_go_on_without_it() {
    for (number, (stage, victim)) in STAGES.into_iter().enumerate() {
        // All stages where ranks share memory, and each in another way.
        for over in [WAYS[0], WAYS[1 + number % 2]] {
            let ranks = run("survivors::rank_process", WORLD, over, stage);
            for (rank, Ended { code, signal, output }) in ranks.into_iter().enumerate() {
                let is_right = match rank == victim {
                    true => signal == Some(SIGKILL),
                    // No test has run if a filter matches none.
                    false => code == Some(0) && output.contains("went on"),
                };
                assert!(
                    is_right,
                    "{stage} over {over}, rank {rank}: {code:?} {signal:?}\n{output}"
                );
            }
        }
    }
}
