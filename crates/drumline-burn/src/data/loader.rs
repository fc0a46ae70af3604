use std::{
    fmt, io,
    marker::PhantomData,
    num::NonZeroUsize,
    sync::{Arc, Mutex, PoisonError},
};

use burn::{
    data::{
        dataloader::{DataLoader, DataLoaderIterator, Progress},
        dataset::DatasetError,
    },
    tensor::Device,
};
use drumline::sampler::SamplerState;

use super::{
    batches::Batches,
    dealer::{self, Dealer},
    order::Order,
    source::Source,
    steps::Steps,
    workers::Workers,
};
use crate::{Error, Result, checkpoint::DataPosition};

/// A `DataLoader` of burn with one rank's share of the samples. [`DataLoaderBuilder`](super::DataLoaderBuilder) makes
/// it.
///
/// A `Learner` takes it as any loader of burn, and `drumline_burn::distribute` knows it. In a checkpoint it stands in place of the sampler:
///
/// ```
/// # use burn::{
/// #     data::{dataloader::{DataLoader, batcher::Batcher}, dataset::InMemDataset},
/// #     nn::LinearConfig, optim::SgdConfig, tensor::Device,
/// # };
/// # use drumline::ProcessGroup;
/// # use drumline_burn::{checkpoint::{Checkpoints, TrainingState}, data::DataLoaderBuilder};
/// # struct Items;
/// # impl Batcher<u8, Vec<u8>> for Items {
/// #     fn batch(&self, items: Vec<u8>, _: &Device) -> Vec<u8> { items }
/// # }
/// # let temporary = tempfile::tempdir().unwrap();
/// # let out = temporary.path().join("out");
/// # let (group, device) = (ProcessGroup::alone(), Device::flex().autodiff());
/// # let data = || InMemDataset::new((0..10).collect());
/// let checkpoints = Checkpoints::open(&out, &group)?;
/// let state = |workers| {
///     let builder = DataLoaderBuilder::new(Items).batch_size(3).num_workers(workers);
///     let model = LinearConfig::new(2, 1).init(&device);
///     let loader = builder.build(data(), &group)?;
///     Ok::<_, drumline_burn::Error>(TrainingState::new(model, SgdConfig::new()).sampler(loader))
/// };
/// let training = state(0)?;
/// let mut batches = training.sampler.iter();
/// assert_eq!(batches.next().unwrap().ok(), Some(vec![0, 1, 2]));
/// checkpoints.save(&training)?; // in the middle of an epoch
///
/// let training = checkpoints.resume(state(4)?)?;
/// assert_eq!(training.sampler.iter().next().unwrap().ok(), Some(vec![3, 4, 5]));
/// # Ok::<_, drumline_burn::Error>(())
/// ```
pub struct DistributedDataLoader<I, O> {
    order: Order,
    source: Arc<Source<I, O>>,
    batch_size: NonZeroUsize,
    num_workers: usize,
    /// Started by the first iterator.
    workers: Mutex<Option<Arc<Workers<O>>>>,
}

impl<I: 'static, O: Send + 'static> DistributedDataLoader<I, O> {
    pub(super) fn new(
        order: Order,
        source: Source<I, O>,
        batch_size: NonZeroUsize,
        num_workers: usize,
    ) -> Self {
        let (source, workers) = (Arc::new(source), Mutex::default());
        Self { order, source, batch_size, num_workers, workers }
    }

    /// The epoch that an iterator goes through now, or the next one will. `None` for a shard.
    pub fn epoch(&self) -> Option<u64> {
        self.order.state().map(|state| state.epoch)
    }

    /// Goes to the beginning of an epoch. Not needed in a loop over epochs: the end of an iterator does it.
    ///
    /// It has no effect on a shard, nor on iterators that exist already.
    pub fn set_epoch(&self, epoch: u64) {
        self.order.set_epoch(epoch);
    }

    /// The batches of the epoch by step and shard, for a training with [`DdpOptions::shards`](crate::DdpOptions::shards).
    /// It begins where an iterator would.
    ///
    /// # Errors
    ///
    /// The loader was built without [`shards`](super::DataLoaderBuilder::shards), or no thread can be started.
    pub fn steps(&self) -> Result<Steps<'_, I, O>> {
        let pass = self.order.begin_steps().ok_or_else(|| {
            let problem = "the samples are not dealt to shards: give `DataLoaderBuilder::shards` their number, and call \
                           `build`";
            Error::argument("DistributedDataLoader::steps", problem)
        })?;
        let workers = self.workers().map_err(|error| self.no_thread(&error))?;
        Ok(Steps::new(&self.order, &self.source, self.batch_size.get(), pass, workers))
    }

    fn no_thread(&self, error: &io::Error) -> Error {
        self.source.error(&[], format!("no thread can be started: {error}"))
    }

    fn workers(&self) -> io::Result<Option<Arc<Workers<O>>>> {
        let Some(count) = NonZeroUsize::new(self.num_workers) else { return Ok(None) };
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        if workers.is_none() {
            *workers = Some(Workers::start(count, &self.source)?);
        }
        Ok(workers.clone())
    }
}

impl<I: 'static, O: Send + 'static> DataLoader<O> for DistributedDataLoader<I, O> {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<O> + 'a> {
        match self.workers() {
            Ok(workers) => {
                Box::new(Batches::new(&self.order, &self.source, self.batch_size, workers))
            }
            Err(error) => {
                let error = DatasetError::new(self.no_thread(&error));
                Box::new(Failed(Some(error), PhantomData))
            }
        }
    }

    /// The number of samples that this rank gets in an epoch.
    fn num_items(&self) -> usize {
        dealer::answer(|| Dealer { share: self.source.share, order: self.order.clone() });
        self.order.len()
    }

    /// The same loader for another device. The two share the place in the data.
    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<O>> {
        let source = Source { device: device.clone(), ..Source::clone(&self.source) };
        Arc::new(Self::new(self.order.clone(), source, self.batch_size, self.num_workers))
    }

    /// A loader of some of this rank's samples: in each epoch, those that this loader delivers as its items `start` to
    /// `end`. It has a place of its own.
    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<O>> {
        let source = Source::clone(&self.source);
        Arc::new(Self::new(self.order.part(start, end), source, self.batch_size, self.num_workers))
    }
}

impl<I: 'static, O: Send + 'static> DataPosition for Arc<DistributedDataLoader<I, O>> {
    fn state(&self) -> Option<SamplerState> {
        self.order.state()
    }

    fn resume(&mut self, state: &SamplerState) -> drumline::Result<()> {
        self.order.change(|sampler| sampler.resume(state))
    }
}

impl<I, O> fmt::Debug for DistributedDataLoader<I, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DistributedDataLoader")
            .field("samples", &self.order.len())
            .field("batch_size", &self.batch_size)
            .field("num_workers", &self.num_workers)
            .field("state", &self.order.state())
            .finish_non_exhaustive()
    }
}

/// An iterator that delivers an error and ends.
struct Failed<O>(Option<DatasetError>, PhantomData<O>);

impl<O> Iterator for Failed<O> {
    type Item = std::result::Result<O, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.take().map(Err)
    }
}

impl<O> DataLoaderIterator<O> for Failed<O> {
    fn progress(&self) -> Progress {
        Progress::new(0, 0, Some("items".into()))
    }
}
