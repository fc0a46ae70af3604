//! Random inputs of one decoder, one after another.

use std::{io, panic};

use fastrand::Rng;
use xxhash_rust::xxh3::xxh3_64;

use crate::{Decoder, Verdict, check, corpus, mutate::mutate};

/// The most inputs in the pool. The pool has the corpus and inputs that the decoder has taken; new inputs are
/// made from it.
const POOL_MAX: usize = 1024;

/// The random inputs of a decoder. They are the same for the same seed and corpus.
#[derive(Debug)]
pub struct Inputs {
    random: Rng,
    pool: Vec<Vec<u8>>,
    kept: usize,
}

impl Inputs {
    /// Begins with the files of the corpus.
    ///
    /// # Errors
    ///
    /// The corpus cannot be read.
    pub fn new(decoder: &Decoder, seed: u64) -> io::Result<Inputs> {
        let pool: Vec<_> = corpus::read(decoder)?.into_iter().map(|(_, bytes)| bytes).collect();
        let random = Rng::with_seed(seed ^ xxh3_64(decoder.name.as_bytes()));
        Ok(Inputs { random, kept: pool.len(), pool })
    }

    /// The next input.
    pub fn next_input(&mut self) -> Vec<u8> {
        let nothing = Vec::new();
        let one = self.random.choice(&self.pool).unwrap_or(&nothing);
        let other = self.random.choice(&self.pool).unwrap_or(&nothing);
        mutate(one, other, &mut self.random)
    }

    /// Adds an input that the decoder has taken to the pool.
    pub fn taken(&mut self, input: Vec<u8>) {
        if self.pool.len() < POOL_MAX {
            self.pool.push(input);
        } else {
            let at = self.random.usize(self.kept.min(POOL_MAX - 1)..POOL_MAX);
            self.pool[at] = input;
        }
    }
}

/// Runs a decoder on an input, and catches panics.
///
/// # Errors
///
/// The text of the panic of the decoder or of [`check()`].
pub fn attempt(decoder: &Decoder, input: &[u8]) -> Result<Verdict, String> {
    panic::catch_unwind(|| check(decoder, input)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
            .unwrap_or_else(|| "a panic without a text".to_owned())
    })
}
