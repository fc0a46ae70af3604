//! Why a trace cannot be written or read.

use std::{fmt, path::PathBuf};

use drumline_error::{Section, of_setting};

/// The result of a function of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a trace cannot be written or read, and where. `drumline-group` makes its own errors of these.
#[derive(Clone, thiserror::Error)]
pub enum Error {
    /// The setting that cannot be followed.
    #[error("{}", of_setting(setting, problem))]
    InvalidSetting {
        /// Its name.
        setting: String,
        /// What is wrong with its value.
        problem: String,
    },

    /// A file that cannot be read.
    #[error("trace {}{place}: {problem} {}", path.display(), Section::Traces)]
    Trace {
        /// The file or the directory.
        path: PathBuf,
        /// The line: `, line 3`; or nothing.
        place: String,
        /// What is wrong with it.
        problem: String,
    },

    /// The store, through which hosts compare their clocks, has failed.
    #[error(transparent)]
    Store(#[from] drumline_store::Error),
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
