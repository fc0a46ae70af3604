//! The state that the processes of a start-up share: time, connections and their transcripts.

use std::sync::{Arc, atomic::AtomicU64};

use fastrand::Rng;

use super::mesh::Sockets;
use crate::{
    network::{LinkQuality, Network, SharedPipe, SimStream, connect},
    time::Nanos,
};

/// The number of the store's process.
pub(super) const STORE: usize = 0;

#[derive(Debug)]
pub(super) struct SharedState {
    pub(super) network: Arc<Network>,
    pub(super) rng: Rng,
    pub(super) transcripts: Vec<Transcript>,
    /// Dials on their way to the store: when each arrives, its transcript and its stream.
    pub(super) dials: Vec<(Nanos, usize, SimStream)>,
    /// Whether the store takes connections.
    pub(super) store_answers: bool,
    pub(super) store_killed: Arc<AtomicU64>,
    /// The ranks' own sockets, which do not lead to the store.
    pub(super) sockets: Sockets,
    /// The name of each process.
    pub(super) names: Vec<String>,
}

/// The bytes that a connection to the store carried.
#[derive(Debug)]
pub(super) struct Transcript {
    pub(super) caller: usize,
    pub(super) pipes: [SharedPipe; 2],
    /// The bytes that the caller wrote, and the bytes that it read.
    pub(super) said: Vec<u8>,
    pub(super) heard: Vec<u8>,
    /// The requests that the store carried out, and its replies.
    pub(super) carried_out: Vec<u8>,
    pub(super) replied: Vec<u8>,
    /// A fault cut the connection, or the store refused it.
    pub(super) doomed: bool,
}

impl SharedState {
    pub(super) fn now(&self) -> Nanos {
        self.network.now()
    }

    pub(super) fn note(&self, text: impl FnOnce() -> String) {
        self.network.note(text);
    }

    /// The name of the caller.
    pub(super) fn whose(&self, transcript: usize) -> &str {
        &self.names[self.transcripts[transcript].caller]
    }

    /// Connects a process to the store. Returns the transcript's number and the caller's end.
    pub(super) fn dial(
        &mut self,
        caller: usize,
        switch: &Arc<AtomicU64>,
        quality: LinkQuality,
    ) -> Option<(usize, SimStream)> {
        if !self.store_answers {
            return None;
        }
        let ends = [(caller, switch), (STORE, &self.store_killed)];
        let ([ours, theirs], pipes) = connect(&self.network, ends, quality, &mut self.rng);
        let at = self.now() + quality.latency_ns + self.rng.u64(0..=quality.jitter_ns);
        self.dials.push((at, self.transcripts.len(), theirs));
        self.transcripts.push(Transcript {
            caller,
            pipes,
            said: Vec::new(),
            heard: Vec::new(),
            carried_out: Vec::new(),
            replied: Vec::new(),
            doomed: false,
        });
        Some((self.transcripts.len() - 1, ours))
    }
}

impl Transcript {
    /// Checks that the store carried out a prefix of what the caller said, and that the caller
    /// heard a prefix of what the store replied.
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
