//! Runs seeds of the simulator.

use std::{
    ops::Range,
    process::ExitCode,
    sync::atomic::{AtomicU64, Ordering},
};

use clap::Parser;
use drumline_sim::Simulated;

/// Simulates whole jobs, or the launchers of their hosts, on virtual time, with faults, and checks them.
#[derive(Debug, Parser)]
struct Arguments {
    /// Run one seed.
    #[arg(long, conflicts_with = "seeds")]
    seed: Option<u64>,
    /// Print every event. Needs --seed.
    #[arg(long, requires = "seed")]
    trace: bool,
    /// Run these seeds, on all cores.
    #[arg(long, value_parser = range, default_value = "0..1000")]
    seeds: Range<u64>,
    /// Simulate the launchers of the hosts of a job instead of its ranks.
    #[arg(long)]
    membership: bool,
    /// Stop after this number of failures.
    #[arg(long, default_value_t = 10)]
    failures_max: u64,
}

fn range(text: &str) -> Result<Range<u64>, String> {
    let (start, end) = text.split_once("..").ok_or("a range is written 0..10000")?;
    let number = |text: &str| text.parse::<u64>().map_err(|error| error.to_string());
    Ok(number(start)?..number(end)?)
}

#[expect(clippy::print_stdout, reason = "the report is for people")]
fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let seeds = match arguments.seed {
        Some(seed) => seed..seed + 1,
        None => arguments.seeds.clone(),
    };
    let (failures, faults, events) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let what = if arguments.membership { Simulated::Membership } else { Simulated::Job };
    drumline_sim::run_all(
        what,
        seeds.clone(),
        arguments.trace,
        arguments.failures_max,
        &|result| match result {
            Ok(summary) => {
                faults.fetch_add(u64::from(summary.fault), Ordering::Relaxed);
                events.fetch_add(summary.events, Ordering::Relaxed);
            }
            Err(problem) => {
                failures.fetch_add(1, Ordering::Relaxed);
                println!("{problem}");
            }
        },
    );
    let failures = failures.into_inner();
    println!(
        "{} seeds, {} faults struck, {} events: {failures} failed",
        seeds.end.saturating_sub(seeds.start),
        faults.into_inner(),
        events.into_inner()
    );
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
