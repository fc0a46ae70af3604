//! The directory to which a trace is written.

use std::path::PathBuf;

use drumline_schedule::step::Rank;

/// The directory to which ranks write their traces, and the limit for each file.
///
/// ```
/// use drumline::{Config, ProcessGroup, trace::Trace};
///
/// # let directory = tempfile::tempdir().unwrap();
/// # let dir = directory.path().join("trace");
/// let mut trace = Trace::to(&dir);
/// trace.bytes_max = 1 << 20;
/// let config = Config::default().trace(trace);
/// for group in drumline::rendezvous::local_world_with(1, &config)? {
///     group.barrier()?;
///     group.destroy()?;
/// }
/// assert!(dir.join("rank-0.json").exists());
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// The directory. It belongs to one run: files of an earlier run are replaced. It is made if it does not
    /// exist.
    pub dir: PathBuf,

    /// The most bytes in the file of a rank; 256 MiB unless set, which is more than a million calls.
    pub bytes_max: u64,

    /// This process's rank in the job, which names its file. `None`: its rank in the first group.
    pub(crate) rank: Option<Rank>,
}

impl Trace {
    /// A trace in `dir`.
    pub fn to(dir: impl Into<PathBuf>) -> Trace {
        Trace { dir: dir.into(), bytes_max: 256 << 20, rank: None }
    }

    /// The trace of rank `rank` of the job. A trace that has a rank keeps it.
    #[doc(hidden)]
    pub fn of_rank(self, rank: Rank) -> Trace {
        Trace { rank: self.rank.or(Some(rank)), ..self }
    }
}

/// The name of a rank's file in the directory of a trace.
pub(crate) fn file_name(rank: Rank) -> String {
    format!("rank-{rank}.json")
}
