//! The job of one seed, from start-up to the checks.

use std::{
    ops::Range,
    sync::atomic::{AtomicU64, Ordering},
    thread,
};

use fastrand::Rng;

use crate::{
    draw::draw,
    membership,
    scenario::Scenario,
    simulation::Simulation,
    start_up,
    summary::{RunSummary, caught},
};

/// Runs the job of a seed and checks it. With `trace`, prints every event to stderr.
///
/// # Errors
///
/// The first check that fails.
pub fn run(seed: u64, trace: bool) -> Result<RunSummary, String> {
    caught(|| {
        let mut rng = Rng::with_seed(seed);
        let scenario = draw(&mut rng);
        if trace {
            print(&scenario);
        }
        let mut start_up_rng = Rng::with_seed(seed.rotate_left(32) ^ 0x73_746f_7265);
        let start_up = start_up::run(&mut start_up_rng, &scenario, trace)?;
        if !start_up.complete {
            let (events, virtual_ns) = (start_up.events, start_up.virtual_ns);
            return Ok(RunSummary { fault: true, events, virtual_ns });
        }
        let simulation = Simulation::run(rng, scenario, trace)?;
        simulation.check()?;
        Ok(RunSummary {
            fault: simulation.fault.is_some(),
            events: start_up.events + simulation.events,
            virtual_ns: start_up.virtual_ns + simulation.now,
        })
    })
}

/// What is simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Simulated {
    /// A job, from start-up to its last call.
    Job,
    /// The hosts of a job: see [`membership`].
    Membership,
}

impl Simulated {
    /// Runs one seed. With `trace`, prints every event to stderr.
    ///
    /// # Errors
    ///
    /// The first check that fails.
    pub fn run(self, seed: u64, trace: bool) -> Result<RunSummary, String> {
        match self {
            Simulated::Job => run(seed, trace),
            Simulated::Membership => membership::run(seed, trace),
        }
    }

    fn describe(self, seed: u64, problem: &str) -> String {
        let option = match self {
            Simulated::Job => "",
            Simulated::Membership => "--membership ",
        };
        let replay = format!("cargo run -p drumline-sim -- {option}--seed {seed} --trace");
        format!("seed {seed}: {problem}\n    replay: {replay}")
    }
}

/// Runs seeds on all cores, until `failures_max` of them have failed. Hands `ended` each
/// seed's summary, or what failed and the command that shows it. For `trace`, see [`run`].
pub fn run_all(
    what: Simulated,
    seeds: Range<u64>,
    trace: bool,
    failures_max: u64,
    ended: &(dyn Fn(Result<RunSummary, String>) + Sync),
) {
    let (next, failures) = (AtomicU64::new(seeds.start), AtomicU64::new(0));
    let work = || {
        while failures.load(Ordering::Relaxed) < failures_max {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                break;
            }
            let result = what.run(seed, trace);
            failures.fetch_add(u64::from(result.is_err()), Ordering::Relaxed);
            ended(result.map_err(|problem| what.describe(seed, &problem)));
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
}

#[expect(clippy::print_stderr, reason = "the trace is for people")]
fn print(scenario: &Scenario) {
    eprintln!("hosts of ranks: {:?}, fault: {:?}", scenario.host_of, scenario.fault);
    eprintln!("launched: {}, goes on after errors: {}", scenario.launched, scenario.goes_on);
    for (at, group) in scenario.groups.iter().enumerate() {
        eprintln!(
            "group {at}: all_reduce {:?}, order {:?}, slots of {:?} bytes",
            group.settings.all_reduce, group.sum_order, group.slot_bytes
        );
    }
    for (at, call) in scenario.calls.iter().enumerate() {
        eprintln!("call {at}: {call:?}");
    }
    for (at, messages) in scenario.messages.iter().enumerate() {
        eprintln!("messages {at}: {messages:?}");
    }
}
