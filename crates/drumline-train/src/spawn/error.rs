//! Why ranks could not be started, or how one failed.

use std::{io, os::unix::process::ExitStatusExt, process::ExitStatus, sync::Arc};

use drumline_error::{Error, ErrorKind, ErrorOrigin, Section};

use crate::error_file::RUST_ERROR;

/// How the first rank failed that [`spawn`](crate::spawn()) had started: the detail of the error. The error's culprit
/// is that rank.
///
/// ```no_run
/// use drumline::RankEnd;
///
/// let ranks = drumline::spawn(2, |_| Err("no data"))?;
/// let error = ranks.join().unwrap_err();
/// let end: &RankEnd = error.detail().expect("a rank has failed");
/// println!("{:?}: {:?}", error.culprit(), end.message); // Some(0): Some("no data")
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankEnd {
    /// Its process.
    pub pid: u32,
    /// How it ended. `None`: the system did not tell. That is so if the program ignores SIGCHLD, or if other code of it
    /// collects all children.
    pub status: Option<ExitStatus>,
    /// The text of its panic or error. `None`: a signal killed it, or it called `exit`.
    pub message: Option<String>,
    /// Where it panicked.
    pub backtrace: Option<String>,
}

impl RankEnd {
    /// The error that it is. The others were ended.
    pub(super) fn of(self, rank: usize) -> Error {
        let RankEnd { pid, status, message, backtrace } = &self;
        let (how, said) = (how(*status), said(message.as_deref(), backtrace.as_deref()));
        let text = format!("rank {rank} (pid {pid}) {how}{said}");
        failed(text).blaming(Some(rank)).with(Arc::new(self))
    }
}

fn failed(text: String) -> Error {
    Error::new(ErrorKind::Rank, Section::TheLauncher, text)
}

/// This process has ended without a call of [`spawn`](crate::spawn()).
pub(super) fn not_reached(rank: usize, pid: u32) -> Error {
    let text = format!(
        "rank {rank} (pid {pid}) ended well, but before it came to the call of spawn: a process runs the program from its \
         beginning, so what stands before the call must not depend on what changes"
    );
    failed(text).blaming(Some(rank)).of_origin(ErrorOrigin::User)
}

/// A rank cannot start ranks.
pub(super) fn nested() -> Error {
    failed("a process that spawn has started cannot call spawn".into()).of_origin(ErrorOrigin::User)
}

/// The environment has this `DRUMLINE_SPAWN`, which is not from [`spawn`](crate::spawn()).
pub(super) fn not_understood(value: &str) -> Error {
    let text = format!("DRUMLINE_SPAWN is {value:?}, which spawn does not write: unset it");
    Error::new(ErrorKind::Setting, Section::Settings, text)
}

/// For `map_err`.
pub(super) fn system<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Error {
    move |error| Error::io(what, error)
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
