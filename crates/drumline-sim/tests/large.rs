//! A thousand ranks.

#![allow(clippy::panic)]

use drumline_sim::large::{Task, run};

const RANKS: usize = 1_000;

/// Ranks times rounds: 2^10 is the first power of two from 1,000 on.
const BUNDLES_MAX: usize = RANKS * 10;

const SHORT: Task = Task::AllReduce { elements: 1 };
const LONG: Task = Task::AllReduce { elements: 16 << 10 };

fn opens_few_connections(ranks_per_host: usize, task: Task) {
    let summary = run(RANKS / ranks_per_host, ranks_per_host, task, 4711)
        .unwrap_or_else(|problem| panic!("{task:?}: {problem}"));
    println!("{task:?}: {summary:?}");
    assert_eq!(summary.bundles == 0, task == Task::Nothing, "{task:?}: {summary:?}");
    assert!(summary.bundles <= BUNDLES_MAX, "{task:?}: {summary:?}");
}

#[test]
fn a_thousand_hosts_open_few_connections() {
    for task in [Task::Nothing, Task::Barrier, SHORT, LONG] {
        opens_few_connections(1, task);
    }
}

#[test]
fn a_hundred_and_twenty_five_hosts_of_eight_ranks_open_fewer() {
    opens_few_connections(8, SHORT);
}

#[test]
#[ignore = "takes twice as long as all others"]
fn and_so_they_do_whatever_they_call() {
    for task in [Task::Nothing, Task::Barrier, LONG] {
        opens_few_connections(8, task);
    }
}
