//! Why nothing can be measured.

use std::{fmt, io};

use drumline::Section;

/// The result of fallible functions of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why nothing can be measured.
///
/// ```
/// use drumline_bench::Error;
///
/// assert_eq!(Error::Usage("--root 7: there are 2 ranks".into()).exit_code(), 2);
/// ```
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option or a file that it names is invalid. The text says what to write instead.
    #[error("{} {}", .0, Section::Measuring)]
    Usage(String),

    /// A collective failed while it was measured.
    #[error(transparent)]
    Measure(drumline::Error),

    /// A system call failed.
    #[error("{what}: {error} {}", Section::Io)]
    System {
        /// What the program tried to do.
        what: String,
        /// The error of the system.
        error: io::Error,
    },
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    /// The exit code of a command that ends with this error: 2 for bad usage, else 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Usage(_) => 2,
            Error::Measure(_) | Error::System { .. } => 1,
        }
    }

    /// For `map_err`: makes an [`Error::System`]. `what` says what the program tried to do.
    pub(crate) fn system<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Error {
        |error| Error::System { what: what.into(), error: error.into() }
    }
}
