//! One round of a guard: every rank tells every other which call it makes.

use std::{
    fmt,
    time::{Duration, Instant},
};

use drumline_engine::{
    Cause, Result,
    any_call::{AnyCall, OnBytes},
    call::Call,
    executor::{Memory, Plan, Pool},
    host::Host,
    typed_call::TypedCall,
};
use drumline_schedule::{Collective, Counts, step::Rank};

use crate::{DType, backend::Signature};

/// What a rank says in a round.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Word {
    Call(Signature),
    Destroy,
}

impl Word {
    const BYTES: usize = 1 + Signature::BYTES;

    fn write(self, bytes: &mut [u8]) {
        bytes.fill(0);
        if let Word::Call(signature) = self {
            bytes[0] = 1;
            bytes[1..].copy_from_slice(&signature.to_bytes());
        }
    }

    /// `None`: no rank of this release says that.
    fn read(bytes: &[u8]) -> Option<Word> {
        match bytes {
            [1, signature @ ..] => {
                Signature::from_bytes(signature.try_into().ok()?).map(Word::Call)
            }
            [0, ..] => Some(Word::Destroy),
            _ => None,
        }
    }
}

impl fmt::Display for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Word::Call(signature) => signature.fmt(f),
            Word::Destroy => f.write_str("destroy"),
        }
    }
}

pub(super) struct Round {
    pub(super) exchange: Exchange,
    /// When a peer was first seen to be lost, outside of a round.
    pub(super) lost_since: Option<Instant>,
}

impl Round {
    pub(super) fn new(world_size: usize) -> Round {
        let call = Call::new(Collective::AllGather, DType::U8, Counts::Even(Word::BYTES));
        let (all, own) = (vec![0; world_size * Word::BYTES], vec![0; Word::BYTES]);
        let words = TypedCall::new(call.clone(), None, all, own);
        Round { exchange: Exchange { call, words, own: Word::Destroy }, lost_since: None }
    }

    pub(super) fn begin(&mut self, word: Word, timeout: Duration) {
        word.write(self.exchange.words.input_mut());
        self.exchange.own = word;
        self.exchange.call.timeout = Some(timeout);
    }

    /// Compares the words of all ranks with that of this rank.
    pub(super) fn compare(&mut self, rank: Rank) -> Result<(), Cause> {
        let words = self.exchange.words.data().chunks_exact(Word::BYTES);
        let own = &words.clone().nth(rank);
        let Some((peer, theirs)) = words.enumerate().find(|(_, word)| Some(*word) != *own) else {
            return Ok(());
        };
        match Word::read(theirs) {
            Some(theirs) => {
                let (theirs, ours) = (theirs.to_string(), self.exchange.own.to_string());
                Err(Cause::Mismatch { peer, theirs, ours })
            }
            None => Err(Cause::Protocol { peer, problem: "sent a word of no call".to_owned() }),
        }
    }
}

/// The all-gather of the words. Logs and errors name the call that this rank makes.
pub(super) struct Exchange {
    call: Call,
    words: TypedCall<u8, Vec<u8>, Vec<u8>>,
    own: Word,
}

impl AnyCall for Exchange {
    fn call(&self) -> &Call {
        &self.call
    }

    fn told_as(&self) -> Option<String> {
        Some(match self.own {
            Word::Call(Signature(description)) => description.to_string(),
            Word::Destroy => self.own.to_string(),
        })
    }

    fn registered(&self, host: &Host) -> Option<u64> {
        self.words.registered(host)
    }

    fn detach(&mut self, host: &Host) {
        self.words.detach(host);
    }

    fn prepare(&mut self, plan: &Plan, pool: &mut Pool) {
        self.words.prepare(plan, pool);
    }

    fn memory(&mut self) -> &mut dyn Memory {
        self.words.memory()
    }

    fn release(&mut self, pool: &mut Pool) {
        self.words.release(pool);
    }

    fn on_bytes(&mut self, rank: Rank, carry_out: &mut OnBytes<'_>) -> Result<(), Cause> {
        self.words.on_bytes(rank, carry_out)
    }
}
