//! The failure of a collective or of a message, and its cause.

use std::{fmt, time::Duration};

use drumline_schedule::step::Rank;

use crate::membership::{GlobalRanks, Membership, SeenFailure};

/// A call that failed, and the rank at fault.
///
/// ```
/// use drumline::{Cause, CollectiveError, Error, ProcessGroup};
///
/// let group = ProcessGroup::alone();
/// group.barrier()?;
/// group.abort();
/// let Err(Error::Poisoned { by, .. }) = group.barrier() else { panic!() };
/// let CollectiveError { group, rank, sequence, cause, .. } = &*by;
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

    /// The same as other groups of this rank tell it, with the number of the culprit in the job.
    pub(crate) fn seen(&self) -> SeenFailure {
        let culprit = self.culprit().map(|rank| self.global.of(rank));
        SeenFailure { culprit, text: self.to_string() }
    }
}

impl fmt::Display for CollectiveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CollectiveError { group, rank, global, sequence, operation, elapsed, cause, .. } = self;
        write!(
            f,
            "group {group:?}, {}: {operation}, call #{sequence}, failed ",
            global.who(*rank)
        )?;
        // A call that never waits does not look at the clock.
        match elapsed.is_zero() {
            true => write!(f, "at once: {cause}")?,
            false => write!(f, "after {elapsed:.1?}: {cause}")?,
        }
        if let Cause::Timeout { .. } = cause {
            write!(f, " ({})", limit_of(self.is_own_limit))?;
            if self.is_open {
                f.write_str("; whether other ranks complete this call cannot be known")?;
            }
        }
        let differ = cause.named().into_iter().filter(|&rank| global.of(rank) != rank);
        let differ: Vec<String> =
            differ.map(|rank| format!("rank {rank} is global rank {}", global.of(rank))).collect();
        if !differ.is_empty() {
            write!(f, " ({})", differ.join(", "))?;
        }
        match cause {
            Cause::Reported { .. } => Ok(()), // the text of the other rank has it
            _ => write!(f, " [errors.md#{}]", cause.name()),
        }
    }
}

impl fmt::Debug for CollectiveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for CollectiveError {}

/// Why a call failed.
///
/// ```
/// use drumline::{Cause, Error, ProcessGroup, ReduceOp};
///
/// std::thread::scope(|threads| {
///     for group in ProcessGroup::local_world(2)? {
///         threads.spawn(move || {
///             let called = match group.rank() {
///                 0 => group.all_reduce(&mut [1.0_f32; 8], ReduceOp::Sum),
///                 _ => group.all_reduce(&mut [1.0_f32; 9], ReduceOp::Sum),
///             };
///             let Err(Error::Collective(error)) = called else { panic!() };
///             match &error.cause {
///                 Cause::Mismatch { peer, theirs, ours } => {
///                     assert_ne!(*peer, group.rank());
///                     assert!(theirs.contains("of 8 f32") != ours.contains("of 8 f32"));
///                 }
///                 Cause::Reported { by, .. } => assert_ne!(*by, group.rank()), // that rank saw it first
///                 other => panic!("{other}"),
///             }
///         });
///     }
///     Ok::<_, drumline::Error>(())
/// })?;
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cause {
    /// The peer's process has ended without taking leave of the group.
    PeerExited {
        /// That peer.
        peer: Rank,
    },
    /// The peer has closed the group in good order while this rank still needs the peer.
    PeerLeft {
        /// That peer.
        peer: Rank,
    },
    /// A receive from any rank waits, but no peer is left that could send.
    NobodyLeft {
        /// The ranks that have closed the group in good order.
        left: Vec<Rank>,
        /// The ranks that could not be connected, each with address and reason. They had left or ended.
        unreachable: Vec<(Rank, String)>,
    },
    /// The peer's host does not answer: the host has crashed, or the network is broken. A stopped or slow
    /// process on a living host does not count: its host answers.
    HostSilent {
        /// The rank on that host.
        peer: Rank,
    },
    /// The connection to a peer broke, although the peer's process seems to live.
    Disconnected {
        /// That peer.
        peer: Rank,
        /// The system's error.
        problem: String,
    },
    /// This rank could not connect to a peer on another host when it first needed the peer.
    Unreachable {
        /// That peer.
        peer: Rank,
        /// The address, the reason, and what to do.
        problem: String,
    },
    /// A peer failed first and reports its error.
    Reported {
        /// The rank that reports.
        by: Rank,
        /// The rank at fault, if the reporting rank knows.
        culprit: Option<Rank>,
        /// The class of its error.
        reason: Reason,
        /// The error of the reporting rank.
        text: String,
    },
    /// This rank has aborted the group.
    Aborted,
    /// A call of this rank has panicked, in the caller's type of buffer or in the caller's operator.
    Panicked {
        /// The message of the panic.
        text: String,
    },
    /// The operating system has refused something that this rank needs to communicate with its peers.
    System {
        /// What failed, and the system's error.
        problem: String,
    },
    /// The accelerator of this rank cannot do its part.
    Device {
        /// What its driver says.
        problem: String,
    },
    /// Ranks made different calls.
    Mismatch {
        /// The rank whose message revealed it.
        peer: Rank,
        /// The call of that rank, with its sequence number.
        theirs: String,
        /// The call of this rank, with its sequence number. Empty where it is too long ago.
        ours: String,
    },
    /// The deadline has passed.
    Timeout {
        /// The ranks that did not answer. A rank that said in time that it waits itself is not listed;
        /// the ranks that it waits for are.
        waiting_for: Vec<Rank>,
    },
    /// The backend of the group has failed in a way of its own.
    Backend {
        /// The backend's own words.
        problem: String,
    },
    /// A peer sent something that no correct peer sends.
    Protocol {
        /// That peer.
        peer: Rank,
        /// What it sent.
        problem: String,
    },
}

