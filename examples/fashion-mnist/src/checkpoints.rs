//! When and where checkpoints are saved, and from which one training is resumed.

use std::{
    num::{NonZeroU64, NonZeroUsize},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use drumline::{
    ProcessGroup,
    checkpoint::{Checkpoint, CheckpointDirectory},
    sampler::DistributedSampler,
};

use crate::{
    curve::GatheredLosses,
    state::{Settings, State},
};

/// Saves the state of training into a directory.
pub(crate) struct Checkpoints {
    directory: CheckpointDirectory,
    every: Option<NonZeroU64>,
    settings: Settings,
}

impl Checkpoints {
    /// Saves in `out`, keeps the last `keep` files, and saves within epochs every `every` steps.
    pub(crate) fn new(
        out: &Path,
        keep: NonZeroUsize,
        every: Option<NonZeroU64>,
        settings: Settings,
    ) -> Self {
        Self { directory: CheckpointDirectory::new(out).keep(keep), every, settings }
    }

    /// Checks on rank 0 that checkpoints can be saved.
    pub(crate) fn prepare(&self, group: &ProcessGroup) -> Result<()> {
        Ok(self.directory.prepare_on_root(group)?)
    }

    /// Whether there are checkpoints of later steps, which the next one replaces.
    pub(crate) fn has_later_than(&self, steps: u64) -> Result<bool> {
        Ok(self.directory.steps()?.last().is_some_and(|last| *last > steps))
    }

    /// Whether to save in the middle of an epoch, after `steps` steps in all.
    pub(crate) fn is_due(&self, steps: u64) -> bool {
        self.every.is_some_and(|every| steps.is_multiple_of(every.get()))
    }

    /// Saves a checkpoint. All ranks must call this. In the middle of an epoch, `losses` are its losses so
    /// far.
    pub(crate) fn save(
        &self,
        state: &State,
        sampler: &DistributedSampler,
        losses: Option<&GatheredLosses>,
        group: &ProcessGroup,
    ) -> Result<()> {
        self.directory.save_on_root(group, state.steps, || {
            let mut checkpoint = state.save(&self.settings, sampler)?;
            if let Some(losses) = losses {
                losses.save(&mut checkpoint)?;
            }
            Ok(checkpoint)
        })
    }

    /// The path of the checkpoint of a step.
    pub(crate) fn path_of(&self, steps: u64) -> PathBuf {
        self.directory.path_of(steps)
    }

    /// Resumes from the checkpoint at `path`, or from the newest one if `path` is a directory. Returns the
    /// path of the checkpoint.
    pub(crate) fn resume(
        &self,
        path: &Path,
        state: State,
        sampler: &mut DistributedSampler,
        group: &ProcessGroup,
    ) -> Result<(State, PathBuf)> {
        // Only rank 0 needs to see the path.
        let mut is_file = [u8::from(path.is_file())];
        group.broadcast(&mut is_file, 0)?;
        let (path, saved) = if is_file == [1] {
            (path.to_owned(), Checkpoint::read_on_root(group, path)?)
        } else {
            let found = CheckpointDirectory::new(path).newest_on_root(group)?;
            let found = found.with_context(|| {
                format!(
                    "{} holds no checkpoint; check the path, or start without --resume",
                    path.display()
                )
            })?;
            (found.path, found.checkpoint)
        };
        let state = state
            .load(&saved, &self.settings, sampler, group)
            .with_context(|| format!("cannot resume from {}", path.display()))?;
        Ok((state, path))
    }
}
