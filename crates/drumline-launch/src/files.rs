//! The directories that a job writes to on this host.
//!
//! ```text
//!  --log-dir/<id>_<random>/attempt_<n>/<local rank>/{stdout.log,stderr.log,error.json}
//!                                     /filtered_{stdout,stderr}.log
//!  $TMPDIR/drumline_<random>/<local rank>/error.json      without --log-dir, until the world has ended
//! ```
//!
//! That is how torchrun lays them out. A directory in which nothing was written is removed at the end.

use std::{
    fs::{self, Permissions},
    io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    thread::{self, JoinHandle},
};

use tempfile::TempDir;

use crate::{Error, Job, Result};

/// The files of all worlds.
#[derive(Debug, Default)]
pub(crate) struct JobFiles {
    /// `--log-dir/<id>_<random>`; `None` if nothing is kept.
    kept: Option<PathBuf>,
    removals: Removals,
}

/// Threads that remove directories of worlds that are over. With a thousand ranks that takes longer than other hosts wait
/// for a word of this one.
type Removals = Arc<Mutex<Vec<JoinHandle<()>>>>;

/// The files of one world.
#[derive(Debug)]
pub(crate) struct WorldFiles {
    /// The directory of all ranks. `None`: there is none, and workers go on without.
    root: Option<PathBuf>,
    /// The same, if it does not stay.
    private: Option<TempDir>,
    /// How many ranks have their directories.
    ready: usize,
    removals: Removals,
}

impl JobFiles {
    pub(crate) fn of(job: &Job, run_id: &str) -> Result<JobFiles> {
        let given = job.logs.dir.as_deref();
        if given.is_none() && !job.logs.has_files() {
            return Ok(JobFiles::default());
        }
        let base = given.map_or_else(std::env::temp_dir, Path::to_owned);
        let prefix =
            if given.is_some() { format!("{run_id}_") } else { format!("drumline_{run_id}_") };
        // The directory of a worker may not be that of the launcher.
        let made = std::path::absolute(&base).and_then(|base| {
            fs::create_dir_all(&base)?;
            Ok(new_directory(&prefix, &base)?.keep())
        });
        let what = format!("make a directory for logs in {} (--log-dir)", base.display());
        let kept = made.map_err(Error::system(what))?;
        tracing::info!("logs go to {}", kept.display());
        Ok(JobFiles { kept: Some(kept), removals: Removals::default() })
    }

    /// Files of the next world. Where the disk does not take their directory, the world goes on without, and a warning
    /// says so.
    pub(crate) fn of_world(&self, restart: u32) -> WorldFiles {
        let made = match &self.kept {
            Some(root) => {
                let path = root.join(format!("attempt_{restart}"));
                fs::create_dir(&path).map(|()| (path, None))
            }
            None => new_directory("drumline_", &std::env::temp_dir())
                .map(|directory| (directory.path().to_owned(), Some(directory))),
        };
        let made = made.inspect_err(|error| {
            let root = self.kept.clone().unwrap_or_else(std::env::temp_dir);
            without_directories(&root, error);
        });
        let (root, private) = made.map_or((None, None), |(root, private)| (Some(root), private));
        WorldFiles { root, private, ready: 0, removals: Arc::clone(&self.removals) }
    }

    /// The directory of the logs, if the user wants to know it: because nobody has said where, or because something
    /// has gone wrong.
    pub(crate) fn news(&self, job: &Job, is_failed: bool) -> Option<&Path> {
        let is_news = job.logs.has_files() && (is_failed || job.logs.dir.is_none());
        self.kept.as_deref().filter(|_| is_news)
    }
}

fn without_directories(root: &Path, error: &io::Error) {
    tracing::warn!(
        "cannot make the directories of the ranks in {}: {error}; they write no logs and no error files",
        root.display()
    );
}

/// A directory for this user alone, with a name that no other one has.
fn new_directory(prefix: &str, base: &Path) -> io::Result<TempDir> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(prefix).permissions(Permissions::from_mode(0o700)).tempdir_in(base)
}

/// Nothing is left of a job that wrote nothing.
impl Drop for JobFiles {
    fn drop(&mut self) {
        for removal in self.removals.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            let _ = removal.join();
        }
        if let Some(path) = &self.kept {
            let _ = fs::remove_dir(path);
        }
    }
}

impl WorldFiles {
    /// Makes the directory of the next rank. If that fails, this rank and those after it go on without.
    pub(crate) fn prepare(&mut self, local_rank: usize) {
        let Some(root) = self.root.as_ref().filter(|_| self.ready == local_rank) else { return };
        match fs::create_dir(root.join(local_rank.to_string())) {
            Ok(()) => self.ready += 1,
            Err(error) => without_directories(root, &error),
        }
    }

