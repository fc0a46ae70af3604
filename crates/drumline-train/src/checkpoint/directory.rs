use std::{
    io,
    num::NonZeroUsize,
    path::{Path, PathBuf},
};

use super::{
    Checkpoint, Refusal,
    disk::{Disk, SystemDisk},
    replace, why_not_written,
};
use crate::{Error, Result};

/// A directory of checkpoints, one file per saved step: `step-00001200.safetensors`.
///
/// [`save`](Self::save) puts a new file beside the old ones, and deletes those that are no longer
/// kept only when the new one is on the disk. So whenever the process, the machine or the disk
/// fails, the directory holds the last whole checkpoint or the one before it. After a save,
/// [`newest`](Self::newest) finds that one.
///
/// The methods whose names end in `_on_root` are for all ranks of a group together.
///
/// ```
/// use drumline::checkpoint::{Checkpoint, CheckpointDirectory, Tensor};
///
/// # fn main() -> drumline::train::Result<()> {
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
/// directory.prepare()?; // Notices now, not after an hour, that nothing can be written.
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
/// # Ok::<_, drumline::train::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Found {
    /// After how many steps it was saved.
    pub step: u64,
    /// Its file.
    pub path: PathBuf,
    /// What is in it.
    pub checkpoint: Checkpoint,
    /// Files of later steps that are not whole, the latest first.
    pub skipped: Vec<Skipped>,
}

/// A file that [`CheckpointDirectory::newest`] could not use.
///
/// ```
/// # use drumline::checkpoint::{Checkpoint, CheckpointDirectory, Skipped};
/// # let temporary = tempfile::tempdir().unwrap();
/// let directory = CheckpointDirectory::new(temporary.path());
/// directory.save(100, &Checkpoint::default())?;
/// std::fs::write(directory.path_of(200), "cut sho").unwrap();
///
/// let skipped: Vec<Skipped> = directory.newest()?.expect("there is one").skipped;
/// assert_eq!(skipped.len(), 1);
/// assert!(skipped[0].path.ends_with("step-00000200.safetensors"));
/// println!("not from {}: {}", skipped[0].path.display(), skipped[0].problem);
/// # Ok::<_, drumline::train::Error>(())
/// ```
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
    /// Checkpoints at `path`, which need not exist yet; the last three are kept. Touches no disk.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        const KEEP: NonZeroUsize = NonZeroUsize::MIN.saturating_add(2);
        Self { path: path.into(), keep: KEEP }
    }

    /// Keeps so many files. While one is written there is one more.
    #[must_use]
    pub fn keep(mut self, files: NonZeroUsize) -> Self {
        self.keep = files;
        self
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file of a step.
    pub fn path_of(&self, step: u64) -> PathBuf {
        self.path.join(file_name(step))
    }

    /// The steps of which there is a file, whole or not, in order. None if there is no directory.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] when the directory cannot be read.
    pub fn steps(&self) -> Result<Vec<u64>> {
        self.steps_on(&SystemDisk)
    }

    /// Makes the directory if it is missing, and makes sure that files can be written there.
    ///
    /// Call it before training, so that hours of work are not lost for want of a permission.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] says what is wrong with the directory.
    pub fn prepare(&self) -> Result<()> {
        self.prepare_on(&SystemDisk)
    }

    /// Writes the checkpoint of a step, then deletes the files that are not kept.
    ///
    /// It becomes the newest one: files of later steps are of a training that was not gone on with,
    /// and are deleted as well. So are unfinished files that a process left behind when it died;
    /// never those of a process that still writes.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] when it cannot be written; then all files are as they were. Or when a
    /// file of a later step cannot be deleted. (If an old file cannot be deleted, only a warning
    /// says so.)
    pub fn save(&self, step: u64, checkpoint: &Checkpoint) -> Result<PathBuf> {
        self.save_on(&SystemDisk, step, checkpoint)
    }

    /// Reads the whole checkpoint of the latest step. None when there is no file of any step.
    ///
    /// Files that are cut short, damaged or unreadable are skipped; the result and a warning name
    /// them.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] when there are files but none is whole, so that nobody begins anew
    /// without knowing; when the latest was written by a newer version of this crate; or when the
    /// directory cannot be read.
    pub fn newest(&self) -> Result<Option<Found>> {
        self.newest_on(&SystemDisk)
    }

    pub(super) fn error(&self, problem: String) -> Error {
        Error::Checkpoint { path: self.path.clone(), problem }
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
        // One after the other, the latest last and each for good: at every moment the newest one is
        // either still that of before or already the new one.
        for later in later {
            let path = self.path_of(later);
            let removed = disk.remove(&path).or_else(fine_if_gone);
            removed.and_then(|()| disk.sync_directory(&self.path)).map_err(|error| {
                let problem = format!(
                    "it cannot be deleted: {error}; delete it, because it is of a later step than \
                     the checkpoint that was just saved, and resuming would go on from it"
                );
                Error::Checkpoint { path, problem }
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
                Err(Refusal::Missing) => {} // Another process has deleted it since.
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
