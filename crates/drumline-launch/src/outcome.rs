//! The file of `--report`: how the job ended on this host, for programs.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use drumline::{error_file::ErrorFile, files};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::{
    Ending, Error, Job, Result,
    attempt::Ended,
    clock::since_1970,
    ending::{signal_exit_code, signal_name},
    membership::{End, Origin},
    report::Fate,
    supervisor::Verdict,
};

/// How a job ended. After a restart the file is about the last world.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Outcome {
    /// The exit code of the launcher.
    exit_code: u8,
    /// The signal to the launcher that ended the job.
    stopped_by: Option<String>,
    /// Why the launcher could not start or watch the job.
    error: Option<String>,
    /// How often the job started again.
    restarts: u32,
    /// The rank that failed first.
    first_failure: Option<usize>,
    /// How it failed, if it is a rank of another host.
    elsewhere: Option<Elsewhere>,
    /// The last lines of its stderr.
    stderr: Vec<String>,
    /// All ranks of this host.
    ranks: Vec<Rank>,
}

/// How one rank ended.
#[derive(Clone, Debug, Serialize)]
struct Rank {
    rank: usize,
    local_rank: usize,
    pid: i32,
    /// The exit code, or -n after signal n. `None`: it outlived SIGKILL.
    exit_code: Option<i32>,
    /// When it ended, in seconds since 1970.
    ended_at: Option<f64>,
    /// The last signal that the launcher sent to end it. Without one it ended by itself.
    told: Option<String>,
    /// Whether it failed, and the others went on without it.
    lost: bool,
    /// How it hung.
    hung: Option<String>,
    /// The path of its error file, if that stays.
    error_file: Option<PathBuf>,
    /// What its error file has.
    error: Option<Map<String, Value>>,
}

/// How a rank of another host failed.
#[derive(Clone, Debug, Serialize)]
struct Elsewhere {
    host: String,
    rank: usize,
    local_rank: usize,
    pid: u32,
    exit_code: i32,
    ended_at: f64,
    /// What the launcher of that host says about it.
    text: String,
}

/// Whether the job's file can be written, before hours of work.
pub(crate) fn check(job: &Job) -> Result<()> {
    job.report
        .as_deref()
        .map_or(Ok(()), |path| files::check_place(path).map_err(Error::system(what(path))))
}

/// Writes the file about a world that has ended, if the job wants one. Returns what it says.
pub(crate) fn write(job: &Job, restarts: u32, ended: &Ended) -> Outcome {
    let rank_of = |worker: usize| ended.attempt.world.first_rank + worker;
    let failure = ended.attempt.supervisor.failure();
    let (exit_code, stopped_by, first_failure) = match (ended.verdict(), failure) {
        // Another host has the reason.
        (Verdict::Success | Verdict::Abandoned, _) => (0, None, None),
        (Verdict::Stopped(signal), _) => {
            let number = signal.as_raw();
            (signal_exit_code(number), Some(signal_name(number)), None)
        }
        (Verdict::Failed { worker }, ending) => {
            (ending.map_or(1, Ending::exit_code), None, Some(rank_of(worker)))
        }
    };
    let started = since_1970(ended.attempt.started_at);
    let rank = |(worker, fate): (usize, &Fate)| Rank {
        rank: rank_of(worker),
        local_rank: worker,
        pid: fate.pid.as_raw_nonzero().get(),
        exit_code: fate.exit.map(|exit| exit.ending.code()),
        ended_at: fate.exit.map(|exit| (started + exit.at).as_secs_f64()),
        told: fate.exit.and_then(|exit| Some(signal_name(exit.told?.as_raw()))),
        lost: fate.exit.is_some_and(|exit| exit.is_lost),
        hung: fate.hung.as_ref().map(|hung| hung.how.clone()),
        error_file: ended.kept_error_file(worker),
        error: ended.error(worker).map(error),
    };
    let tail = ended.last_words().tail;
    let outcome = Outcome {
        exit_code,
        stopped_by,
        restarts,
        first_failure,
        stderr: tail.iter().map(|line| String::from_utf8_lossy(line).into_owned()).collect(),
        ranks: ended.fates.iter().enumerate().map(rank).collect(),
        ..Outcome::default()
    };
    put(job, &outcome);
    outcome
}

/// Writes into the file how a job of several hosts has ended, of which `me` is this one. `last` is about the last world
/// that has run on this host.
pub(crate) fn write_end(job: &Job, me: Option<u64>, end: &End, last: Outcome) {
    let mut outcome = last;
    outcome.exit_code = end.exit_code();
    match end {
        End::Over(crate::membership::Verdict::Finished, _) => {}
        End::Over(_, Some(origin)) if me == Some(origin.host) => {}
        End::Over(_, Some(origin)) => {
            outcome.first_failure = Some(origin.failure.rank);
            outcome.elsewhere = Some(elsewhere(origin));
        }
        End::Left(signal) => outcome.stopped_by = Some(signal_name(*signal)),
        other => outcome.error = Some(other.to_string()),
    }
    put(job, &outcome);
}

fn elsewhere(origin: &Origin) -> Elsewhere {
    let failure = &origin.failure;
    Elsewhere {
        host: origin.name.clone(),
        rank: failure.rank,
        local_rank: failure.local_rank,
        pid: failure.pid,
        exit_code: failure.ending.code(),
        ended_at: Duration::from_millis(failure.time).as_secs_f64(),
        text: failure.text.clone(),
    }
}

/// What the error file has. A damaged one says so.
fn error(file: ErrorFile) -> Map<String, Value> {
    match file {
        ErrorFile::Failure(failure) => failure.json().clone(),
        ErrorFile::Damaged { why, beginning } => {
            let beginning = String::from_utf8_lossy(&beginning);
            let message = match beginning.is_empty() {
                true => format!("the error file is damaged: {why}"),
                false => format!("the error file is damaged: {why}; it begins with: {beginning}"),
            };
            Map::from_iter([("message".to_owned(), json!(message))])
        }
    }
}

/// Writes the file about an error of the launcher itself, if the job wants one.
pub(crate) fn write_error(job: &Job, error: &Error) {
    let outcome = Outcome {
        exit_code: error.exit_code(),
        error: Some(error.to_string()),
        ..Outcome::default()
    };
    put(job, &outcome);
}

/// A reader never sees half a file. If the disk does not take it, the job has ended as it has: only a warning tells it.
fn put(job: &Job, outcome: &Outcome) {
    let Some(path) = &job.report else { return };
    let text = serde_json::to_vec_pretty(outcome).map_err(Into::into);
    if let Err(error) = text.and_then(|text| files::write(path, &text)) {
        tracing::warn!("{}: {error}", what(path));
    }
}

fn what(path: &Path) -> String {
    format!("write --report {}", path.display())
}