    fn of_rank(&self, local_rank: usize) -> Option<PathBuf> {
        let root = self.root.as_ref().filter(|_| local_rank < self.ready)?;
        Some(root.join(local_rank.to_string()))
    }

    /// Where a worker writes why it fails.
    pub(crate) fn error_file(&self, local_rank: usize) -> Option<PathBuf> {
        Some(self.of_rank(local_rank)?.join("error.json"))
    }

    /// A file for the output of one rank, in a directory that stays.
    pub(crate) fn log(&self, local_rank: usize, name: &str) -> Option<PathBuf> {
        Some(self.of_rank(local_rank).filter(|_| self.private.is_none())?.join(name))
    }

    /// A file for lines of all ranks, in a directory that stays.
    pub(crate) fn log_of_all(&self, name: &str) -> Option<PathBuf> {
        Some(self.root.as_ref().filter(|_| self.private.is_none())?.join(name))
    }

    /// The directory that somebody else has to remove if this process is killed.
    pub(crate) fn private(&self) -> Option<&Path> {
        self.private.as_ref().map(TempDir::path)
    }
}

impl Drop for WorldFiles {
    fn drop(&mut self) {
        let (root, private, ready) = (self.root.take(), self.private.take(), self.ready);
        let remove = move || {
            // What is empty goes without a descriptor: there may be none left to look for files in a private directory.
            if let Some(root) = root {
                for rank in 0..ready {
                    let _ = fs::remove_dir(root.join(rank.to_string()));
                }
                let _ = fs::remove_dir(root);
            }
            drop(private);
        };
        // If there is no thread, what it would have removed is removed here: it is dropped.
        if let Ok(removal) = thread::Builder::new().name("files".into()).spawn(remove) {
            self.removals.lock().unwrap_or_else(PoisonError::into_inner).push(removal);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;
    use crate::Logs;

    fn job(dir: &Path) -> Job {
        let logs = Logs { dir: Some(dir.to_owned()), ..Logs::default() };
        Job { logs, ..Job::new("train", NonZeroUsize::MIN) }
    }

    fn prepared(mut files: WorldFiles) -> WorldFiles {
        (0..3).for_each(|rank| files.prepare(rank));
        files
    }

    #[test]
    fn directories_stay_if_something_is_in_them() {
        let base = tempfile::tempdir().unwrap();
        let dir = base.path().join("a/b");
        let files = JobFiles::of(&job(&dir), "id").unwrap();
        assert_eq!(files.news(&job(&dir), true), None);
        let first = prepared(files.of_world(0));
        let error_file = first.error_file(1).unwrap();
        fs::write(&error_file, "{}").unwrap();
        let second = prepared(files.of_world(1));
        assert_eq!(
            second.log(2, "stdout.log").unwrap().parent().unwrap().file_name().unwrap(),
            "2"
        );
        drop((first, second, files));
        let run = fs::read_dir(&dir).unwrap().next().unwrap().unwrap();
        assert!(run.file_name().to_str().unwrap().starts_with("id_"));
        assert_eq!(error_file, run.path().join("attempt_0/1/error.json"));
        let count = |path: &Path| fs::read_dir(path).unwrap().count();
        assert_eq!((count(&run.path()), count(&run.path().join("attempt_0"))), (1, 1));
    }

    #[test]
    fn without_files_nothing_stays() {
        let base = tempfile::tempdir().unwrap();
        let files = JobFiles::of(&job(base.path()), "id").unwrap();
        drop((prepared(files.of_world(0)), files));
        assert_eq!(fs::read_dir(base.path()).unwrap().count(), 0);

        let files = JobFiles::of(&Job::new("train", NonZeroUsize::MIN), "id").unwrap();
        let world = prepared(files.of_world(0));
        let (private, error_file) = (world.private().unwrap(), world.error_file(1).unwrap());
        assert_eq!(error_file, private.join("1/error.json"));
        assert_eq!((world.log(0, "stdout.log"), world.log_of_all("x")), (None, None));
        fs::write(&error_file, "{}").unwrap();
        let private = private.to_owned();
        drop((world, files));
        assert!(!private.exists());
    }

    #[test]
    fn a_place_that_takes_no_directory_is_named() {
        let error = JobFiles::of(&job(Path::new("/dev/null/logs")), "id").unwrap_err().to_string();
        assert!(error.contains("/dev/null/logs (--log-dir)"), "{error}");
    }

    #[test]
    fn a_world_goes_on_without_its_directories() {
        let base = tempfile::tempdir().unwrap();
        let files = JobFiles::of(&job(base.path()), "id").unwrap();
        fs::remove_dir(files.kept.as_ref().unwrap()).unwrap();
        let world = prepared(files.of_world(0));
        assert_eq!((world.error_file(0), world.log(0, "stdout.log")), (None, None));
    }
}
