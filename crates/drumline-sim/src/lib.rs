//! A simulator of whole jobs.
//!
//! The real store, groups, schedules, streams, shared memory and launchers of Drumline run here, up
//! to 64 ranks in one thread, on virtual time and over virtual connections. One number, the seed,
//! decides everything: who is where, who calls what, how bytes are torn and delayed, whose turn
//! it is, and what goes wrong. The same seed gives the same run, to the last bit.
//!
//! After every run it is checked that nobody hung, that every result has the bits which an
//! independent computation gives, that without a fault there was no error, and that with one
//! every error blames the rank at fault. The store through which the ranks meet first is compared,
//! request by request, with a sequential model. [`large`] jobs have a thousand ranks.
//!
//! A [`Job`] is not drawn from a seed, and nothing goes wrong in it: it carries out cases of the
//! conformance suite.
//!
//! ```text
//! cargo run --release -p drumline-sim -- --seeds 0..10000
//! cargo run -p drumline-sim -- --seed 4711 --trace
//! ```

#![forbid(unsafe_code)]

mod call;
mod dial;
mod job;
pub mod large;
mod member;
mod message;
mod network;
mod plan;
mod process;
mod rendezvous;
mod simulation;
mod verdict;
mod warnings;

use std::panic::{AssertUnwindSafe, catch_unwind};

use fastrand::Rng;

pub use job::{Job, Place};

/// Runs the job of a seed and checks it. With `trace`, tells on stderr what happens.
///
/// # Errors
///
/// What is wrong.
pub fn run(seed: u64, trace: bool) -> Result<Summary, String> {
    let simulate = || {
        let mut rng = Rng::with_seed(seed);
        let plan = plan::Plan::new(&mut rng);
        if trace {
            tell(&plan);
        }
        let mut other_rng = Rng::with_seed(seed.rotate_left(32) ^ 0x73_746f_7265);
        let meeting = rendezvous::run(&mut other_rng, &plan, trace)?;
        if !meeting.complete {
            let (events, virtual_ns) = (meeting.events, meeting.virtual_ns);
            return Ok(Summary { fault: true, events, virtual_ns });
        }
        let simulation = simulation::Simulation::run(rng, plan, trace)?;
        let checked = simulation.check();
        let summary = Summary {
            fault: simulation.fault.is_some(),
            events: meeting.events + simulation.events,
            virtual_ns: meeting.virtual_ns + simulation.now,
        };
        checked.map(|()| summary)
    };
    caught(simulate)
}

/// Makes a panic an error.
fn caught<T>(simulate: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(simulate)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
        Err(format!("panic: {}", text.unwrap_or_default()))
    })
}

/// What a run was like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Whether a fault struck.
    pub fault: bool,
    /// How many things happened.
    pub events: u64,
    /// How long it took, in nanoseconds of virtual time.
    pub virtual_ns: u64,
}

/// The command that runs a seed again and shows what happens.
pub fn replay(seed: u64) -> String {
    format!("cargo run -p drumline-sim -- --seed {seed} --trace")
}

#[expect(clippy::print_stderr, reason = "the trace is for people")]
fn tell(plan: &plan::Plan) {
    eprintln!("hosts of ranks: {:?}, fault: {:?}", plan.host_of, plan.fault);
    eprintln!("launched: {}, goes on after errors: {}", plan.launched, plan.goes_on);
    for (at, group) in plan.groups.iter().enumerate() {
        eprintln!(
            "group {at}: all_reduce {:?}, order {:?}, slots of {:?} bytes",
            group.settings.all_reduce, group.sum_order, group.slot_bytes
        );
    }
    for (at, call) in plan.calls.iter().enumerate() {
        eprintln!("call {at}: {call:?}");
    }
    for (at, messages) in plan.messages.iter().enumerate() {
        eprintln!("messages {at}: {messages:?}");
    }
}
