//! Feeds every decoder of Drumline with random bytes. Not published.
//!
//! A [`Decoder`] is a plain function over bytes. It may refuse the bytes. It must not panic, it must not take
//! more memory than its bound, and what it takes must encode to the same bytes, or where it says so to an
//! equal value. [`check()`] checks all three. `docs/inside/fuzzing.md` lists the decoders and their bounds,
//! and says how to run and add one.
//!
//! | file | what it holds |
//! |---|---|
//! | [`decoders`] | the functions, and their table [`DECODERS`] |
//! | [`corpus`] | the files that are kept, and run with every `make test` |
//! | [`mutate`], [`random`] | random changes of them, from a seed |
//! | [`record`] | real bytes to begin with, made by the encoders |
//!
//! The crate needs no cargo feature, which would build every crate twice. A private decoder has a hidden
//! function in its own crate that decodes bytes and, if there is an encoder, encodes the result again:
//! `drumline_group::decoders`, `drumline_store::store::tcp::replies`,
//! `drumline_engine::transport::{frame_again, messages_of}`, `drumline_shm::header_again`,
//! `Checkpoint::from_bytes`.

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
