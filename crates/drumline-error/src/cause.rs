//! Why a collective or a message failed.

use std::fmt;

use drumline_schedule::step::Rank;

use crate::Section;

/// Why a call failed.
///
/// ```
/// use drumline::{Cause, ProcessGroup, ReduceOp};
///
/// std::thread::scope(|threads| {
///     for group in drumline::rendezvous::local_world(2)? {
///         threads.spawn(move || {
///             let called = match group.rank() {
///                 0 => group.all_reduce(&mut [1.0_f32; 8], ReduceOp::Sum),
///                 _ => group.all_reduce(&mut [1.0_f32; 9], ReduceOp::Sum),
///             };
///             match called.unwrap_err().cause().unwrap() {
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
    /// The connection to a peer broke, although the peer's process lives. Or nobody can tell whether it does.
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
    /// What a program can tell causes apart by: `peer_exited`. `drumline explain` knows it.
    pub fn name(&self) -> &'static str {
        self.section().name()
    }

    /// The section of the page of errors that explains it.
    pub fn section(&self) -> Section {
        match self {
            Cause::PeerExited { .. } => Section::PeerExited,
            Cause::PeerLeft { .. } => Section::PeerLeft,
            Cause::NobodyLeft { .. } => Section::NobodyLeft,
            Cause::HostSilent { .. } => Section::HostSilent,
            Cause::Disconnected { .. } => Section::Disconnected,
            Cause::Unreachable { .. } => Section::Unreachable,
            Cause::Reported { .. } => Section::Reported,
            Cause::Aborted => Section::Aborted,
            Cause::Panicked { .. } => Section::Panicked,
            Cause::System { .. } => Section::System,
            Cause::Device { .. } => Section::Device,
            Cause::Mismatch { .. } => Section::Mismatch,
            Cause::Timeout { .. } => Section::Timeout,
            Cause::Backend { .. } => Section::Backend,
            Cause::Protocol { .. } => Section::Protocol,
        }
    }

    /// The other ranks that are known to be at fault.
    pub fn ranks(&self) -> Vec<Rank> {
        match self {
            Cause::PeerExited { peer }
            | Cause::PeerLeft { peer }
            | Cause::HostSilent { peer }
            | Cause::Unreachable { peer, .. }
            | Cause::Protocol { peer, .. } => vec![*peer],
            Cause::NobodyLeft { left, unreachable } if unreachable.is_empty() => left.clone(),
            Cause::NobodyLeft { unreachable, .. } => {
                unreachable.iter().map(|(peer, _)| *peer).collect()
            }
            Cause::Reported { culprit, .. } => culprit.iter().copied().collect(),
            Cause::Timeout { waiting_for } => waiting_for.clone(),
            Cause::Disconnected { .. }
            | Cause::Mismatch { .. }
            | Cause::Aborted
            | Cause::Panicked { .. }
            | Cause::System { .. }
            | Cause::Device { .. }
            | Cause::Backend { .. } => vec![],
        }
    }

    /// The ranks that this rank has lost, so that it can go on without them: they have ended, do not answer, or have
    /// failed by themselves. It may not know which: then there are none. `None` for all other failures: of this rank, or of
    /// a program in which ranks disagree.
    pub fn lost(&self) -> Option<Vec<Rank>> {
        match self {
            Cause::PeerExited { .. }
            | Cause::PeerLeft { .. }
            | Cause::HostSilent { .. }
            | Cause::Disconnected { .. }
            | Cause::Unreachable { .. }
            | Cause::Timeout { .. } => Some(self.ranks()),
            Cause::Reported { reason, .. } => (*reason != Reason::Mismatch).then(|| self.ranks()),
            Cause::NobodyLeft { .. }
            | Cause::Aborted
            | Cause::Panicked { .. }
            | Cause::System { .. }
            | Cause::Device { .. }
            | Cause::Mismatch { .. }
            | Cause::Backend { .. }
            | Cause::Protocol { .. } => None,
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
    #[doc(hidden)]
    pub fn named(&self) -> Vec<Rank> {
        match self {
            Cause::Disconnected { peer, .. }
            | Cause::Mismatch { peer, .. }
            | Cause::Reported { by: peer, .. } => vec![*peer],
            cause => cause.ranks(),
        }
    }

    /// `peer` called `theirs` where this rank called `ours`. `None`: that call is too long ago.
    #[doc(hidden)]
    pub fn mismatch(peer: Rank, theirs: impl fmt::Debug, ours: Option<impl fmt::Debug>) -> Cause {
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

/// `rank 1`, or `ranks 1, 2`.
struct Ranks<'a>(&'a [Rank]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        let s = if numbers.len() == 1 { "" } else { "s" };
        write!(f, "rank{s} {}", numbers.join(", "))
    }
}
