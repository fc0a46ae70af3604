//! What the processes of a start-up share: time, wires, and what is known of every connection.

use std::sync::{Arc, atomic::AtomicU64};

use fastrand::Rng;

use crate::network::{Nanos, Network, Quality, SharedPipe, Stream, connect};

/// The number of the process that hosts the store.
pub(super) const HOST: usize = 0;

#[derive(Debug)]
pub(super) struct World {
    pub(super) network: Arc<Network>,
    pub(super) rng: Rng,
    pub(super) lines: Vec<Line>,
    /// Calls that are under way to the host.
    pub(super) calls: Vec<(Nanos, usize, Stream)>,
    /// Whether anybody answers.
    pub(super) host_is_there: bool,
    pub(super) host_switch: Arc<AtomicU64>,
    /// By process.
    pub(super) names: Vec<String>,
    pub(super) trace: bool,
}

/// A connection to the store: what was said, and what must hold of it in the end.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) caller: usize,
    pub(super) pipes: [SharedPipe; 2],
    /// What the caller wrote, and what it read.
    pub(super) said: Vec<u8>,
    pub(super) heard: Vec<u8>,
    /// The requests that the store has carried out, and what it replied.
    pub(super) carried_out: Vec<u8>,
    pub(super) replied: Vec<u8>,
    /// It was cut, or the store has refused it.
    pub(super) doomed: bool,
}

impl World {
    pub(super) fn now(&self) -> Nanos {
        self.network.now()
    }

    /// Tells what happens, if anybody wants to know.
    #[expect(clippy::print_stderr, reason = "the trace is for people")]
    pub(super) fn note(&self, text: impl FnOnce() -> String) {
        if self.trace {
            eprintln!("{:>12.3} ms  {}", self.now() as f64 / 1e6, text());
        }
    }

    /// Who is at the other end of a line.
    pub(super) fn whose(&self, line: usize) -> &str {
        &self.names[self.lines[line].caller]
    }

    /// Connects a process to the store: its end, and the number of the line.
    pub(super) fn dial(
        &mut self,
        caller: usize,
        switch: &Arc<AtomicU64>,
        quality: Quality,
    ) -> Option<(usize, Stream)> {
        if !self.host_is_there {
            return None;
        }
        let ends = [(caller, switch), (HOST, &self.host_switch)];
        let ([ours, theirs], pipes) = connect(&self.network, ends, quality, &mut self.rng);
        let at = self.now() + quality.latency_ns + self.rng.u64(0..=quality.jitter_ns);
        self.calls.push((at, self.lines.len(), theirs));
        self.lines.push(Line {
            caller,
            pipes,
            said: Vec::new(),
            heard: Vec::new(),
            carried_out: Vec::new(),
            replied: Vec::new(),
            doomed: false,
        });
        Some((self.lines.len() - 1, ours))
    }
}

impl Line {
    /// Whether the store has carried out what the caller said, and the caller has heard what the
    /// store replied, both from the beginning and nothing else.
    pub(super) fn check(&self) -> Result<(), String> {
        if !self.said.starts_with(&self.carried_out) {
            return Err("the store has carried out what it was not asked".to_owned());
        }
        match self.replied.starts_with(&self.heard) {
            true => Ok(()),
            false => Err("heard what the store has not replied".to_owned()),
        }
    }
}
