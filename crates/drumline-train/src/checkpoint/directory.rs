use std::{
    io,
    num::NonZeroUsize,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use super::{
    content::Checkpoint,
    disk::{Disk, SystemDisk},
    file::{Refusal, why_not_written},
    lock::{Lock, Taken},
    replace,
};
use crate::{Error, Result, failure};

/// A directory of checkpoints, one file per saved step: `step-00001200.safetensors`.
///
/// [`save`](Self::save) writes a new file beside the old ones. Only when the new file is on the disk
/// does it delete the oldest files. So whenever the process, the machine or the disk fails, the
/// directory holds the last whole checkpoint or the one before it. [`newest`](Self::newest) finds
/// the last whole one.
///
/// One job at a time saves in a directory. From [`prepare`](Self::prepare) or the first [`save`](Self::save) until the
/// object and its clones are dropped, this process has a lock there, in the file `.lock`. Another process that wants to
/// save there gets an error. Reading needs no lock. On a file system without locks there is only a warning.
///
/// The methods whose names end in `_on_root` are for all ranks of a group together.
///
/// ```
/// use drumline::checkpoint::{Checkpoint, CheckpointDirectory, Tensor};
///
/// # fn main() -> drumline::Result<()> {
/// # let temporary = tempfile::tempdir().unwrap();
/// # let out = temporary.path().join("out");
/// let directory = CheckpointDirectory::new(&out);
/// let mut weight = 1.0_f32;
/// let first = match directory.newest()? {
///     Some(found) => {
///         weight = found.checkpoint.tensor("weight").unwrap().values::<f32>()?[0];
///         found.step
///     }
///     None => 0,
/// };
/// directory.prepare()?; // Fails now, not after an hour, if nothing can be written.
/// for step in first..300 {
///     weight *= 0.99; // one step of training
///     if (step + 1) % 100 == 0 {
///         let mut checkpoint = Checkpoint::default();
///         checkpoint.insert(Tensor::from_values("weight", [1], &[weight])?);
///         directory.save(step + 1, &checkpoint)?;
///     }
/// }
/// assert_eq!(directory.steps()?, [100, 200, 300]);
/// assert_eq!(directory.newest()?.unwrap().step, 300);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct CheckpointDirectory {
    path: PathBuf,
    keep: NonZeroUsize,
    /// Clones share it.
    lock: Arc<Mutex<Locked>>,
}

/// Whether this process may save.
#[derive(Debug, Default)]
enum Locked {
    /// Nobody has tried yet.
    #[default]
    NotYet,
    Here(Arc<Lock>),
    /// The file system has no locks.
    Nowhere,
}

/// A checkpoint in a [`CheckpointDirectory`].
///
/// ```
/// # use drumline::checkpoint::{Checkpoint, CheckpointDirectory, Found};
/// # let temporary = tempfile::tempdir().unwrap();
/// let directory = CheckpointDirectory::new(temporary.path());
/// directory.save(100, &Checkpoint::default())?;
/// std::fs::write(directory.path_of(200), "cut sho").unwrap();
///
/// let Found { step, checkpoint, skipped, .. } = directory.newest()?.expect("there is one");
/// assert_eq!((step, checkpoint), (100, Checkpoint::default()));
/// assert_eq!(skipped[0].path, directory.path_of(200));
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Found {
    /// The number of steps after which it was saved.
    pub step: u64,
    /// Its file.
    pub path: PathBuf,
    /// Its content.
    pub checkpoint: Checkpoint,
    /// The files of later steps, which are not whole, the latest first.
    pub skipped: Vec<Skipped>,
}

/// A file that [`CheckpointDirectory::newest`] could not use.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Skipped {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub problem: String,
}

const PREFIX: &str = "step-";
const SUFFIX: &str = ".safetensors";

