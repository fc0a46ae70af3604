//! Why a job could not be started or watched.

use std::{fmt, io, path::PathBuf};

use drumline::{ErrorOrigin, Section, named};

/// The result of the fallible functions of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a job could not be started or watched. A failed rank is no error of the launcher: it decides
/// the exit code of `drumline run`.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The program to run is not there.
    #[error("program {} not found: {hint} {}", program.display(), Section::Program)]
    ProgramNotFound {
        /// The program, as the caller wrote it.
        program: PathBuf,
        /// Where the launcher looked for it, and what to do.
        hint: String,
    },

    /// The program to run is there but cannot be executed.
    #[error("program {} cannot be executed: {hint} {}", program.display(), Section::Program)]
    ProgramNotExecutable {
        /// The path of the program.
        program: PathBuf,
        /// Why, and what to do.
        hint: String,
    },

    /// The hosts of the job do not come together.
    #[error("{problem} {}", Section::SeveralHosts)]
    Meeting {
        /// Why, and what to do.
        problem: String,
    },

    /// It is not clear which launcher has started this process, or the launcher cannot help.
    #[error("{problem} {}", Section::ForeignLaunchers)]
    Foreign {
        /// Why, and what to do.
        problem: String,
    },

    /// The ranks of a foreign launcher do not come together.
    #[error("{problem} {}", Section::ForeignLaunchers)]
    NotAgreed {
        /// Why, and what to do.
        problem: String,
    },

    /// A store cannot be hosted or reached, or a setting of the environment is invalid.
    #[error(transparent)]
    Store(#[from] drumline::Error),

    /// A system call failed.
    #[error("{what}: {error} {}", Section::Io)]
    System {
        /// What the launcher tried.
        what: String,
        /// The system's error.
        error: io::Error,
    },
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    /// Where it comes from. After a mistake of the user, the job does not start again.
    ///
    /// ```
    /// use drumline::ErrorOrigin;
    /// use drumline_launch::Error;
    ///
    /// let mistake = drumline::Error::setting("DRUMLINE_SECRET", "a secret of 5 bytes");
    /// let mistake = Error::Store(mistake);
    /// assert_eq!((mistake.origin(), mistake.exit_code()), (ErrorOrigin::User, 2));
    ///
    /// let problem = "No route to host (os error 113)";
    /// let network = Error::Store(drumline::Error::store("tcp://10.0.0.1:29400", "connect", problem));
    /// assert_eq!((network.origin(), network.exit_code()), (ErrorOrigin::Surroundings, 1));
    /// ```
    pub fn origin(&self) -> ErrorOrigin {
        match self {
            Error::ProgramNotFound { .. }
            | Error::ProgramNotExecutable { .. }
            | Error::Foreign { .. } => ErrorOrigin::User,
            Error::Meeting { .. } | Error::NotAgreed { .. } => ErrorOrigin::Peer,
            Error::Store(error) => error.origin(),
            Error::System { error, .. } => ErrorOrigin::of_system(error),
        }
    }

    /// The exit code for this error: 126 and 127 as in a shell for programs that cannot be run, 2 for other mistakes of
    /// the user, else 1.
    pub fn exit_code(&self) -> u8 {
        match (self, self.origin()) {
            (Error::ProgramNotFound { .. }, _) => 127,
            (Error::ProgramNotExecutable { .. }, _) => 126,
            (_, ErrorOrigin::User) => 2,
            _ => 1,
        }
    }

    pub(crate) fn meeting(problem: impl Into<String>) -> Error {
        Error::Meeting { problem: problem.into() }
    }

    pub(crate) fn foreign(problem: impl Into<String>) -> Error {
        Error::Foreign { problem: problem.into() }
    }

    pub(crate) fn not_agreed(problem: impl Into<String>) -> Error {
        Error::NotAgreed { problem: problem.into() }
    }

    /// For `map_err`: makes an [`Error::System`] about `what`.
    pub(crate) fn system<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Error {
        |error| Error::System { what: what.into(), error: error.into() }
    }

    /// The same, about a system call that a container [may forbid](named).
    pub(crate) fn call<E: Into<io::Error>>(
        call: &'static str,
        what: impl Into<String>,
    ) -> impl FnOnce(E) -> Error {
        move |error| Error::system(what)(named(call)(error))
    }
}
