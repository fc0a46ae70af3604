//! The job of one seed, from start-up to the checks.

use fastrand::Rng;

use crate::{
    draw::draw,
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

/// The command that runs a seed again and prints its events.
pub fn replay(seed: u64) -> String {
    format!("cargo run -p drumline-sim -- --seed {seed} --trace")
}

#[expect(clippy::print_stderr, reason = "the trace is for people")]
fn print(scenario: &Scenario) {
    eprintln!("hosts of ranks: {:?}, fault: {:?}", scenario.host_of, scenario.fault);
    eprintln!("launched: {}, goes on after errors: {}", scenario.launched, scenario.goes_on);
    for (at, group) in scenario.groups.iter().enumerate() {
        eprintln!(
            "group {at}: all_reduce {:?}, order {:?}, slots of {:?} bytes",
            group.config.all_reduce, group.config.sum_order, group.slot_bytes
        );
    }
    for (at, call) in scenario.calls.iter().enumerate() {
        eprintln!("call {at}: {call:?}");
    }
    for (at, messages) in scenario.messages.iter().enumerate() {
        eprintln!("messages {at}: {messages:?}");
    }
}
