//! Loads one batch, whatever data set and batcher do.

use std::{
    any::Any,
    fmt::Display,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use burn::{
    data::{
        dataloader::batcher::Batcher,
        dataset::{Dataset, DatasetError},
    },
    tensor::Device,
};

use super::dealer::Share;
use crate::{Error, failure};

/// Where batches come from.
pub(super) struct Source<I, O> {
    pub(super) dataset: Arc<dyn Dataset<I>>,
    pub(super) batcher: Arc<dyn Batcher<I, O>>,
    pub(super) device: Device,
    pub(super) share: Share,
}

impl<I, O> Clone for Source<I, O> {
    fn clone(&self) -> Self {
        Self {
            dataset: self.dataset.clone(),
            batcher: self.batcher.clone(),
            device: self.device.clone(),
            share: self.share,
        }
    }
}

impl<I, O> Source<I, O> {
    pub(super) fn load(&self, samples: &[usize]) -> Result<O, DatasetError> {
        let load = || -> Result<O, DatasetError> {
            let items = self.dataset.get_many(samples.to_vec())?;
            Ok(self.batcher.batch(items, &self.device))
        };
        // After a panic nothing of this batch is used again.
        let error = match catch_unwind(AssertUnwindSafe(load)) {
            Ok(Ok(batch)) => return Ok(batch),
            Ok(Err(error)) => self.error(samples, error.to_string()).with(Arc::new(error)),
            Err(panic) => {
                let text = text_of(panic.as_ref());
                self.error(samples, format!("the data set or the batcher panicked: {text}"))
            }
        };
        Err(DatasetError::new(error))
    }

    /// The error within the [`DatasetError`] that the iterator delivers. After one of the data set, that is its detail.
    pub(super) fn error(&self, samples: &[usize], problem: impl Display) -> Error {
        failure::data(self.share.rank, samples, problem)
    }
}

/// The message of a panic.
pub(crate) fn text_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref().map(String::as_str)).unwrap_or("without a message")
}
