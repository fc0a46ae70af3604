use std::path::{Path, PathBuf};

use burn::module::Module;
use drumline::{
    ProcessGroup,
    checkpoint::{Checkpoint, CheckpointDirectory},
};

use super::{DataPosition, OptimizerState, SchedulerState, TrainingState};
use crate::{
    Error, Result,
    agreement::{agree, same_settings},
};

/// The checkpoints of a training, in a directory. Rank 0 reads and writes; the other ranks need not see the
/// files.
///
/// All ranks make the same calls. All get the same outcome: if one rank cannot go on, every rank gets an error.
#[derive(Debug)]
pub struct Checkpoints {
    directory: CheckpointDirectory,
    group: ProcessGroup,
}

impl Checkpoints {
    /// Opens a directory, which rank 0 makes if it is missing. Keeps the last three checkpoints.
    ///
    /// # Errors
    ///
    /// No file can be written there. Every rank gets the error now, and not after an hour of training.
    pub fn open(directory: impl Into<PathBuf>, group: &ProcessGroup) -> Result<Self> {
        Self::open_with(CheckpointDirectory::new(directory), group)
    }

    /// [`open`](Self::open) with another number of files that are kept.
    ///
    /// # Errors
    ///
    /// As for [`open`](Self::open).
    pub fn open_with(directory: CheckpointDirectory, group: &ProcessGroup) -> Result<Self> {
        directory.prepare_on_root(group)?;
        Ok(Self { directory, group: group.clone() })
    }

    /// The same checkpoints for the ranks of another group: those that are left of an
    /// [`ElasticGroup`](drumline::ElasticGroup).
    #[must_use]
    pub fn over(&self, group: &ProcessGroup) -> Self {
        Self { directory: self.directory.clone(), group: group.clone() }
    }

    /// Goes on from the newest whole checkpoint in the directory, if there is one. Returns `state` as it is if
    /// there is none. [`resumed_from`](TrainingState::resumed_from) tells which.
    ///
    /// Call it before or after [`wrap`](crate::DistributedDataParallel::wrap).
    ///
    /// # Errors
    ///
    /// On every rank, before the first step:
    ///
    /// - The checkpoint is of another model, optimizer, scheduler or data, or of other
    ///   [settings](TrainingState::setting). The error names the parameter or the setting.
    /// - The settings differ between ranks. The error names the rank.
    /// - There are files, but none is whole.
    pub fn resume<M: Module, O: OptimizerState, S: SchedulerState, P: DataPosition>(
        &self,
        state: TrainingState<M, O, S, P>,
    ) -> Result<TrainingState<M, O, S, P>> {
        self.check_settings(&state)?;
        match self.directory.newest_on_root(&self.group)? {
            None => Ok(state),
            Some(found) => self.load(state, found.path, found.checkpoint),
        }
    }

    /// Goes on from the checkpoint at `path`: a file, or a directory, whose newest whole checkpoint is taken.
    /// Later checkpoints still go to the directory that was opened.
    ///
    /// # Errors
    ///
    /// As for [`resume`](Self::resume). Also if there is no checkpoint.
    pub fn resume_from<M: Module, O: OptimizerState, S: SchedulerState, P: DataPosition>(
        &self,
        path: &Path,
        state: TrainingState<M, O, S, P>,
    ) -> Result<TrainingState<M, O, S, P>> {
        self.check_settings(&state)?;
        // Only rank 0 needs to see the path.
        let mut is_file = [u8::from(path.is_file())];
        self.group.broadcast(&mut is_file, 0)?;
        if is_file == [1] {
            let checkpoint = Checkpoint::read_on_root(&self.group, path)?;
            return self.load(state, path.to_owned(), checkpoint);
        }
        match CheckpointDirectory::new(path).newest_on_root(&self.group)? {
            Some(found) => self.load(state, found.path, found.checkpoint),
            None => Err(failure(
                path,
                "holds no checkpoint; check the path, or start without resuming from it".into(),
            )),
        }
    }

    /// Saves the state of training under the number of its steps. When it returns, the file is on the disk.
    ///
    /// Call it between steps, for example every hundred: `if training.steps.is_multiple_of(100)`. It saves rank
    /// 0's running statistics (batch normalisation), which are the ones that
    /// [`sync_buffers`](crate::DistributedDataParallel::sync_buffers) copies.
    ///
    /// State of a [`ShardedOptimizer`](crate::ShardedOptimizer) comes from all ranks, so rank 0 needs memory for all of
    /// it.
    ///
    /// The checkpoint becomes the newest one: files of later steps belong to a run that was given up, and are
    /// deleted.
    ///
    /// # Errors
    ///
    /// On every rank, if the file cannot be written. The older checkpoints are then as they were.
    pub fn save<M: Module, O: OptimizerState, S: SchedulerState, P: DataPosition>(
        &self,
        state: &TrainingState<M, O, S, P>,
    ) -> Result<()> {
        let path = self.directory.path_of(state.steps);
        let failure = |problem| failure(&path, problem);
        let gather = |part: Result<Checkpoint, String>| {
            Checkpoint::gather_on_root(&self.group, &path, part.map_err(failure))
        };
        let optimizer = state.optimizer_part().map(gather).transpose()?;
        self.directory.save_on_root(&self.group, state.steps, || {
            state.to_checkpoint(optimizer).map_err(failure)
        })
    }

    /// The directory: which steps have a file, and where.
    pub fn directory(&self) -> &CheckpointDirectory {
        &self.directory
    }

    fn check_settings<M, O, S, P>(&self, state: &TrainingState<M, O, S, P>) -> Result<()> {
        let settings: Vec<(&str, String)> =
            state.settings().map(|(name, value)| (name, value.to_owned())).collect();
        same_settings(&self.group, &settings)?.map_err(|problem| {
            let problem = format!("the settings differ between ranks: {problem}");
            failure(self.directory.path(), problem)
        })
    }

    fn load<M: Module, O: OptimizerState, S: SchedulerState, P: DataPosition>(
        &self,
        state: TrainingState<M, O, S, P>,
        path: PathBuf,
        checkpoint: Checkpoint,
    ) -> Result<TrainingState<M, O, S, P>> {
        let loaded = state.load(path.clone(), checkpoint);
        agree(&self.group, loaded)?.map_err(|problem| failure(&path, problem))
    }
}

fn failure(path: &Path, problem: String) -> Error {
    drumline::train::failure::checkpoint(path, problem)
}
