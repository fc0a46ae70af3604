//! Why a handshake fails.

use std::fmt;

use super::{channel::Channel, level::Level};
use crate::Rank;

/// Why a handshake failed: what is wrong with the other end.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// It does not begin with a greeting.
    #[error("it does not speak this protocol")]
    NotDrumline,
    /// It is of another release.
    #[error(
        "it speaks version {theirs} of the protocol, this process version {ours}: install the \
         same release everywhere"
    )]
    Version {
        /// The version of the other end.
        theirs: u16,
        /// The version of this process.
        ours: u16,
    },
    /// It wants to prove itself in a way that this process does not know.
    #[error("it asks for authentication of kind {0}, unknown here")]
    UnknownAuthentication(u8),
    /// The connection is for a channel that this process does not know.
    #[error("it opens a channel of kind {0}, unknown here")]
    UnknownChannel(u8),
    /// The connection is for a channel that was not expected.
    #[error("it opens a channel for {0:?}, which is not wanted here")]
    UnwantedChannel(Channel),
    /// It has a secret, and this process has none.
    #[error(
        "it has a secret and this process has none: set the same DRUMLINE_SECRET or \
         DRUMLINE_SECRET_FILE for all processes of the job"
    )]
    OnlyTheyHaveASecret,
    /// This process has a secret, and it has none.
    #[error(
        "it has no secret and this process has one: set the same DRUMLINE_SECRET or \
         DRUMLINE_SECRET_FILE for all processes of the job"
    )]
    OnlyWeHaveASecret,
    /// Its security level differs.
    #[error(
        "its security level is {theirs}, that of this process {ours}: set DRUMLINE_SECURITY alike for \
         all processes of the job"
    )]
    OtherLevel {
        /// The level of the other end.
        theirs: Level,
        /// The level of this process.
        ours: Level,
    },
    /// This level needs a secret, and this process has none.
    #[error(
        "the security level is {0}, which takes a secret: set DRUMLINE_SECRET or \
         DRUMLINE_SECRET_FILE for all processes of the job"
    )]
    LevelWithoutSecret(Level),
    /// TLS found something wrong.
    #[error("TLS: {0}")]
    Tls(String),
    /// It belongs to another group, or to an earlier life of this one.
    #[error("it belongs to another group")]
    OtherGroup,
    /// It has another world size.
    #[error("it counts {theirs} ranks, this rank {ours}")]
    OtherWorldSize {
        /// The world size of the other end.
        theirs: usize,
        /// The world size of this process.
        ours: usize,
    },
    /// It is not the expected rank.
    #[error("it says that it is rank {0}")]
    OtherRank(Rank),
    /// Its proof is wrong.
    #[error(
        "it does not know this job's secret: is DRUMLINE_SECRET or DRUMLINE_SECRET_FILE the same \
         for all processes of the job?"
    )]
    WrongSecret,
}

impl fmt::Debug for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
