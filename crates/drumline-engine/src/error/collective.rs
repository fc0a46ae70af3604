//! The failure of a collective or of a message, and its cause.

use std::{fmt, sync::Arc, time::Duration};

use drumline_error::{Cause, Error, ErrorKind, ErrorOrigin, Reason};
use drumline_schedule::step::Rank;

use crate::membership::{GlobalRanks, Membership, SeenFailure};

/// A call that failed, and the rank at fault: the [detail](Error::detail) of an error of kind
/// [`Collective`](ErrorKind::Collective) or [`Poisoned`](ErrorKind::Poisoned).
///
/// ```
/// use drumline::{Cause, CollectiveError, ProcessGroup};
///
/// let group = ProcessGroup::alone();
/// group.barrier()?;
/// group.abort();
/// let error = group.barrier().unwrap_err();
/// let by = error.detail::<CollectiveError>().unwrap();
/// let CollectiveError { group, rank, cause, .. } = by;
/// assert_eq!((&group[..], *rank, cause), ("alone", 0, &Cause::Aborted));
/// assert_eq!(by.culprit().map(|rank| by.global_rank(rank)), Some(0));
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct CollectiveError {
    /// Name of the process group.
    pub group: String,
    /// The rank that reports the failure.
    pub rank: Rank,
    /// The numbers of the group's ranks in the whole job.
    pub global: GlobalRanks,
    /// The number of collectives that the group had called before. The same number on every rank means the
    /// same call.
    pub sequence: u64,
    /// The call as this rank made it: `all_reduce(sum) of 10 f32 [doubling]`.
    pub operation: String,
    /// Time since the call began.
    pub elapsed: Duration,
    /// What went wrong.
    pub cause: Cause,
    /// Whether the program has set the time limit of the call. If not, the environment or nobody has.
    pub(crate) is_own_limit: bool,
    /// Whether other ranks may have completed this call, or will: they have all that they need from this rank.
    pub(crate) is_open: bool,
}

impl CollectiveError {
    /// The failure of this rank's call number `sequence`.
    pub fn new(
        member: &Membership,
        sequence: u64,
        call: String,
        elapsed: Duration,
        cause: Cause,
    ) -> CollectiveError {
        let Membership { name, rank, global, .. } = member;
        let (group, rank, global) = (name.clone(), *rank, global.clone());
        let (is_own_limit, is_open) = (false, false);
        CollectiveError {
            group,
            rank,
            global,
            sequence,
            operation: call,
            elapsed,
            cause,
            is_own_limit,
            is_open,
        }
    }

    /// The number in the whole job of the group's rank `rank`.
    pub fn global_rank(&self, rank: Rank) -> Rank {
        self.global.of(rank)
    }

    /// The rank at fault, by its number in the group. `None` where no single rank is known to be.
    pub fn culprit(&self) -> Option<Rank> {
        match &self.cause {
            Cause::Aborted
            | Cause::Panicked { .. }
            | Cause::System { .. }
            | Cause::Device { .. } => Some(self.rank),
            cause => match cause.ranks()[..] {
                [rank] => Some(rank),
                _ => None,
            },
        }
    }

    /// The error of the call itself.
    pub fn error(self: &Arc<Self>) -> Error {
        self.as_error(ErrorKind::Collective, self.text())
    }

    /// The error of a later call, or of one that this failure has cut short: `attempted` did not happen.
    pub fn poisoned(self: &Arc<Self>, attempted: &str) -> Error {
        let text = self.text();
        let text = format!(
            "{attempted} did not happen, because the group is poisoned by an earlier failure: {text}"
        );
        self.as_error(ErrorKind::Poisoned, text)
    }

    fn as_error(self: &Arc<Self>, kind: ErrorKind, text: String) -> Error {
        let section = self.cause.section();
        let error = match self.cause {
            // The rank that reports has told the section.
            Cause::Reported { .. } => Error::quoting(kind, section, text),
            _ => Error::new(kind, section, text),
        };
        error
            .of_origin(self.origin())
            .blaming(self.culprit().map(|rank| self.global_rank(rank)))
            .because(Some(self.cause.clone()))
            .with(self.clone())
    }

    fn origin(&self) -> ErrorOrigin {
        match (&self.cause, self.cause.reason()) {
            (_, Reason::Mismatch) => ErrorOrigin::User,
            (Cause::Protocol { .. }, _) => ErrorOrigin::Bug,
            _ if self.culprit() == Some(self.rank) => ErrorOrigin::Surroundings,
            _ => ErrorOrigin::Peer,
        }
    }

    /// The same as other groups of this rank tell it, with the number of the culprit in the job.
    pub(crate) fn seen(&self) -> SeenFailure {
        let culprit = self.culprit().map(|rank| self.global.of(rank));
        SeenFailure { culprit, text: self.to_string() }
    }

    /// The text without its section.
    fn text(&self) -> String {
        let CollectiveError { group, rank, global, sequence, operation, elapsed, cause, .. } = self;
        let rank = global.who(*rank);
        // A call that never waits does not look at the clock.
        let after = match elapsed.is_zero() {
            true => "at once".to_owned(),
            false => format!("after {elapsed:.1?}"),
        };
        let mut text = format!(
            "group {group:?}, {rank}: {operation}, call #{sequence}, failed {after}: {cause}"
        );
        if let Cause::Timeout { .. } = cause {
            text += &format!(" ({})", limit_of(self.is_own_limit));
            if self.is_open {
                text += "; whether other ranks complete this call cannot be known";
            }
        }
        let differ = cause.named().into_iter().filter(|&rank| global.of(rank) != rank);
        let differ: Vec<String> =
            differ.map(|rank| format!("rank {rank} is global rank {}", global.of(rank))).collect();
        if !differ.is_empty() {
            text += &format!(" ({})", differ.join(", "));
        }
        text
    }
}

impl fmt::Display for CollectiveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.cause {
            Cause::Reported { .. } => f.write_str(&self.text()), // the text of the other rank has the section
            _ => write!(f, "{} {}", self.text(), self.cause.section()),
        }
    }
}

impl fmt::Debug for CollectiveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Who has set a time limit.
pub(crate) fn limit_of(is_own: bool) -> &'static str {
    match is_own {
        true => "this limit is the timeout that the program gives",
        false => "DRUMLINE_TIMEOUT_S is the limit where the program gives none",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(elapsed: Duration, cause: Cause) -> String {
        let member = Membership::new("world", (0, 2), GlobalRanks::default());
        CollectiveError::new(&member, 3, "barrier".into(), elapsed, cause).to_string()
    }

    #[test]
    fn a_call_that_never_waited_failed_at_once() {
        let told = text(Duration::ZERO, Cause::PeerExited { peer: 1 });
        assert!(told.contains("call #3, failed at once: the process of rank 1"), "{told}");
        let told = text(Duration::from_millis(2), Cause::PeerExited { peer: 1 });
        assert!(told.contains("call #3, failed after 2.0ms: the process of rank 1"), "{told}");
    }

    #[test]
    fn an_error_ends_with_its_place_in_the_book() {
        let own = text(Duration::ZERO, Cause::Aborted);
        assert!(own.ends_with(" (drumline explain aborted)"), "{own}");
        // One that another rank reports says it once.
        let reported = text(
            Duration::ZERO,
            Cause::Reported { by: 1, culprit: None, reason: Reason::Other, text: own },
        );
        assert_eq!(reported.matches("drumline explain").count(), 1, "{reported}");
    }
}
