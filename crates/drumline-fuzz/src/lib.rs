//! Every decoder of Drumline, fed with bytes that nobody has written. Not published.
//!
//! A [`Decoder`] is a plain function over bytes. It may refuse them. It must not panic, must not take
//! more memory than its bound, and what it takes must come back the same: [`check()`] sees to all three.
//! `docs/inside/fuzzing.md` lists the decoders and their bounds, and says how to run and add one.
//!
//! | file | what it holds |
//! |---|---|
//! | [`decoders`] | the functions, and their table [`DECODERS`] |
//! | [`corpus`] | the files that are kept, and run with every `make test` |
//! | [`mutate`], [`random`] | random changes of them, from a seed |
//! | [`record`] | real bytes to begin with, made by the encoders |
//!
//! The crate has no features and needs no code in others but functions that are hidden: where a
//! decoder is private, the crate that owns it has a function next to it that reads bytes and, where
//! there is an encoder, writes again what it has read (`drumline_group::decoders`,
//! `drumline_store::store::tcp::replies`, `drumline_engine::transport::{frame_again, messages_of}`,
//! `drumline_shm::header_again`, `Checkpoint::from_bytes`). A cargo feature would build every crate twice.

#![forbid(unsafe_code)]

pub mod check;
pub mod corpus;
pub mod decoders;
pub mod mutate;
pub mod random;
pub mod record;
pub mod verdict;

pub use check::check;
pub use decoders::{DECODERS, Decoder};
pub use verdict::Verdict;
