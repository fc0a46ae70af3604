//! Jobs of up to a thousand ranks.

use drumline_sim::large::{LargeSummary, Task, run};

/// Requests of a rank during start-up. Their number does not grow with the number of ranks.
const REQUESTS_PER_RANK_MAX: u64 = 40;

const SHORT: Task = Task::AllReduce { elements: 1 };
const LONG: Task = Task::AllReduce { elements: 16 << 10 };

fn simulate(hosts: usize, ranks_per_host: usize, tasks: &[Task]) -> LargeSummary {
    let summary = run(hosts, ranks_per_host, tasks, 4711)
        .unwrap_or_else(|problem| panic!("{tasks:?}: {problem}"));
    println!("{tasks:?}: {summary:?}");
    let ranks = hosts * ranks_per_host;
    assert!(summary.requests <= ranks as u64 * REQUESTS_PER_RANK_MAX, "{tasks:?}: {summary:?}");
    // Every rank has one link at most for each round of a barrier.
    let rounds = ranks.next_power_of_two().ilog2() as usize;
    assert!(summary.links <= ranks * rounds, "{tasks:?}: {summary:?}");
    summary
}

#[test]
fn hundreds_of_hosts_start_and_open_few_connections() {
    assert_eq!(simulate(100, 1, &[]).links, 0);
    assert!(simulate(300, 1, &[SHORT]).links > 300);
    // The second barrier and sum open only the links that are missing.
    assert!(simulate(100, 1, &[Task::Barrier, SHORT, Task::Barrier, SHORT]).links > 100);
}

#[test]
fn so_they_do_with_much_to_add() {
    simulate(100, 1, &[LONG]);
}

#[test]
fn twenty_hosts_of_eight_ranks_open_fewer() {
    simulate(20, 8, &[SHORT]);
}

#[test]
#[ignore = "takes longer than all others: make soak"]
fn and_so_do_a_thousand_hosts_and_a_hundred_and_twenty_five_of_eight_ranks() {
    simulate(1_000, 1, &[SHORT]);
    simulate(300, 1, &[LONG]);
    for tasks in [&[][..], &[Task::Barrier], &[SHORT], &[LONG]] {
        simulate(125, 8, tasks);
    }
}
