//! Why a call failed, which rank is at fault, and what to do next.

use std::{fmt, io, path::PathBuf, sync::Arc, time::Duration};

use drumline_engine::{Cause, CollectiveError, Reason, membership::Membership};
use drumline_error::{ErrorKind, ErrorOrigin, Section, in_section, of_setting, spent};
use drumline_schedule::step::Rank;

/// The result of the fallible functions of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call failed, which rank is at fault, and what to do next.
///
/// An error can be cloned, because a failed group returns its failure from every later call.
///
/// ```
/// # use drumline_group as drumline;
/// use drumline::{Error, ProcessGroup, ReduceOp};
///
/// let [group] = ProcessGroup::local_world(1)?.try_into().expect("one rank");
/// // An argument that cannot be used: nothing has happened, and the group goes on.
/// let error = group.broadcast(&mut [1.0_f32], 3).unwrap_err();
/// assert!(matches!(error, Error::InvalidArgument { operation: "broadcast", .. }));
/// group.all_reduce(&mut [1.0_f32], ReduceOp::Sum)?;
///
/// // A failure poisons the group: later calls repeat it.
/// group.abort();
/// let later = group.barrier().unwrap_err();
/// assert!(matches!(&later, Error::Poisoned { attempted: "barrier", .. }), "{later}");
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The caller's argument cannot be used. Nothing was sent to any peer.
    #[error("{}", in_section(Section::Argument, &format!("{operation}: {problem}")))]
    InvalidArgument {
        /// The function that was called.
        operation: &'static str,
        /// What is wrong, and what would be right.
        problem: String,
    },

    /// A setting from the environment, a URL or a builder is missing or wrong.
    #[error("{}", of_setting(setting, problem))]
    InvalidSetting {
        /// The variable, URL or field.
        setting: String,
        /// What is wrong, and what would be right.
        problem: String,
    },

    /// A store answered wrongly, refused, or went away.
    #[error("{}", in_section(Section::Store, &format!("store {store}: {operation}: {problem}")))]
    Store {
        /// Which store: `tcp://host:port`, `hash`.
        store: String,
        /// The call, with its key.
        operation: String,
        /// What happened.
        problem: String,
    },

    /// Keys did not appear in a store in time.
    #[error(
        "store {store}: waited {} for {}; is every rank started, and with the same address and world \
         size? {}", spent(*waited), keys.join(", "), Section::StartUp)]
    StoreTimeout {
        /// Which store.
        store: String,
        /// The keys that are still missing.
        keys: Vec<String>,
        /// How long the call waited.
        waited: Duration,
    },

    /// A file or socket operation failed.
    #[error("{}", in_section(Section::Io, &format!("{what}: {error}")))]
    Io {
        /// What this rank tried, with the path or address.
        what: String,
        /// The system's error.
        error: Arc<io::Error>,
    },

    /// There is no more memory to register.
    #[error("{problem} (DRUMLINE_REGISTERED_BYTES_MAX sets the limit) {}", Section::Memory)]
    Memory {
        /// How much the caller asked for, and how much there is.
        problem: String,
    },

    /// The ranks of a group could not be connected with each other.
    #[error("{}", in_section(Section::StartUp, &format!("group {group:?}, rank {rank}: {problem}")))]
    Connect {
        /// Name of the group.
        group: String,
        /// The rank that reports.
        rank: usize,
        /// Which rank is missing or refused, and what to look at.
        problem: String,
        /// The rank whose process has ended, if that is why, by its number in the whole job.
        culprit: Option<usize>,
    },

    /// This rank is not a member of the group. Nothing was sent to any peer.
    #[error(
        "rank {rank} is not a member of group {group:?}: only its members call this \
         {}",
        Section::NotAMember
    )]
    NotAMember {
        /// Name of the group.
        group: String,
        /// This rank, by its number in the whole job.
        rank: usize,
    },

    /// An object could not be described, is too long, or has another type than expected. The group goes on.
    #[error("{}", in_section(Section::Objects, &format!("{operation}: rank {rank} {problem}")))]
    Object {
        /// The call.
        operation: &'static str,
        /// The rank whose object or call it is.
        rank: usize,
        /// What is wrong with it, and what to do.
        problem: String,
    },

    /// A collective failed. The group is poisoned: every later call fails.
    #[error(transparent)]
    Collective(Arc<CollectiveError>),

    /// Another failure had poisoned the group before this call ended.
    #[error(
        "{attempted} did not happen, because the group is poisoned by an earlier failure: {by}"
    )]
    Poisoned {
        /// The call.
        attempted: &'static str,
        /// The failure.
        by: Arc<CollectiveError>,
    },

    /// The trace of a rank cannot be read.
    #[error("trace {}{place}: {problem} {}", path.display(), Section::Traces)]
    Trace {
        /// The file, or the directory.
        path: PathBuf,
        /// `, line 7`, or nothing.
        place: String,
        /// What is wrong with it.
        problem: String,
    },
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    /// Where it comes from: whether another attempt makes sense.
    pub fn origin(&self) -> ErrorOrigin {
        match self {
            Error::Store { .. } => ErrorOrigin::Surroundings,
            Error::Io { error, .. } => ErrorOrigin::of_system(error),
            Error::StoreTimeout { .. } | Error::Connect { .. } => ErrorOrigin::Peer,
            Error::Collective(failure) | Error::Poisoned { by: failure, .. } => {
                match failure.cause.reason() {
                    Reason::Mismatch => ErrorOrigin::User,
                    _ if matches!(failure.cause, Cause::Protocol { .. }) => ErrorOrigin::Bug,
                    _ if failure.culprit() == Some(failure.rank) => ErrorOrigin::Surroundings,
                    _ => ErrorOrigin::Peer,
                }
            }
            _ => ErrorOrigin::User,
        }
    }

    /// An [`Error::Io`]: this rank tried `what`, and the system returned `error`.
    pub(crate) fn io(what: impl Into<String>, error: io::Error) -> Error {
        Error::Io { what: what.into(), error: Arc::new(error) }
    }

    /// An [`Error::Connect`]: the rank of `member` could not be connected because of `problem`.
    pub(crate) fn connect(member: &Membership, problem: String) -> Error {
        let (group, rank) = (member.name.clone(), member.rank);
        Error::Connect { group, rank, problem, culprit: None }
    }

    /// The rank at fault, where one is known, by its number in the whole job.
    pub fn culprit(&self) -> Option<usize> {
        match self {
            Error::Connect { culprit, .. } => *culprit,
            Error::Collective(failure) | Error::Poisoned { by: failure, .. } => {
                failure.culprit().map(|rank| failure.global_rank(rank))
            }
            _ => None,
        }
    }

    /// [`Error::connect`] because of rank `peer`.
    pub(crate) fn connect_to(member: &Membership, peer: Rank, problem: &str) -> Error {
        Error::connect(member, format!("{}: {problem}", member.global.who(peer)))
    }
}

