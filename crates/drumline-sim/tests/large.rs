//! A thousand ranks.

use drumline_sim::large::{Task, run};

const RANKS: usize = 1_000;

/// Ranks times rounds: what is enough for every rank to reach every other one.
const BUNDLES_MAX: usize = RANKS * 10; // 2^10 is the first power of two from 1,000 on

const TASKS: [Task; 4] = [
    Task::Nothing,
    Task::Barrier,
    Task::AllReduce { elements: 1 },
    Task::AllReduce { elements: 16 << 10 },
];

#[test]
fn a_thousand_hosts_open_few_connections() {
    for task in TASKS {
        let summary =
            run(RANKS, 1, task, 4711).unwrap_or_else(|problem| panic!("{task:?}: {problem}"));
        println!("{task:?}: {summary:?}");
        assert_eq!(summary.bundles == 0, task == Task::Nothing, "{task:?}: {summary:?}");
        assert!(summary.bundles <= BUNDLES_MAX, "{task:?}: {summary:?}");
    }
}

#[test]
fn a_hundred_and_twenty_five_hosts_of_eight_ranks_open_fewer() {
    for task in TASKS {
        let summary =
            run(RANKS / 8, 8, task, 4711).unwrap_or_else(|problem| panic!("{task:?}: {problem}"));
        println!("{task:?}: {summary:?}");
        assert_eq!(summary.bundles == 0, task == Task::Nothing, "{task:?}: {summary:?}");
        assert!(summary.bundles <= BUNDLES_MAX, "{task:?}: {summary:?}");
    }
}
