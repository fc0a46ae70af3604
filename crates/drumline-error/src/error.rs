//! The error of all of Drumline.

use std::{any::Any, fmt, io, sync::Arc, time::Duration};

use drumline_schedule::step::Rank;

use crate::{Cause, ErrorOrigin, Reason, Section, spent};

/// The result of fallible functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call failed, which rank is at fault, and what to do next.
///
/// A program tells failures apart by [`kind`](Error::kind), and those of a group of ranks by [`cause`](Error::cause),
/// too. The text is for people. It ends with a command that tells more.
///
/// An error can be cloned, because a failed group returns its failure from every later call.
///
/// ```
/// use drumline::{Cause, ErrorKind, ProcessGroup, ReduceOp};
///
/// let group = ProcessGroup::alone();
/// // An argument that cannot be used: nothing has happened, and the group goes on.
/// let error = group.broadcast(&mut [1.0_f32], 3).unwrap_err();
/// assert_eq!((error.kind(), error.culprit()), (ErrorKind::Argument, None));
/// assert!(error.to_string().ends_with("(drumline explain argument)"), "{error}");
/// assert_eq!(format!("{error:?}"), error.to_string()); // what `unwrap` prints
/// group.all_reduce(&mut [1.0_f32], ReduceOp::Sum)?;
///
/// // A failure poisons the group: later calls repeat it.
/// group.abort();
/// let later = group.barrier().unwrap_err();
/// assert_eq!((later.kind(), later.culprit()), (ErrorKind::Poisoned, Some(0)));
/// assert_eq!(later.cause(), Some(&Cause::Aborted));
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone)]
pub struct Error(Box<Failure>);

#[derive(Clone)]
struct Failure {
    kind: ErrorKind,
    section: Section,
    origin: ErrorOrigin,
    culprit: Option<Rank>,
    cause: Option<Cause>,
    /// Without its section.
    message: String,
    detail: Option<Arc<dyn Any + Send + Sync>>,
}

/// The [detail](Error::detail) of [`ErrorKind::StoreTimeout`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingKeys {
    /// The keys that did not appear. Empty if the store does not know which.
    pub keys: Vec<String>,
    /// How long the call waited.
    pub waited: Duration,
}

/// What has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The caller's argument cannot be used. Nothing was sent to any peer.
    Argument,
    /// A setting from the environment, a URL or a builder is missing or wrong.
    Setting,
    /// A store answered wrongly, refused, or went away.
    Store,
    /// Keys did not appear in a store in time.
    StoreTimeout,
    /// The system refused a file, a socket, a process or a thread.
    Io,
    /// There is no more memory to register.
    Memory,
    /// The ranks of a group could not be connected with each other.
    Connect,
    /// This rank is not a member of the group. Nothing was sent to any peer.
    NotAMember,
    /// An object could not be described, is too long, or has another type than expected. The group goes on.
    Object,
    /// A collective failed. The group is poisoned: every later call fails.
    Collective,
    /// Another failure had poisoned the group before this call ended.
    Poisoned,
    /// A trace cannot be read.
    Trace,
    /// A device, or its driver, does not do what it should.
    Device,
    /// Ranks differ in what must be the same for all.
    Mismatch,
    /// A rank that this process has started has failed.
    Rank,
    /// Ranks were given different models. Every rank gets this error, with the same text.
    ModelsDiffer,
    /// A parameter does not have the same value on all ranks. Every rank gets this error, with the same text.
    ParametersDiffer,
    /// Gradients are missing or unusable, so a step cannot be averaged. Every rank gets this error (except for a
    /// gradient that was handed in again after all buckets were launched).
    Gradients,
    /// Tensors are missing in a step of an `AsyncReduce`. Every rank gets this error.
    NotBrought,
    /// A checkpoint cannot be written or read, or does not fit.
    Checkpoint,
    /// A model cannot be trained, or not in this way. All ranks get this error, or are told that this rank has.
    Model,
    /// The norm of all gradients is infinite or NaN, and the program has asked for an error then. Every rank gets it.
    NonFiniteNorm,
    /// This rank is well. The model of other ranks cannot be trained, and they get the reason as an error of its own.
    OtherRanks,
    /// Samples cannot be loaded.
    Data,
}

impl ErrorKind {
    /// Where errors of this kind come from, unless more is known.
    fn origin(self) -> ErrorOrigin {
        match self {
            ErrorKind::Store | ErrorKind::Device => ErrorOrigin::Surroundings,
            ErrorKind::StoreTimeout
            | ErrorKind::Connect
            | ErrorKind::Rank
            | ErrorKind::NotBrought
            | ErrorKind::OtherRanks => ErrorOrigin::Peer,
            _ => ErrorOrigin::User,
        }
    }
}

impl Error {
    /// What has failed.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The rank at fault, where one is known, by its number in the whole job.
    pub fn culprit(&self) -> Option<Rank> {
        self.0.culprit
    }

