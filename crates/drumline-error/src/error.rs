//! The error of all of Drumline.

use std::{any::Any, fmt, io, sync::Arc};

use drumline_schedule::step::Rank;

use crate::{Cause, ErrorOrigin, Reason, Section};

/// The result of fallible functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call failed, which rank is at fault, and what to do next.
///
/// A program tells failures apart by [`kind`](Error::kind), and those of a group of ranks by [`cause`](Error::cause),
/// too. The text is for people. It ends with a command that tells more.
///
/// ```
/// use drumline::{sampler::DistributedSampler, train::ErrorKind};
///
/// let error = DistributedSampler::builder(100, 2, 2).build().unwrap_err();
/// assert_eq!((error.kind(), error.culprit()), (ErrorKind::Argument, None));
/// assert!(error.to_string().ends_with("(drumline explain argument)"), "{error}");
/// assert_eq!(format!("{error:?}"), error.to_string()); // what `unwrap` prints
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
    /// With its section.
    text: String,
    detail: Option<Arc<dyn Any + Send + Sync>>,
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
    /// Gradients are missing or unusable, so a step cannot be averaged. Every rank gets this error (except for a gradient
    /// that was handed in again after all buckets were launched).
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

    /// An error whose text has no section yet.
    #[doc(hidden)]
    pub fn new(kind: ErrorKind, section: Section, text: impl fmt::Display) -> Error {
        let text = format!("{text} {section}");
        let (culprit, cause, detail) = (None, None, None);
        let origin = kind.origin();
        Error(Box::new(Failure { kind, section, origin, culprit, cause, text, detail }))
    }

    /// An error whose text may quote another one. That one's section tells more.
    #[doc(hidden)]
    pub fn quoting(kind: ErrorKind, section: Section, text: impl fmt::Display) -> Error {
        let text = text.to_string();
        match Section::split(&text) {
            Some((text, quoted)) => Error::new(kind, quoted.unwrap_or(section), text),
            None => Error::new(kind, section, text),
        }
    }

    /// The caller's argument of `operation` cannot be used.
    #[doc(hidden)]
    pub fn argument(operation: &str, problem: impl fmt::Display) -> Error {
        let text = format!("{operation}: {problem}");
        Error::quoting(ErrorKind::Argument, Section::Argument, text)
    }

    /// This process tried `what`, and the system refused it.
    #[doc(hidden)]
    pub fn io(what: impl fmt::Display, error: &io::Error) -> Error {
        let told = Error::quoting(ErrorKind::Io, Section::Io, format!("{what}: {error}"));
        told.of_origin(ErrorOrigin::of_system(error))
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
    pub fn with(mut self, detail: impl Any + Send + Sync) -> Error {
        self.0.detail = Some(Arc::new(detail));
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.text)
    }
}

/// The text for users, which `unwrap` and a `main` that returns an error print.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {}
