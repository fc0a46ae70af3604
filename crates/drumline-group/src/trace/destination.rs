//! The directory that a trace is written to.

use std::path::PathBuf;

use drumline_schedule::step::Rank;

/// Where a rank writes what it does.
///
/// ```
/// # use drumline_group as drumline;
/// use drumline::{Config, ProcessGroup, trace::Trace};
///
/// # let directory = tempfile::tempdir().unwrap();
/// # let dir = directory.path().join("trace");
/// let mut trace = Trace::to(&dir);
/// trace.bytes_max = 1 << 20;
/// let config = Config::default().trace(trace);
/// for group in ProcessGroup::local_world_with(1, &config)? {
///     group.barrier()?;
///     group.destroy()?;
/// }
/// assert!(dir.join("rank-0.json").exists());
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// The directory, which belongs to one run: files of an earlier one are replaced. It is made
    /// if it is not there.
    pub dir: PathBuf,

    /// How long the file of a rank may become, in bytes; 256 MiB unless set, which is more than a
    /// million operations.
    pub bytes_max: u64,

    /// The rank of this process in the job, which names its file. That of the first group, unless
    /// known.
    pub(crate) rank: Option<Rank>,
}

impl Trace {
    /// A trace in `dir`.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// use drumline::trace::Trace;
    ///
    /// let trace = Trace::to("runs/7/trace");
    /// assert_eq!(trace.dir, std::path::Path::new("runs/7/trace"));
    /// assert_eq!(trace.bytes_max, 256 << 20);
    /// ```
    pub fn to(dir: impl Into<PathBuf>) -> Trace {
        Trace { dir: dir.into(), bytes_max: 256 << 20, rank: None }
    }
}

/// The file of a rank in the directory of a trace.
pub(super) fn file_name(rank: Rank) -> String {
    format!("rank-{rank}.json")
}
