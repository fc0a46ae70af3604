//! Loads one batch, whatever data set and batcher do.

use std::{
    any::Any,
    error::Error,
    fmt,
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

/// Why a batch could not be loaded. It is the error within the [`DatasetError`] that the iterator delivers.
///
/// ```
/// use burn::{
///     data::{
///         dataloader::{DataLoader, batcher::Batcher},
///         dataset::InMemDataset,
///     },
///     tensor::Device,
/// };
/// use drumline::ProcessGroup;
/// use drumline_burn::data::{DataLoaderBuilder, LoadError};
///
/// struct Divide;
///
/// impl Batcher<u32, u32> for Divide {
///     fn batch(&self, items: Vec<u32>, _: &Device) -> u32 {
///         items.into_iter().reduce(|a, b| a / b).unwrap_or(0)
///     }
/// }
///
/// let data = InMemDataset::new(vec![8, 2, 1, 0]);
/// let loader = DataLoaderBuilder::new(Divide)
///     .batch_size(2)
///     .num_workers(1)
///     .build(data, &ProcessGroup::alone())?;
/// let mut batches = loader.iter();
/// assert_eq!(batches.next().unwrap().ok(), Some(4));
/// let error = batches.next().unwrap().unwrap_err().to_string();
/// assert!(error.contains("rank 0 cannot load samples 2, 3: "), "{error}");
/// assert!(error.contains("panicked: attempt to divide by zero"), "{error}");
/// assert!(batches.next().is_none());
/// # let _: Option<LoadError> = None;
/// # Ok::<_, drumline_burn::Error>(())
/// ```
#[non_exhaustive]
pub struct LoadError {
    /// The rank.
    pub rank: usize,
    /// The indices of the samples of the batch.
    pub samples: Vec<usize>,
    /// What happened.
    pub problem: String,
    /// The error of the data set; `None` after a panic.
    pub cause: Option<DatasetError>,
}

impl<I, O> Source<I, O> {
    pub(super) fn load(&self, samples: &[usize]) -> Result<O, DatasetError> {
        let load = || -> Result<O, DatasetError> {
            let items = self.dataset.get_many(samples.to_vec())?;
            Ok(self.batcher.batch(items, &self.device))
        };
        // After a panic nothing of this batch is used again.
        match catch_unwind(AssertUnwindSafe(load)) {
            Ok(Ok(batch)) => Ok(batch),
            Ok(Err(cause)) => Err(self.error(samples, cause.to_string(), Some(cause))),
            Err(panic) => {
                let text = text_of(panic.as_ref());
                Err(self.error(
                    samples,
                    format!("the data set or the batcher panicked: {text}"),
                    None,
                ))
            }
        }
    }

    pub(super) fn error(
        &self,
        samples: &[usize],
        problem: String,
        cause: Option<DatasetError>,
    ) -> DatasetError {
        let (rank, samples) = (self.share.rank, samples.to_vec());
        DatasetError::new(LoadError { rank, samples, problem, cause })
    }
}

/// The message of a panic.
pub(crate) fn text_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref().map(String::as_str)).unwrap_or("without a message")
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// A longer list would not help.
        const NAMED_MAX: usize = 4;
        let named: Vec<String> =
            self.samples.iter().take(NAMED_MAX).map(usize::to_string).collect();
        write!(f, "rank {} cannot load samples {}", self.rank, named.join(", "))?;
        match self.samples.len().saturating_sub(NAMED_MAX) {
            0 => {}
            more => write!(f, " and {more} more")?,
        }
        write!(f, ": {}", self.problem)
    }
}

/// The text for users, which `unwrap` and a `main` that returns an error print.
impl fmt::Debug for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error for LoadError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.cause.as_ref().map(|cause| cause as &dyn Error)
    }
}