impl CheckpointDirectory {
    /// A directory at `path`, which need not exist yet. Keeps the last three files. Touches no disk.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        const KEEP: NonZeroUsize = NonZeroUsize::MIN.saturating_add(2);
        Self { path: path.into(), keep: KEEP, lock: Arc::default() }
    }

    /// Sets how many files are kept. While a file is written there is one more.
    #[must_use]
    pub fn keep(mut self, files: NonZeroUsize) -> Self {
        self.keep = files;
        self
    }

    /// The path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file of a step.
    pub fn path_of(&self, step: u64) -> PathBuf {
        self.path.join(file_name(step))
    }

    /// The steps that have a file, whole or not, in rising order. Empty if there is no directory.
    ///
    /// # Errors
    ///
    /// [`Checkpoint`](crate::ErrorKind::Checkpoint) when the directory cannot be read.
    pub fn steps(&self) -> Result<Vec<u64>> {
        self.steps_on(&SystemDisk)
    }

    /// Makes the directory if it is missing, and checks that files can be written there.
    ///
    /// Call it before training, so that a missing permission, or another job that saves there, does not cost hours of
    /// work.
    ///
    /// # Errors
    ///
    /// [`Checkpoint`](crate::ErrorKind::Checkpoint) says what is wrong with the directory, or which process saves there.
    pub fn prepare(&self) -> Result<()> {
        self.prepare_on(&SystemDisk)?;
        self.lock()
    }

    /// Writes the checkpoint of a step, then deletes the files that are not kept.
    ///
    /// It becomes the newest checkpoint: files of later steps belong to a run that was given up, and
    /// are deleted too. Unfinished files of processes that have died are also deleted; those of
    /// living processes are not.
    ///
    /// # Errors
    ///
    /// [`Checkpoint`](crate::ErrorKind::Checkpoint) when the file cannot be written, or another process saves in this directory; all files are
    /// then as they were.
    /// [`Checkpoint`](crate::ErrorKind::Checkpoint) when a file of a later step cannot be deleted. (If an old file cannot
    /// be deleted, there is only a warning.)
    pub fn save(&self, step: u64, checkpoint: &Checkpoint) -> Result<PathBuf> {
        self.lock()?;
        self.save_on(&SystemDisk, step, checkpoint)
    }

    /// Reads the latest whole checkpoint. `None` when no step has a file.
    ///
    /// Files that are cut short, damaged or unreadable are skipped. The result and a warning name
    /// them.
    ///
    /// # Errors
    ///
    /// [`Checkpoint`](crate::ErrorKind::Checkpoint) when there are files but none is whole, so that training does not begin
    /// anew unnoticed; when a newer version of this crate wrote the latest file; or when the
    /// directory cannot be read.
    pub fn newest(&self) -> Result<Option<Found>> {
        self.newest_on(&SystemDisk)
    }

    /// Takes the lock, unless this process has it.
    fn lock(&self) -> Result<()> {
        let mut locked = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        match &*locked {
            Locked::Here(lock) if lock.holds() => return Ok(()),
            Locked::Nowhere => return Ok(()),
            Locked::Here(_) | Locked::NotYet => {}
        }
        let warn = |error: &io::Error| {
            tracing::warn!(
                path = %self.path.display(), %error,
                "this directory cannot be locked: take care that no other job saves here"
            );
        };
        *locked = match Lock::take(&self.path) {
            Ok(Taken::Ours(lock)) => Locked::Here(lock),
            Ok(Taken::NoLocks(error)) => {
                warn(&error);
                Locked::Nowhere
            }
            Ok(Taken::Others(holder)) => {
                return Err(self.error(format!(
                    "another job saves here ({holder}), and each would delete the files of the other: give this job a \
                     directory of its own, or end that process"
                )));
            }
            // Mostly no file can be made here, and the write that follows says why.
            Err(error) => {
                warn(&error);
                Locked::NotYet
            }
        };
        Ok(())
    }

    pub(super) fn error(&self, problem: String) -> Error {
        failure::checkpoint(&self.path, problem)
    }

    pub(super) fn steps_on(&self, disk: &impl Disk) -> Result<Vec<u64>> {
        let names = match disk.names(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            names => names.map_err(|error| self.error(format!("cannot be read: {error}")))?,
        };
        let mut steps: Vec<u64> = names.iter().filter_map(|name| step_of(name.to_str()?)).collect();
        steps.sort_unstable();
        Ok(steps)
    }

    pub(super) fn prepare_on(&self, disk: &impl Disk) -> Result<()> {
        let fail = |what: &str, error| self.error(format!("{what}: {}", why_not_written(&error)));
        disk.create_directory(&self.path)
            .map_err(|error| fail("the directory cannot be made", error))?;
        replace::remove_leftovers(disk, &self.path, PREFIX);
        replace::probe(disk, &self.path, PREFIX)
            .map_err(|error| fail("no file can be written in this directory", error))
    }

    pub(super) fn save_on(
        &self,
        disk: &impl Disk,
        step: u64,
        checkpoint: &Checkpoint,
    ) -> Result<PathBuf> {
        replace::remove_leftovers(disk, &self.path, PREFIX);
        let path = self.path_of(step);
        checkpoint.write_on(disk, &path)?;

        let steps = self.steps_on(disk)?;
        let (kept, later): (Vec<u64>, Vec<u64>) = steps.into_iter().partition(|&at| at <= step);
        // In rising order, each synced before the next: at every moment the newest checkpoint is
        // either the latest of the later steps, or the new one.
        for later in later {
            let path = self.path_of(later);
            let removed = disk.remove(&path).or_else(fine_if_gone);
            removed.and_then(|()| disk.sync_directory(&self.path)).map_err(|error| {
                let problem = format!(
                    "it cannot be deleted: {error}; delete it, because it is of a later step than \
                     the checkpoint that was just saved, and resuming would go on from it"
                );
                failure::checkpoint(path, problem)
            })?;
        }
        for old in &kept[..kept.len().saturating_sub(self.keep.get())] {
            let path = self.path_of(*old);
            if let Err(error) = disk.remove(&path).or_else(fine_if_gone) {
                tracing::warn!(?path, %error, "cannot delete an old checkpoint");
            }
        }
        Ok(path)
    }

    pub(super) fn newest_on(&self, disk: &impl Disk) -> Result<Option<Found>> {
        let mut skipped = Vec::new();
        for step in self.steps_on(disk)?.into_iter().rev() {
            let path = self.path_of(step);
            match Checkpoint::read_on(disk, &path) {
                Ok(checkpoint) => return Ok(Some(Found { step, path, checkpoint, skipped })),
                Err(Refusal::Missing) => {} // Another process has deleted it meanwhile.
                Err(refusal @ Refusal::Newer(_)) => return Err(refusal.into_error(&path)),
                Err(Refusal::Unusable(problem)) => {
                    tracing::warn!(?path, problem, "skipped a checkpoint that is not whole");
                    skipped.push(Skipped { path, problem });
                }
            }
        }
        if skipped.is_empty() {
            return Ok(None);
        }
        let skipped: Vec<String> = skipped
            .iter()
            .map(|Skipped { path, problem }| format!("{}: {problem}", path.display()))
            .collect();
        Err(self.error(format!(
            "holds no whole checkpoint; {}; begin anew in another directory, or delete them",
            skipped.join("; ")
        )))
    }
}

fn file_name(step: u64) -> String {
    format!("{PREFIX}{step:08}{SUFFIX}")
}

/// The step in the name of one of our files.
fn step_of(name: &str) -> Option<u64> {
    let step = name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?.parse().ok()?;
    (file_name(step) == name).then_some(step)
}

fn fine_if_gone(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}
