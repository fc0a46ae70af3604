//! Jobs of a thousand ranks.

use drumline_sim::large::{LargeSummary, Task, run};

const RANKS: usize = 1_000;

/// Ranks times rounds of a barrier: 2^10 is the smallest power of two above 1,000.
const LINKS_MAX: usize = RANKS * 10;

/// Requests of a rank during start-up. Their number does not grow with the number of ranks.
const REQUESTS_PER_RANK_MAX: u64 = 40;

const SHORT: Task = Task::AllReduce { elements: 1 };
const LONG: Task = Task::AllReduce { elements: 16 << 10 };

fn simulate(ranks_per_host: usize, tasks: &[Task]) -> LargeSummary {
    let summary = run(RANKS / ranks_per_host, ranks_per_host, tasks, 4711)
        .unwrap_or_else(|problem| panic!("{tasks:?}: {problem}"));
    println!("{tasks:?}: {summary:?}");
    assert!(summary.requests <= RANKS as u64 * REQUESTS_PER_RANK_MAX, "{tasks:?}: {summary:?}");
    assert!(summary.links <= LINKS_MAX, "{tasks:?}: {summary:?}");
    summary
}

#[test]
fn a_thousand_hosts_start_and_open_few_connections() {
    assert_eq!(simulate(1, &[]).links, 0);
    // The second barrier and sum open only the links that are missing.
    assert!(simulate(1, &[Task::Barrier, SHORT, Task::Barrier, SHORT]).links > RANKS);
}

#[test]
fn so_they_do_with_much_to_add() {
    simulate(1, &[LONG]);
}

#[test]
fn a_hundred_and_twenty_five_hosts_of_eight_ranks_open_fewer() {
    simulate(8, &[SHORT]);
}

#[test]
#[ignore = "takes twice as long as all others"]
fn and_so_they_do_whatever_they_call() {
    for tasks in [&[][..], &[Task::Barrier], &[LONG]] {
        simulate(8, tasks);
    }
}
