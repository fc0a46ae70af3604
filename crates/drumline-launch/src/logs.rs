//! What the launcher does with the output of workers besides showing it: `--log-dir`, `-r`, `-t` and their like.

use std::path::PathBuf;

/// Which output goes to files, and which is shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Logs {
    /// The directory of all files. `None`: there are no files.
    pub dir: Option<PathBuf>,
    /// Streams that go to files and are not shown.
    pub redirects: StreamMap,
    /// Streams that go to files and are shown.
    pub tee: StreamMap,
    /// The local ranks whose output is shown. Empty: all.
    pub shown: Vec<usize>,
    /// Lines of stdout that contain one of these are also written to a file of all ranks.
    pub stdout_filters: Vec<String>,
    /// The same for stderr.
    pub stderr_filters: Vec<String>,
    /// The beginning of shown lines, with `${rank}` and others. `None`: `[rank] `.
    pub prefix: Option<String>,
}

/// Which of a worker's streams are meant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Streams {
    /// Its stdout.
    pub stdout: bool,
    /// Its stderr.
    pub stderr: bool,
}

/// The streams of every local rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StreamMap {
    /// Of all ranks but those below.
    pub default: Streams,
    /// Of some ranks.
    pub ranks: Vec<(usize, Streams)>,
}
