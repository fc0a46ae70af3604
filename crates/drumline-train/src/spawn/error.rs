//! Why ranks could not be started, or how one failed.

use std::{fmt, io, os::unix::process::ExitStatusExt, process::ExitStatus};

use drumline_error::Section;

use crate::error_file::RUST_ERROR;

/// Why ranks could not be started, or how the first of them failed.
///
/// ```
/// # use drumline_train as drumline;
/// use std::{os::unix::process::ExitStatusExt, process::ExitStatus};
///
/// let error = drumline::SpawnError::Failed {
///     rank: 1,
///     pid: 7,
///     status: Some(ExitStatus::from_raw(9)),
///     message: None,
///     backtrace: None,
/// };
/// assert_eq!(error.to_string(), "rank 1 (pid 7) was killed by signal 9 (drumline explain the-launcher)");
/// ```
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum SpawnError {
    /// A rank failed. The others were ended.
    #[error("rank {rank} (pid {pid}) {}{} {}", how(*status), said(message.as_deref(), backtrace.as_deref()), Section::TheLauncher)]
    Failed {
        /// The first rank that failed.
        rank: usize,
        /// Its process.
        pid: u32,
        /// How it ended. `None`: the system did not tell. That is so if the program ignores SIGCHLD, or if other code of it
        /// collects all children.
        status: Option<ExitStatus>,
        /// The text of its panic or error. `None`: a signal killed it, or it called `exit`.
        message: Option<String>,
        /// Where it panicked.
        backtrace: Option<String>,
    },

    /// A process ended without a call of [`spawn`](crate::spawn()).
    #[error(
        "rank {rank} (pid {pid}) ended well, but before it came to the call of spawn: a process runs the program from \
         its beginning, so what stands before the call must not depend on what changes {}",
        Section::TheLauncher
    )]
    NotReached {
        /// The rank.
        rank: usize,
        /// Its process.
        pid: u32,
    },

    /// A rank cannot start ranks.
    #[error("a process that spawn has started cannot call spawn {}", Section::TheLauncher)]
    Nested,

    /// The environment has a `DRUMLINE_SPAWN` that is not from [`spawn`](crate::spawn()).
    #[error(
        "DRUMLINE_SPAWN is {value:?}, which spawn does not write: unset it {}",
        Section::Settings
    )]
    NotUnderstood {
        /// What it is.
        value: String,
    },

    /// The store of the ranks cannot be hosted, or a setting of the environment is invalid.
    #[error(transparent)]
    Group(#[from] drumline_group::Error),

    /// A system call failed.
    #[error("{what}: {error} {}", Section::Io)]
    System {
        /// What was tried.
        what: &'static str,
        /// The system's error.
        error: io::Error,
    },
}

impl SpawnError {
    /// For `map_err`.
    pub(super) fn system<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> SpawnError {
        move |error| SpawnError::System { what, error: error.into() }
    }
}

fn how(status: Option<ExitStatus>) -> String {
    let Some(status) = status else {
        return "has ended, and how is not known: this program ignores SIGCHLD, or other code of it collects all children"
            .into();
    };
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exited with code {code}"),
        (None, Some(signal)) => format!("was killed by signal {signal}"),
        (None, None) => "ended".into(),
    }
}

/// The text for users, which `unwrap` and a `main` that returns an error print.
impl fmt::Debug for SpawnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

fn said(message: Option<&str>, backtrace: Option<&str>) -> String {
    match (message, backtrace) {
        (None, _) => String::new(),
        (Some(message), Some(backtrace)) if backtrace.contains(message) => {
            format!(":\n{backtrace}\n")
        }
        // The `Debug` of an error says in other words what its `Display` does.
        (Some(message), Some(backtrace)) if backtrace.starts_with(RUST_ERROR) => {
            format!(": {message}")
        }
        (Some(message), Some(backtrace)) => format!(": {message}\n{backtrace}\n"),
        (Some(message), None) => format!(": {message}"),
    }
}
