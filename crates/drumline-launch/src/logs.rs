//! What the launcher does with the output of workers besides showing it: `--log-dir`, `-r`, `-t` and their like.

use std::path::PathBuf;

/// Which output goes to files, and which is shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Logs {
    /// The directory of all files. `None`: a new one for temporary files, if there are any.
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

impl Logs {
    /// Whether anything goes to a file.
    pub(crate) fn has_files(&self) -> bool {
        let maps = [&self.redirects, &self.tee];
        let is_any = |streams: Streams| streams.stdout || streams.stderr;
        maps.iter().any(|map| is_any(map.default) || map.ranks.iter().any(|(_, it)| is_any(*it)))
            || !self.stdout_filters.is_empty()
            || !self.stderr_filters.is_empty()
    }

    /// The streams of this local rank that go to files.
    pub(crate) fn to_files(&self, local_rank: usize) -> Streams {
        let (redirected, copied) = (self.redirects.of(local_rank), self.tee.of(local_rank));
        Streams {
            stdout: redirected.stdout || copied.stdout,
            stderr: redirected.stderr || copied.stderr,
        }
    }

    /// The streams of this local rank that are shown.
    pub(crate) fn to_console(&self, local_rank: usize) -> Streams {
        let is_shown = self.shown.is_empty() || self.shown.contains(&local_rank);
        let (redirected, copied) = (self.redirects.of(local_rank), self.tee.of(local_rank));
        Streams {
            stdout: is_shown && (copied.stdout || !redirected.stdout),
            stderr: is_shown && (copied.stderr || !redirected.stderr),
        }
    }
}

impl StreamMap {
    fn of(&self, local_rank: usize) -> Streams {
        let own = self.ranks.iter().find(|(rank, _)| *rank == local_rank);
        own.map_or(self.default, |(_, streams)| *streams)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Streams = Streams { stdout: false, stderr: false };
    const OUT: Streams = Streams { stdout: true, stderr: false };
    const BOTH: Streams = Streams { stdout: true, stderr: true };

    #[test]
    fn what_is_redirected_is_shown_only_if_it_is_copied_too_and_its_rank_is_not_left_out() {
        let logs = Logs {
            redirects: StreamMap { default: BOTH, ranks: vec![(2, NONE)] },
            tee: StreamMap { default: NONE, ranks: vec![(1, OUT), (3, OUT)] },
            shown: vec![0, 1, 2],
            ..Logs::default()
        };
        assert_eq!([0, 1, 2, 3].map(|rank| logs.to_files(rank)), [BOTH, BOTH, NONE, BOTH]);
        assert_eq!([0, 1, 2, 3].map(|rank| logs.to_console(rank)), [NONE, OUT, BOTH, NONE]);
        assert!(logs.has_files() && !Logs::default().has_files());
        assert_eq!(Logs::default().to_console(7), BOTH);
        let filters = Logs { stderr_filters: vec!["error".into()], ..Logs::default() };
        assert!(filters.has_files());
    }
}