impl From<drumline_engine::Error> for Error {
    fn from(error: drumline_engine::Error) -> Error {
        use drumline_engine::Error as Engine;
        match error {
            Engine::InvalidArgument { operation, problem } => {
                Error::InvalidArgument { operation, problem }
            }
            Engine::InvalidSetting { setting, problem } => {
                Error::InvalidSetting { setting, problem }
            }
            Engine::Io { what, error } => Error::Io { what, error },
            Engine::Memory { problem } => Error::Memory { problem },
            Engine::Collective(failure) => Error::Collective(failure),
            Engine::Poisoned { attempted, by } => Error::Poisoned { attempted, by },
        }
    }
}

impl From<drumline_trace::Error> for Error {
    fn from(error: drumline_trace::Error) -> Error {
        use drumline_trace::Error as Traced;
        match error {
            Traced::InvalidSetting { setting, problem } => {
                Error::InvalidSetting { setting, problem }
            }
            Traced::Trace { path, place, problem } => Error::Trace { path, place, problem },
            Traced::Store(error) => error.into(),
        }
    }
}

impl From<drumline_store::Error> for Error {
    fn from(error: drumline_store::Error) -> Error {
        use drumline_store::Error as Store;
        match error {
            Store::InvalidArgument { operation, problem } => {
                Error::InvalidArgument { operation, problem }
            }
            Store::InvalidSetting { setting, problem } => {
                Error::InvalidSetting { setting, problem }
            }
            Store::Store { store, operation, problem } => {
                Error::Store { store, operation, problem }
            }
            Store::StoreTimeout { store, keys, waited } => {
                Error::StoreTimeout { store, keys, waited }
            }
            Store::Io { what, error } => Error::Io { what, error },
        }
    }
}

impl From<Error> for drumline_error::Error {
    fn from(error: Error) -> drumline_error::Error {
        let kind = match &error {
            Error::InvalidArgument { .. } => ErrorKind::Argument,
            Error::InvalidSetting { .. } => ErrorKind::Setting,
            Error::Store { .. } => ErrorKind::Store,
            Error::StoreTimeout { .. } => ErrorKind::StoreTimeout,
            Error::Io { .. } => ErrorKind::Io,
            Error::Memory { .. } => ErrorKind::Memory,
            Error::Connect { .. } => ErrorKind::Connect,
            Error::NotAMember { .. } => ErrorKind::NotAMember,
            Error::Object { .. } => ErrorKind::Object,
            Error::Collective(_) => ErrorKind::Collective,
            Error::Poisoned { .. } => ErrorKind::Poisoned,
            Error::Trace { .. } => ErrorKind::Trace,
        };
        let cause = match &error {
            Error::Collective(failure) | Error::Poisoned { by: failure, .. } => {
                Some(failure.cause.clone())
            }
            _ => None,
        };
        drumline_error::Error::quoting(kind, Section::Reported, &error)
            .of_origin(error.origin())
            .blaming(error.culprit())
            .because(cause)
    }
}
