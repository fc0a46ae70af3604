//! Who belongs to the job: a secret, and the handshake that opens every connection.
//!
//! Before any other byte of a connection is looked at, its two ends greet each other and then
//! each proves that it knows the job's secret, without showing it:
//!
//! ```text
//! caller                                      answerer
//!   │── hello: channel, ranks, group, nonce ────▶│  drops what does not begin like a greeting
//!   │◀───── hello: channel, ranks, group, nonce ─│
//!   │── HMAC(secret, "caller"   ‖ both hellos) ─▶│  a wrong one is answered with 32 zeros
//!   │◀─ HMAC(secret, "answerer" ‖ both hellos) ──│
//! ```
//!
//! The hash is SHA-256, the nonces are 32 fresh random bytes from either side.
//!
//! | what a stranger may try | why it does not work |
//! |---|---|
//! | replay a proof that it has seen | the other end's nonce is in it, and is new every time |
//! | let the two ends agree on a weaker level | each end insists on its own, and both levels are in the proofs |
//! | send our own proof back to us | the two roles sign different texts |
//! | use a proof for another rank, group or channel | both hellos are in it, whole |
//! | claim to be without a secret | both ends must agree on that, and it is for one host only |
//! | let us sign texts for it to guess the secret at home | an answerer signs nothing for who has not proven itself |
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
//! What follows the handshake depends on the [`Level`], which both ends must have alike. At `auth` it
//! is neither encrypted nor signed: who can change packets on the wire can still take a connection
//! over. At `integrity` both ends make keys of the secret and both hellos, and seal every block
//! ([`secured`](crate::secured)). At `tls` both ends agree on keys by TLS 1.3 between the hellos and
//! the proofs. The proofs then go through TLS and also cover what it exports of its keys, so that
//! nobody can sit in the middle of two TLS connections.

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
