//! Why ranks do not come together.

use drumline_engine::membership::Membership;
use drumline_error::{Error, ErrorKind, Section};
use drumline_schedule::step::Rank;

/// The rank of `member` could not be connected because of `problem`.
pub(crate) fn not_connected(member: &Membership, problem: &str) -> Error {
    unconnected(&member.name, member.rank, problem)
}

/// The same because of rank `peer`.
pub(crate) fn not_connected_to(member: &Membership, peer: Rank, problem: &str) -> Error {
    not_connected(member, &format!("{}: {problem}", member.global.who(peer)))
}

/// The same of rank `rank` of group `group`.
pub(crate) fn unconnected(group: &str, rank: Rank, problem: &str) -> Error {
    let text = format!("group {group:?}, rank {rank}: {problem}");
    Error::quoting(ErrorKind::Connect, Section::StartUp, text)
}

/// This rank, by its number in the whole job, is not a member of `group`.
pub(crate) fn not_a_member(group: &str, rank: Rank) -> Error {
    let text =
        format!("rank {rank} is not a member of group {group:?}: only its members call this");
    Error::new(ErrorKind::NotAMember, Section::NotAMember, text)
}
