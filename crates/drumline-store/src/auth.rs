//! Which processes belong to the job: a secret, and the handshake that opens every connection.
//!
//! Before either end reads any other byte, the two ends greet each other. Then each end proves that it knows
//! the job's secret, without showing it:
//!
//! ```text
//! caller                                      answerer
//!   │── hello: channel, ranks, group, nonce ────▶│  drops what does not begin like a greeting
//!   │◀───── hello: channel, ranks, group, nonce ─│
//!   │── HMAC(secret, "caller"   ‖ both hellos) ─▶│  a wrong one is answered with 32 zeros
//!   │◀─ HMAC(secret, "answerer" ‖ both hellos) ──│
//! ```
//!
//! The hash is SHA-256. The nonces are 32 fresh random bytes of each end.
//!
//! | what a stranger may try | why it fails |
//! |---|---|
//! | replay a proof that it has seen | the proof covers the other end's nonce, which is new every time |
//! | let the two ends agree on a weaker level | each end insists on its own level, and the proofs cover both levels |
//! | send our own proof back to us | the two roles sign different texts |
//! | use a proof for another rank, group or channel | the proof covers both hellos completely |
//! | claim to have no secret | both ends must agree on that, and it works on one host only |
//! | let us sign texts, to guess the secret offline | an answerer signs nothing before the caller has proven itself |
//! | find the secret out byte by byte | proofs are compared in constant time |
//!
//! ```
//! # use drumline_store as drumline;
//! use std::time::Duration;
//!
//! use drumline::{auth::Secret, store::{Store, TcpStore}};
//!
//! let secret = Secret::random()?;
//! let host = TcpStore::host_secured(&"tcp://127.0.0.1:0".parse().unwrap(), &secret)?;
//! let endpoint = host.name().parse().unwrap();
//! let patience = Duration::from_secs(5);
//! TcpStore::connect_secured(&endpoint, &secret, patience)?.set("key", b"value")?;
//! let stranger = TcpStore::connect_secured(&endpoint, &Secret::random()?, patience);
//! assert!(stranger.unwrap_err().to_string().contains("secret"));
//! # Ok::<_, drumline::Error>(())
//! ```
//!
//! After the handshake, the [`Level`] decides how the connection is protected. Both ends must have the same
//! level. At `auth` the connection is neither encrypted nor signed: someone who can change packets on the
//! wire can still take it over. At `tls` both ends agree on keys by TLS 1.3 ([`secured`](crate::secured)), between the
//! hellos and the proofs. The proofs then go through TLS and also cover a value that TLS exports from its
//! keys. So nobody can stand in the middle of two TLS connections.

mod channel;
/// The proof that both ends know the secret.
pub mod handshake;
/// The first bytes of a connection.
pub mod hello;
mod level;
mod nonce;
mod refusal;
mod secret;

pub use self::{
    channel::Channel,
    handshake::{Expected, Handshake},
    hello::Hello,
    level::{Level, NoLevel},
    nonce::Nonce,
    refusal::Refusal,
    secret::Secret,
};