    /// Why the group of ranks has failed. Its ranks have their numbers in that group.
    pub fn cause(&self) -> Option<&Cause> {
        self.0.cause.as_ref()
    }

    /// The class of the [`cause`](Error::cause): the same on all ranks.
    pub fn reason(&self) -> Option<Reason> {
        self.cause().map(Cause::reason)
    }

    /// Where it comes from: whether another attempt makes sense.
    pub fn origin(&self) -> ErrorOrigin {
        self.0.origin
    }

    /// The section of the page of errors that explains it.
    pub fn section(&self) -> Section {
        self.0.section
    }

    /// What the part that has failed knows beside: its documentation names the type.
    pub fn detail<T: Any>(&self) -> Option<&T> {
        self.0.detail.as_deref()?.downcast_ref()
    }

    /// The text without the command that tells more.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The caller's argument of `operation` cannot be used. `problem` says what would be right.
    pub fn argument(operation: &str, problem: impl fmt::Display) -> Error {
        let message = format!("{operation}: {problem}");
        Error::quoting(ErrorKind::Argument, Section::Argument, message)
    }

    /// A setting from the environment, a URL or a builder is missing or wrong. `problem` says what would be right.
    pub fn setting(setting: &str, problem: impl fmt::Display) -> Error {
        let is_secret = setting.starts_with("DRUMLINE_SECRET");
        let section = if is_secret { Section::Secrets } else { Section::Settings };
        Error::quoting(ErrorKind::Setting, section, format!("{setting}: {problem}"))
    }

    /// A call to a store, such as `tcp://host:port`, failed. `operation` is the call, with its key.
    pub fn store(store: &str, operation: &str, problem: impl fmt::Display) -> Error {
        let message = format!("store {store}: {operation}: {problem}");
        Error::quoting(ErrorKind::Store, Section::Store, message)
    }

    /// A store has waited for `keys` in vain. They are its detail: [`MissingKeys`].
    pub fn missing_keys(store: &str, keys: Vec<String>, waited: Duration) -> Error {
        let message = format!(
            "store {store}: waited {} for {}; is every rank started, and with the same address and world size?",
            spent(waited),
            keys.join(", ")
        );
        Error::new(ErrorKind::StoreTimeout, Section::StartUp, message)
            .with(Arc::new(MissingKeys { keys, waited }))
    }

    /// This process tried `what`, and the system refused it.
    pub fn io(what: impl fmt::Display, error: impl Into<io::Error>) -> Error {
        let error = error.into();
        let told = Error::quoting(ErrorKind::Io, Section::Io, format!("{what}: {error}"));
        told.of_origin(ErrorOrigin::of_system(&error))
    }

    /// There is no more memory to register. `problem` says how much the caller asked for, and how much there is.
    #[doc(hidden)]
    pub fn memory(problem: impl fmt::Display) -> Error {
        let message = format!("{problem} (DRUMLINE_REGISTERED_BYTES_MAX sets the limit)");
        Error::new(ErrorKind::Memory, Section::Memory, message)
    }

    /// An error whose text has no section yet.
    #[doc(hidden)]
    pub fn new(kind: ErrorKind, section: Section, message: impl fmt::Display) -> Error {
        let (origin, message) = (kind.origin(), message.to_string());
        let (culprit, cause, detail) = (None, None, None);
        Error(Box::new(Failure { kind, section, origin, culprit, cause, message, detail }))
    }

    /// An error whose text may quote another one. That one's section tells more.
    #[doc(hidden)]
    pub fn quoting(kind: ErrorKind, section: Section, message: impl fmt::Display) -> Error {
        let message = message.to_string();
        match Section::split(&message) {
            Some((message, quoted)) => Error::new(kind, quoted.unwrap_or(section), message),
            None => Error::new(kind, section, message),
        }
    }

    /// The same error with another text and kind. Origin, culprit, cause and detail stay.
    #[doc(hidden)]
    #[must_use]
    pub fn told_as(&self, kind: ErrorKind, message: impl fmt::Display) -> Error {
        let Failure { section, message, .. } = *Error::quoting(kind, self.section(), message).0;
        Error(Box::new(Failure { kind, section, message, ..(*self.0).clone() }))
    }

    #[doc(hidden)]
    #[must_use]
    pub fn of_origin(mut self, origin: ErrorOrigin) -> Error {
        self.0.origin = origin;
        self
    }

    #[doc(hidden)]
    #[must_use]
    pub fn blaming(mut self, culprit: Option<Rank>) -> Error {
        self.0.culprit = culprit;
        self
    }

    #[doc(hidden)]
    #[must_use]
    pub fn because(mut self, cause: Option<Cause>) -> Error {
        self.0.cause = cause;
        self
    }

    #[doc(hidden)]
    #[must_use]
    pub fn with(mut self, detail: Arc<impl Any + Send + Sync>) -> Error {
        self.0.detail = Some(detail);
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.0.message, self.0.section)
    }
}

/// The text for users, which `unwrap` and a `main` that returns an error print.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {}
