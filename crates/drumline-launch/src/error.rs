use std::{io, path::PathBuf};

/// What every fallible function of this crate returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a job could not be started or watched. What its ranks do wrong is not an error of the
/// launcher: it is the exit code of `drumline run`.
///
/// ```
/// use drumline_launch::Error;
///
/// let error = Error::ProgramNotFound { program: "trian".into(), hint: "is it in PATH?".into() };
/// assert_eq!(error.to_string(), "program trian not found: is it in PATH?");
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The program to run is not there.
    #[error("program {} not found: {hint}", program.display())]
    ProgramNotFound {
        /// As the caller wrote it.
        program: PathBuf,
        /// Where we looked, and what to do.
        hint: String,
    },

    /// The program to run is there but cannot be executed.
    #[error("program {} cannot be executed: {hint}", program.display())]
    ProgramNotExecutable {
        /// Where it is.
        program: PathBuf,
        /// Why, and what to do.
        hint: String,
    },

    /// A store cannot be hosted, most likely because its port is in use, or the secret of the
    /// environment is none.
    #[error(transparent)]
    Store(#[from] drumline::Error),

    /// The trace of a job cannot be read, or merged.
    #[error(transparent)]
    Trace(drumline::Error),

    /// A setting of the environment keeps everything from being tried.
    #[error(transparent)]
    Check(drumline::Error),

    /// What cannot be measured, or where the figures cannot be written.
    #[error("{0}")]
    Bench(String),

    /// A cluster cannot be simulated as it is described.
    #[error("{problem}")]
    Simulate {
        /// What is wrong, and what to write instead.
        problem: String,
    },

    /// An operation that was to be measured failed.
    #[error(transparent)]
    Measure(drumline::Error),

    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: String,
        /// What the system said.
        source: io::Error,
    },
}

impl Error {
    /// The exit code for this error: 2 for bad usage, 126 and 127 as a shell for programs that
    /// cannot be run, else 1.
    ///
    /// ```
    /// use drumline_launch::Error;
    ///
    /// let not_found = Error::ProgramNotFound { program: "trian".into(), hint: String::new() };
    /// assert_eq!(not_found.exit_code(), 127);
    /// assert_eq!(Error::Bench("0 ranks".into()).exit_code(), 2);
    /// ```
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::ProgramNotFound { .. } => 127,
            Error::ProgramNotExecutable { .. } => 126,
            Error::Store(_) | Error::Check(_) | Error::Bench(_) | Error::Simulate { .. } => 2,
            Error::Trace(_) | Error::Measure(_) | Error::System { .. } => 1,
        }
    }

    /// For `map_err`: an [`Error::System`], `what` was tried.
    pub(crate) fn system<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Error {
        |source| Error::System { what: what.into(), source: source.into() }
    }
}

impl From<drumline::store::Error> for Error {
    fn from(error: drumline::store::Error) -> Error {
        drumline::Error::from(error).into()
    }
}
