//! Why a call failed, which end is at fault, and what to do next.

use std::{fmt, io, sync::Arc, time::Duration};

use drumline_error::{ErrorKind, ErrorOrigin, Section, in_section, of_setting, spent};

/// The result of the fallible functions of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call to a store, or a connection, failed.
///
/// ```
/// # use drumline_store as drumline;
/// use std::time::Duration;
///
/// use drumline::store::{Error, HashStore, Store};
///
/// let error = HashStore::new().wait(&["never"], Duration::ZERO).unwrap_err();
/// assert!(matches!(&error, Error::StoreTimeout { keys, .. } if keys == &["never"]), "{error}");
/// ```
#[derive(Clone, thiserror::Error)]
pub enum Error {
    /// The caller's argument cannot be used. Nothing was sent.
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
        /// What this process tried, with the path or address.
        what: String,
        /// The system's error.
        error: Arc<io::Error>,
    },
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    /// Where it comes from.
    pub fn origin(&self) -> ErrorOrigin {
        match self {
            Error::InvalidArgument { .. } | Error::InvalidSetting { .. } => ErrorOrigin::User,
            Error::Store { .. } => ErrorOrigin::Surroundings,
            Error::StoreTimeout { .. } => ErrorOrigin::Peer,
            Error::Io { error, .. } => ErrorOrigin::of_system(error),
        }
    }

    /// An [`Error::Io`]: this process tried `what`, and the system returned `error`.
    pub fn io(what: impl Into<String>, error: io::Error) -> Error {
        Error::Io { what: what.into(), error: Arc::new(error) }
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
        };
        drumline_error::Error::quoting(kind, Section::Store, &error).of_origin(error.origin())
    }
}