/// The class of a failure. Every rank knows it, the rank that finds the failure and those that it tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// [`Cause::Timeout`].
    Timeout,
    /// [`Cause::Mismatch`].
    Mismatch,
    /// Any other cause.
    Other,
}

impl Reason {
    /// The byte of this reason in messages between ranks.
    pub fn code(self) -> u8 {
        match self {
            Reason::Other => 0,
            Reason::Timeout => 1,
            Reason::Mismatch => 2,
        }
    }

    /// The reason of a byte; [`Reason::Other`] for bytes that no reason has.
    pub fn from_code(code: u8) -> Reason {
        match code {
            1 => Reason::Timeout,
            2 => Reason::Mismatch,
            _ => Reason::Other,
        }
    }
}

impl Cause {
    /// What a program can tell causes apart by: `peer_exited`. The page of errors in the book has a section
    /// of this name.
    pub fn name(&self) -> &'static str {
        match self {
            Cause::PeerExited { .. } => "peer_exited",
            Cause::PeerLeft { .. } => "peer_left",
            Cause::NobodyLeft { .. } => "nobody_left",
            Cause::HostSilent { .. } => "host_silent",
            Cause::Disconnected { .. } => "disconnected",
            Cause::Unreachable { .. } => "unreachable",
            Cause::Reported { .. } => "reported",
            Cause::Aborted => "aborted",
            Cause::Panicked { .. } => "panicked",
            Cause::System { .. } => "system",
            Cause::Device { .. } => "device",
            Cause::Mismatch { .. } => "mismatch",
            Cause::Timeout { .. } => "timeout",
            Cause::Backend { .. } => "backend",
            Cause::Protocol { .. } => "protocol",
        }
    }

    /// The other ranks that are known to be at fault.
    pub fn ranks(&self) -> Vec<Rank> {
        match self {
            Cause::PeerExited { peer }
            | Cause::PeerLeft { peer }
            | Cause::HostSilent { peer }
            | Cause::Disconnected { peer, .. }
            | Cause::Unreachable { peer, .. }
            | Cause::Protocol { peer, .. } => vec![*peer],
            Cause::NobodyLeft { left, unreachable } if unreachable.is_empty() => left.clone(),
            Cause::NobodyLeft { unreachable, .. } => {
                unreachable.iter().map(|(peer, _)| *peer).collect()
            }
            Cause::Reported { culprit, .. } => culprit.iter().copied().collect(),
            Cause::Timeout { waiting_for } => waiting_for.clone(),
            Cause::Mismatch { .. }
            | Cause::Aborted
            | Cause::Panicked { .. }
            | Cause::System { .. }
            | Cause::Device { .. }
            | Cause::Backend { .. } => vec![],
        }
    }

    /// The class of the failure: the same on this rank and on those that it tells. Chance decides which
    /// rank is the first, for example at a time limit.
    pub fn reason(&self) -> Reason {
        match self {
            Cause::Timeout { .. } => Reason::Timeout,
            Cause::Mismatch { .. } => Reason::Mismatch,
            Cause::Reported { reason, .. } => *reason,
            _ => Reason::Other,
        }
    }

    /// The other ranks that the error text names, at fault or not.
    fn named(&self) -> Vec<Rank> {
        match self {
            Cause::Mismatch { peer, .. } | Cause::Reported { by: peer, .. } => vec![*peer],
            cause => cause.ranks(),
        }
    }

    /// `peer` called `theirs` where this rank called `ours`. `None`: that call is too long ago.
    pub(crate) fn mismatch(
        peer: Rank,
        theirs: impl fmt::Debug,
        ours: Option<impl fmt::Debug>,
    ) -> Cause {
        let ours = ours.map(|ours| format!("{ours:?}")).unwrap_or_default();
        Cause::Mismatch { peer, theirs: format!("{theirs:?}"), ours }
    }
}

