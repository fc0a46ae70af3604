//! What happens to a job.

use serde::Serialize;

use crate::world::World;

/// What happens to a job, as the launcher of one host tells it. Fields are named as in torch's events where torch has
/// them, and are numbers, texts or nothing.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum Happening {
    JobBegins {
        program: String,
        nproc_per_node: usize,
        max_restarts: u32,
        /// Where others may ask about the health.
        health: Option<String>,
    },
    /// The ranks of all hosts start.
    WorldStarts(World),
    WorkerStarts(Worker),
    WorkerHangs {
        #[serde(flatten)]
        worker: Worker,
        how: String,
    },
    WorkerEnds {
        #[serde(flatten)]
        worker: Worker,
        /// Only if it ended by itself.
        exit_code: Option<i32>,
        /// Only if a signal killed it.
        signal: Option<String>,
        /// Whether it failed, and the others go on without it.
        lost: bool,
    },
    /// A signal to the launcher ends the job.
    Stops {
        signal: String,
    },
    WorldEnds {
        outcome: &'static str,
        global_rank: Option<usize>,
        total_run_time: f64,
    },
    JobEnds {
        exit_code: u8,
    },
}

/// Which worker it is.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Worker {
    pub(crate) global_rank: usize,
    pub(crate) local_rank: usize,
    pub(crate) worker_id: i32,
}

impl Happening {
    /// The name of the event.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Happening::JobBegins { .. } => "job_begins",
            Happening::WorldStarts(_) => "world_starts",
            Happening::WorkerStarts(_) => "worker_starts",
            Happening::WorkerHangs { .. } => "worker_hangs",
            Happening::WorkerEnds { .. } => "worker_ends",
            Happening::Stops { .. } => "job_is_stopped",
            Happening::WorldEnds { .. } => "world_ends",
            Happening::JobEnds { .. } => "job_ends",
        }
    }

    /// Who did it, as torch names it.
    pub(crate) fn source(&self) -> &'static str {
        match self {
            Happening::WorkerEnds { .. } => "WORKER",
            _ => "AGENT",
        }
    }
}
