//! Why a trace cannot be written or read.

use std::path::PathBuf;

use drumline_store::of_setting;

/// The result of a function of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a trace cannot be written or read, and where.
///
/// ```
/// use drumline::trace::{Error, summarize};
///
/// let error = summarize("/nowhere".as_ref()).unwrap_err();
/// assert!(matches!(error, Error::Trace { .. }) && error.to_string().contains("/nowhere"), "{error}");
/// ```
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
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
    #[error("trace {}{place}: {problem} [errors.md#traces]", path.display())]
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