impl fmt::Debug for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cause::PeerExited { peer } => write!(
                f,
                "the process of rank {peer} has ended; look at what rank {peer} printed last, \
                 then restart from a checkpoint"
            ),
            Cause::PeerLeft { peer } => write!(
                f,
                "rank {peer} has closed the group and will not take part; it made fewer calls \
                 than this rank"
            ),
            Cause::NobodyLeft { left, unreachable } => {
                f.write_str("nobody is left to send")?;
                if !left.is_empty() {
                    write!(f, "; {} closed the group", Ranks(left))?;
                }
                unreachable.iter().try_for_each(|(peer, problem)| {
                    write!(f, "; cannot connect to rank {peer} {problem}")
                })
            }
            Cause::HostSilent { peer } => write!(
                f,
                "the host of rank {peer} does not answer; it has crashed or was switched off, or \
                 the network to it is broken"
            ),
            Cause::Disconnected { peer, problem } => {
                write!(f, "the connection to rank {peer} broke: {problem}")
            }
            Cause::Unreachable { peer, problem } => {
                write!(f, "cannot connect to rank {peer} {problem}")
            }
            Cause::Reported { by, text, .. } => write!(f, "rank {by} reports: {text}"),
            Cause::Backend { problem } => write!(f, "the backend says: {problem}"),
            Cause::Aborted => f.write_str("this rank has aborted the group"),
            Cause::Panicked { text } => write!(f, "a call of this rank has panicked: {text}"),
            Cause::System { problem } => write!(
                f,
                "the system of this rank refuses what it needs: {problem}; look at its limits of memory \
                 and descriptors"
            ),
            Cause::Device { problem } => write!(f, "the device of this rank has failed: {problem}"),
            Cause::Mismatch { peer, theirs, ours } if ours.is_empty() => write!(
                f,
                "ranks disagree: rank {peer} called {theirs}, and this rank something else; \
                 all ranks must make the same calls in the same order"
            ),
            Cause::Mismatch { peer, theirs, ours } => write!(
                f,
                "ranks disagree: rank {peer} called {theirs}, this rank called {ours}; \
                 all ranks must make the same calls in the same order"
            ),
            Cause::Timeout { waiting_for } => write!(
                f,
                "the time limit has passed without an answer from {}; they are stuck, \
                 slow or in another call",
                Ranks(waiting_for)
            ),
            Cause::Protocol { peer, problem } => write!(
                f,
                "rank {peer} {problem}; do all ranks run the same release of the program?"
            ),
        }
    }
}

/// Who has set a time limit.
pub(crate) fn limit_of(is_own: bool) -> &'static str {
    match is_own {
        true => "this limit is the timeout that the program gives",
        false => "DRUMLINE_TIMEOUT_S is the limit where the program gives none",
    }
}

/// `rank 1`, or `ranks 1, 2`.
struct Ranks<'a>(&'a [Rank]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        let s = if numbers.len() == 1 { "" } else { "s" };
        write!(f, "rank{s} {}", numbers.join(", "))
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
        assert!(own.ends_with(" [errors.md#aborted]"), "{own}");
        // One that another rank reports says it once.
        let reported = text(
            Duration::ZERO,
            Cause::Reported { by: 1, culprit: None, reason: Reason::Other, text: own },
        );
        assert_eq!(reported.matches("errors.md").count(), 1, "{reported}");
    }
}
