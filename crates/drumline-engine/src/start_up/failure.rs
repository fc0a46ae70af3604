//! Why a rank could not be connected.

use std::fmt;

use drumline_schedule::step::Rank;

use crate::{error::one_line, membership::Membership};

/// Why a rank could not be connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure<E> {
    /// The store, a socket or memory failed.
    Outside(E),
    /// The ranks did not come together. The text names who is to blame.
    Connect(String),
    /// The process of a rank has ended.
    Ended(Rank),
    /// The same, as the text tells: nobody listens where the rank did, and the rank has not said why.
    Refused(Rank, String),
}

impl<E> Failure<E> {
    /// A failure because of rank `peer`.
    pub(super) fn by(member: &Membership, peer: Rank, problem: &str) -> Failure<E> {
        // Most problems quote what the peer wrote.
        let problem = one_line(problem.as_bytes());
        Failure::Connect(format!("{}: {problem}", member.global.who(peer)))
    }
}

impl<E> From<E> for Failure<E> {
    fn from(error: E) -> Failure<E> {
        Failure::Outside(error)
    }
}

impl<E: fmt::Display> Failure<E> {
    /// The text, for the rank of `member`.
    pub fn text(&self, member: &Membership) -> String {
        match self {
            Failure::Outside(error) => error.to_string(),
            Failure::Connect(problem) | Failure::Refused(_, problem) => problem.clone(),
            Failure::Ended(rank) => {
                format!("the process of {} has ended", member.global.who(*rank))
            }
        }
    }

    /// The rank at fault, where one is known.
    pub fn culprit(&self) -> Option<Rank> {
        match self {
            Failure::Ended(rank) | Failure::Refused(rank, _) => Some(*rank),
            Failure::Outside(_) | Failure::Connect(_) => None,
        }
    }
}

/// The text of [`Failure::Connect`], with this rank's group and number before it.
pub(super) fn told(member: &Membership, problem: &str) -> String {
    format!("group {:?}, rank {}: {problem}", member.name, member.rank)
}
