//! A rank is killed in each stage of a call: the others name it, lose nothing, and go on without it.

use crate::job::{Ended, Placed, run};

const SIGKILL: i32 = 9;

/// Where a rank is killed, and which.
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

/// Their sums lie in slices of a host, in whole windows twice, and in slices of two hosts.
const WAYS: [Placed; 4] = [
    Placed { hosts: &[4], over: "shared" },
    Placed { hosts: &[4], over: "unix" },
    Placed { hosts: &[4], over: "tcp" },
    Placed { hosts: &[2, 2], over: "shared" },
];

#[test]
fn survivors_name_the_rank_that_was_killed_and_go_on_without_it() {
    for (number, (stage, victim)) in STAGES.into_iter().enumerate() {
        // All stages where ranks share memory, and each in another way.
        for placed in [WAYS[0], WAYS[1 + number % 3]] {
            if placed.is_possible() {
                kill(stage, victim, placed);
            }
        }
    }
}

fn kill(stage: &str, victim: usize, placed: Placed) {
    let ranks = run("survivors::rank_process", placed, stage);
    for (rank, Ended { code, signal, output }) in ranks.into_iter().enumerate() {
        let is_right = match rank == victim {
            true => signal == Some(SIGKILL),
            // No test has run if a filter matches none.
            false => code == Some(0) && output.contains("went on"),
        };
        assert!(is_right, "{stage}, {placed:?}, rank {rank}: {code:?} {signal:?}\n{output}");
    }
}
