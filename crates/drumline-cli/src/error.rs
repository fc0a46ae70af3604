//! Why a command failed.

use std::{fmt, io, path::PathBuf};

use drumline::Section;

/// The result of the fallible functions of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a command failed.
///
/// ```
/// use drumline_cli::Error;
///
/// let error = drumline_launch::Error::ProgramNotFound {
///     program: "trian".into(),
///     hint: "no directory of PATH has it".into(),
/// };
/// assert_eq!(Error::from(error).exit_code(), 127);
/// ```
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// `drumline run` cannot start or watch the job.
    #[error(transparent)]
    Launch(#[from] drumline_launch::Error),

    /// `drumline bench` has failed.
    #[cfg(feature = "bench")]
    #[error(transparent)]
    Bench(#[from] drumline_bench::Error),

    /// A setting of the environment is invalid, so `drumline check` cannot try anything.
    #[error(transparent)]
    Check(drumline::Error),

    /// The trace of a job cannot be read or merged.
    #[error(transparent)]
    Trace(drumline::Error),

    /// The page of a trace cannot be written.
    #[error("trace page {}: {error}", path.display())]
    Page {
        /// The file of the page.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },

    /// The secret cannot be made or written.
    #[error("secret {}: {error}", path.display())]
    Secret {
        /// The file of the secret.
        path: PathBuf,
        /// Why, and what to do.
        error: String,
    },

    /// A rank has called the launcher, which cannot begin again without the variables of the rank.
    #[error("start this program again: {} {}", .0, Section::Io)]
    BeginAgain(io::Error),

    /// Stdout cannot be written to.
    #[error("write to stdout: {} {}", .0, Section::Io)]
    Print(io::Error),
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    /// The exit code of a command that ends with this error: 2 for bad usage, 126 and 127 as in a shell
    /// for programs that cannot be run, else 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Launch(error) => error.exit_code(),
            #[cfg(feature = "bench")]
            Error::Bench(error) => error.exit_code(),
            Error::Check(_) => 2,
            Error::Trace(_)
            | Error::Page { .. }
            | Error::Secret { .. }
            | Error::BeginAgain(_)
            | Error::Print(_) => 1,
        }
    }
}
