//! The state of a learning-rate scheduler as tensors without dimensions: `scheduler.0.current_iter`.

use burn::lr_scheduler::{LrSchedulerRecord, module_lr_scheduler::ModuleLrScheduler};
use drumline::checkpoint::{Checkpoint, Tensor};

use super::record::{Entry, Record};

/// What the names of a scheduler's tensors in a checkpoint begin with.
pub(super) const PREFIX: &str = "scheduler.";

/// A scheduler whose state a checkpoint can hold: burn's [`ModuleLrScheduler`], which `init()` of every
/// scheduler makes, or `()` for none.
///
/// ```
/// use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
/// use drumline_burn::checkpoint::SchedulerState;
///
/// fn can_be_saved(_: &impl SchedulerState) {}
/// can_be_saved(&CosineAnnealingLrSchedulerConfig::new(0.1, 100).init().unwrap());
/// can_be_saved(&());
/// ```
pub trait SchedulerState: sealed::Saved {}

impl SchedulerState for ModuleLrScheduler {}
impl SchedulerState for () {}

mod sealed {
    use super::*;

    pub trait Saved: Sized {
        fn to_tensors(&self) -> Result<Vec<Tensor>, String>;
        fn with_tensors(self, from: &Checkpoint) -> Result<Self, String>;
    }
}

impl sealed::Saved for () {
    fn to_tensors(&self) -> Result<Vec<Tensor>, String> {
        Ok(Vec::new())
    }

    fn with_tensors(self, _: &Checkpoint) -> Result<(), String> {
        Ok(())
    }
}

impl sealed::Saved for ModuleLrScheduler {
    fn to_tensors(&self) -> Result<Vec<Tensor>, String> {
        let bytes = self.to_record().into_bytes().map_err(|error| error.to_string())?;
        let entries = Record::from_bytes(bytes)?.entries.into_iter();
        entries.map(|(name, entry)| entry.into_tensor(format!("{PREFIX}{name}"))).collect()
    }

    fn with_tensors(self, from: &Checkpoint) -> Result<Self, String> {
        let mut record = Record::default();
        for (name, tensor) in from.section(PREFIX) {
            record.entries.insert(name.to_owned(), Entry::from_tensor(tensor, None)?);
        }
        let record = LrSchedulerRecord::from_bytes(record.into_bytes()?);
        Ok(self.load_record(record.map_err(|error| error.to_string())?))
    }
}

/// Adds the state of a scheduler to a checkpoint.
pub(super) fn save(
    scheduler: &impl SchedulerState,
    checkpoint: &mut Checkpoint,
) -> Result<(), String> {
    for tensor in scheduler.to_tensors()? {
        checkpoint.insert(tensor);
    }
    Ok(())
}

/// Gives a scheduler the state in a checkpoint.
pub(super) fn load<S: SchedulerState>(scheduler: S, checkpoint: &Checkpoint) -> Result<S, String> {
    // burn leaves a scheduler as it is if the record does not fit it.
    let scheduler = scheduler.with_tensors(checkpoint)?;
    let mut loaded = Checkpoint::default();
    save(&scheduler, &mut loaded)?;
    for (name, tensor) in checkpoint.section(PREFIX) {
        if loaded.tensor(tensor.name()) != Some(tensor) {
            return Err(format!(
                "it is of another scheduler: this run has no use for {PREFIX}{name}"
            ));
        }
    }
    match loaded.tensors().find(|tensor| checkpoint.tensor(tensor.name()).is_none()) {
        None => Ok(scheduler),
        Some(missing) => {
            Err(format!("it is of another scheduler: it does not hold {}", missing.name()))
        }
    }
}
