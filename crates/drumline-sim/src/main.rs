//! Runs seeds of the simulator.

use std::{
    ops::Range,
    process::ExitCode,
    sync::atomic::{AtomicU64, Ordering},
};

use clap::Parser;

/// Simulates whole jobs on virtual time, with faults, and checks them.
#[derive(Debug, Parser)]
struct Arguments {
    /// Run one seed.
    #[arg(long, conflicts_with = "seeds")]
    seed: Option<u64>,
    /// Tell what happens. With --seed.
    #[arg(long, requires = "seed")]
    trace: bool,
    /// Run these seeds, on all cores.
    #[arg(long, value_parser = range, default_value = "0..1000")]
    seeds: Range<u64>,
    /// Stop after so many failures.
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
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let (next, failures) = (AtomicU64::new(seeds.start), AtomicU64::new(0));
    let (faults, events) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    let enough = failures.load(Ordering::Relaxed) >= arguments.failures_max;
                    if seed >= seeds.end || enough {
                        break;
                    }
                    match drumline_sim::run(seed, arguments.trace) {
                        Ok(summary) => {
                            faults.fetch_add(u64::from(summary.fault), Ordering::Relaxed);
                            events.fetch_add(summary.events, Ordering::Relaxed);
                        }
                        Err(problem) => {
                            failures.fetch_add(1, Ordering::Relaxed);
                            let replay = drumline_sim::replay(seed);
                            println!("seed {seed}: {problem}\n    replay: {replay}");
                        }
                    }
                }
            });
        }
    });
    let failures = failures.into_inner();
    println!(
        "{} seeds, {} faults struck, {} events: {failures} failed",
        seeds.end.saturating_sub(seeds.start),
        faults.into_inner(),
        events.into_inner()
    );
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
