//! One round of a guard: every rank tells every other which call it makes.

use std::{
    fmt,
    time::{Duration, Instant},
};

use drumline_engine::{
    Cause, Result,
    call::Call,
    executor::Held,
    operation::{Operation, StandsFor},
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
    /// The all-gather of the words. Logs and errors name the call that this rank makes.
    pub(super) exchange: Operation<'static>,
    own: Word,
    /// When a peer was first seen to be lost, outside of a round.
    pub(super) lost_since: Option<Instant>,
}

impl Round {
    pub(super) fn new(world_size: usize) -> Round {
        let call = Call::new(Collective::AllGather, DType::U8, Counts::Even(Word::BYTES));
        let words = Words { all: vec![0; world_size * Word::BYTES], own: [0; Word::BYTES] };
        let exchange = Operation::held(call, None, Box::new(words));
        Round { exchange, own: Word::Destroy, lost_since: None }
    }

    pub(super) fn begin(&mut self, word: Word, timeout: Duration) {
        if let Some(words) = self.exchange.buffers_mut().held_mut::<Words>() {
            word.write(&mut words.own);
        }
        self.own = word;
        let stands_for = match word {
            Word::Call(Signature(description)) => StandsFor::Call(description),
            Word::Destroy => StandsFor::Destroy,
        };
        self.exchange.stand_for(stands_for, timeout);
    }

    /// Compares the words of all ranks with that of this rank.
    pub(super) fn compare(&mut self, rank: Rank) -> Result<(), Cause> {
        let words = self.exchange.buffers().data().chunks_exact(Word::BYTES);
        let own = &words.clone().nth(rank);
        let Some((peer, theirs)) = words.enumerate().find(|(_, word)| Some(*word) != *own) else {
            return Ok(());
        };
        match Word::read(theirs) {
            Some(theirs) => {
                let (theirs, ours) = (theirs.to_string(), self.own.to_string());
                Err(Cause::Mismatch { peer, theirs, ours })
            }
            None => Err(Cause::Protocol { peer, problem: "sent a word of no call".to_owned() }),
        }
    }
}

/// The words of all ranks, and that of this rank. The round keeps them.
struct Words {
    all: Vec<u8>,
    own: [u8; Word::BYTES],
}

impl Held for Words {
    fn data(&self) -> &[u8] {
        &self.all
    }

    fn input(&self) -> &[u8] {
        &self.own
    }

    fn both(&mut self) -> (&mut [u8], &[u8]) {
        (&mut self.all, &self.own)
    }

    fn end(self: Box<Self>, _: Result<()>) {}
}
