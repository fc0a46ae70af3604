//! Why a call failed.

mod collective;
mod one_line;

use std::{fmt, io, sync::Arc};

pub use collective::CollectiveError;
pub(crate) use collective::limit_of;
pub use drumline_error::{Cause, Reason};
pub(crate) use one_line::one_line;

/// The result of the fallible functions of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call did not happen, which rank is at fault, and what to do next.
#[derive(Clone, thiserror::Error)]
pub enum Error {
    /// The caller's argument cannot be used. Nothing was sent to any peer.
    #[error("{operation}: {problem}")]
    InvalidArgument {
        /// The function that was called.
        operation: &'static str,
        /// What is wrong, and what would be right.
        problem: String,
    },

    /// A setting cannot be used here.
    #[error("{setting}: {problem}")]
    InvalidSetting {
        /// The variable or the field.
        setting: String,
        /// What is wrong, and what would be right.
        problem: String,
    },

    /// The system refused something that a call needs.
    #[error("{what}: {error}")]
    Io {
        /// What this rank tried.
        what: String,
        /// The system's error.
        error: Arc<io::Error>,
    },

    /// There is no more memory to register.
    #[error("{problem} (DRUMLINE_REGISTERED_BYTES_MAX sets the limit)")]
    Memory {
        /// How much the caller asked for, and how much there is.
        problem: String,
    },

    /// A call failed. The group is poisoned: every later call fails.
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
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
