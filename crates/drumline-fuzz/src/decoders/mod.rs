//! The table of decoders.

mod files;
mod group;
mod scratch;
mod settings;
mod store;
mod wire;

pub(crate) use self::{
    group::{Plan, Settings, Tree},
    wire::handshake_of_ranks,
};
use crate::Verdict;

/// A decoder and the bound on its memory.
#[derive(Clone, Copy, Debug)]
pub struct Decoder {
    /// The name of its folder in the corpus.
    pub name: &'static str,
    /// Runs the decoder on bytes. Panics if the decoder breaks a promise.
    pub run: fn(&[u8]) -> Verdict,
    /// Bytes that it may allocate for any input.
    pub fixed: usize,
    /// Bytes that it may allocate in addition for each byte of input, including all copies that the function
    /// makes.
    pub factor: usize,
}

impl Decoder {
    /// What it may allocate for an input of `input` bytes.
    pub fn bound(&self, input: usize) -> usize {
        self.fixed + self.factor * input
    }
}

const fn decoder(
    name: &'static str,
    run: fn(&[u8]) -> Verdict,
    fixed: usize,
    factor: usize,
) -> Decoder {
    Decoder { name, run, fixed, factor }
}

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// All decoders.
pub const DECODERS: &[Decoder] = &[
    decoder("greeting", wire::greeting, KIB, 2),
    decoder("handshake", wire::handshake, 4 * KIB, 4),
    decoder("store-request", store::request, KIB, 8),
    // The client allocates memory for one value of the greatest length before the value arrives.
    decoder("store-reply", store::reply, 8 * MIB + 64 * KIB, 64),
    decoder("store-file", store::file, 64 * KIB, 64),
    decoder("control", wire::control, 16 * KIB, 8),
    decoder("header", wire::header, KIB, 2),
    decoder("frame", wire::frame, KIB, 2),
    decoder("messages", wire::messages, 32 * KIB, 32),
    decoder("roll", group::roll, 16 * KIB, 32),
    decoder("card", group::card, 4 * KIB, 64),
    decoder("address", group::addresses, 4 * KIB, 64),
    decoder("clock", group::clock, KIB, 2),
    decoder("segment", wire::segment, KIB, 2),
    decoder("announcement", wire::announcement, 4 * KIB, 2),
    // The library of the format trusts the length of a list, and allocates up to a mebibyte for each list.
    decoder("object", group::object, 4 * MIB, 128),
    decoder("checkpoint", files::checkpoint, 16 * KIB, 128),
    decoder("sampler", files::sampler, 4 * KIB, 8),
    decoder("trace", files::trace, 512 * KIB, 128),
    // A number of one digit becomes a value of some 32 bytes, in a list that has room for twice as many.
    decoder("error-file", files::error_file, 16 * KIB, 128),
    decoder("prices", settings::prices, 16 * KIB, 32),
    // Bytes that are no text take most: each becomes a sign of three bytes, which an error escapes.
    decoder("url", settings::url, 4 * KIB, 64),
    decoder("endpoint", settings::endpoint, KIB, 16),
    decoder("settings", settings::variables, 16 * KIB, 64),
    decoder("secret", settings::secret, 16 * KIB, 8),
];
