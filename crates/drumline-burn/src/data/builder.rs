use std::{num::NonZeroUsize, sync::Arc};

use burn::{
    data::{dataloader::batcher::Batcher, dataset::Dataset},
    tensor::Device,
};
use drumline::{
    ProcessGroup,
    sampler::{DistributedSampler, evaluation_shard, shards_of_rank},
};

use super::{
    dealer::Share,
    loader::DistributedDataLoader,
    order::{Order, Parts},
    source::Source,
};
use crate::{
    Error, Result,
    agreement::{agree, same_settings},
};

/// The settings of a [`DistributedDataLoader`], by the names of burn's builder.
#[must_use]
pub struct DataLoaderBuilder<I, O> {
    batcher: Arc<dyn Batcher<I, O>>,
    batch_size: usize,
    seed: Option<u64>,
    num_workers: usize,
    device: Option<Device>,
    drop_last: bool,
    shards: Option<usize>,
}

impl<I: 'static, O: Send + 'static> DataLoaderBuilder<I, O> {
    /// A loader of single samples in their own order, without workers, on the default device.
    pub fn new(batcher: impl Batcher<I, O> + 'static) -> Self {
        Self {
            batcher: Arc::new(batcher),
            batch_size: 1,
            seed: None,
            num_workers: 0,
            device: None,
            drop_last: false,
            shards: None,
        }
    }

    /// How many samples a batch has on each rank. The last batch of an epoch may have fewer, on all ranks alike.
    pub fn batch_size(mut self, batch_size: usize) -> Self {
        self.batch_size = batch_size;
        self
    }

    /// Shuffles the samples in each epoch, over all ranks. All ranks need the same seed.
    pub fn shuffle(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Sets the number of threads that load ahead, two batches each. With 0 the thread that asks for a batch loads it.
    pub fn num_workers(mut self, num_workers: usize) -> Self {
        self.num_workers = num_workers;
        self
    }

    /// The device for which the batcher makes its tensors.
    pub fn set_device(mut self, device: Device) -> Self {
        self.device = Some(device);
        self
    }

    /// Whether to leave out the samples that do not divide evenly over the ranks, instead of repeating some.
    pub fn drop_last(mut self, drop_last: bool) -> Self {
        self.drop_last = drop_last;
        self
    }

    /// Deals the samples to so many shards, in place of ranks, for a training with
    /// [`DdpOptions::shards`](crate::DdpOptions::shards). [`steps`](DistributedDataLoader::steps) gives the batch of a
    /// shard. An iterator gives those of the shards that this rank has, in their order. So a shard has the same samples
    /// on any number of ranks, and any number of ranks can go on in the middle of an epoch.
    pub fn shards(mut self, count: usize) -> Self {
        self.shards = Some(count);
        self
    }

    /// A loader for training: every rank gets equally many samples. All ranks make this call, each with the whole
    /// data set.
    ///
    /// # Errors
    ///
    /// On every rank, if
    ///
    /// - ranks differ in the number of samples, batch size, seed or `drop_last`; the error names rank and setting,
    /// - the batch size is 0,
    /// - there are fewer samples than ranks or shards, or fewer shards than ranks.
    pub fn build(
        self,
        dataset: impl Dataset<I> + 'static,
        group: &ProcessGroup,
    ) -> Result<Arc<DistributedDataLoader<I, O>>> {
        let samples = dataset.len();
        self.check(Purpose::Training, samples, group)?;
        let (count, own) = match self.shards {
            None => (group.world_size(), group.rank()..group.rank() + 1),
            Some(shards) => (shards, shards_of_rank(shards, group.world_size(), group.rank())?),
        };
        let sampler = |parts, part| {
            DistributedSampler::builder(samples, parts, part)
                .shuffle(self.seed.is_some())
                .seed(self.seed.unwrap_or(0))
                .drop_last(self.drop_last)
                .build()
        };
        let (sampler, whole) = (sampler(count, own.start)?, sampler(1, 0)?);
        let parts = Parts { count, own, are_shards: self.shards.is_some() };
        let order = Order::training(sampler, whole, parts, self.non_zero_batch());
        Ok(self.finish(order, dataset, group))
    }

    /// A loader for evaluation: all ranks together get every sample once, in the order of the data set. Their
    /// shares differ in length by at most one and may be empty. [`Totals`](super::Totals) adds up what the ranks
    /// find.
    ///
    /// Each iterator goes through the whole share. `shuffle` and `drop_last` have no meaning here.
    ///
    /// # Errors
    ///
    /// On every rank, if ranks differ in the number of samples or in batch size, or the batch size is 0.
    pub fn build_shard(
        self,
        dataset: impl Dataset<I> + 'static,
        group: &ProcessGroup,
    ) -> Result<Arc<DistributedDataLoader<I, O>>> {
        self.check(Purpose::Evaluation, dataset.len(), group)?;
        let shard = evaluation_shard(dataset.len(), group.world_size(), group.rank())?;
        Ok(self.finish(Order::shard(shard), dataset, group))
    }

    fn check(&self, purpose: Purpose, samples: usize, group: &ProcessGroup) -> Result<()> {
        let invalid = |problem| Error::argument("DataLoaderBuilder::build", problem);
        let seed = self.seed.map_or("none".to_owned(), |seed| seed.to_string());
        let mut settings = vec![
            ("purpose", format!("{purpose:?}").to_lowercase()),
            ("number of samples", samples.to_string()),
            ("batch size", self.batch_size.to_string()),
        ];
        if purpose == Purpose::Training {
            let shards = self.shards.map_or("none".to_owned(), |count| count.to_string());
            let drop_last = self.drop_last.to_string();
            settings.extend([("seed", seed), ("drop_last", drop_last), ("shards", shards)]);
        }
        same_settings(group, &settings)?
            .map_err(|problem| invalid(format!("the ranks differ: {problem}")))?;
        agree(group, self.problem(purpose, samples, group.world_size()).map_or(Ok(()), Err))?
            .map_err(invalid)
    }

    /// What is wrong with the settings, which are alike on all ranks.
    fn problem(&self, purpose: Purpose, samples: usize, world_size: usize) -> Option<String> {
        if self.batch_size == 0 {
            return Some("the batch size is 0; no batch would ever be full".into());
        }
        let (parts, what) = self.shards.map_or((world_size, "ranks"), |count| (count, "shards"));
        (purpose == Purpose::Training && samples < parts).then(|| {
            format!(
                "{samples} samples are too few for {parts} {what}; use fewer {what} or more samples"
            )
        })
    }

    /// The batch size, which was checked.
    fn non_zero_batch(&self) -> NonZeroUsize {
        NonZeroUsize::new(self.batch_size).unwrap_or(NonZeroUsize::MIN)
    }

    fn finish(
        self,
        order: Order,
        dataset: impl Dataset<I> + 'static,
        group: &ProcessGroup,
    ) -> Arc<DistributedDataLoader<I, O>> {
        let batch_size = self.non_zero_batch();
        let source = Source {
            dataset: Arc::new(dataset),
            batcher: self.batcher,
            device: self.device.unwrap_or_default(),
            share: Share { rank: group.rank(), world_size: group.world_size() },
        };
        Arc::new(DistributedDataLoader::new(order, source, batch_size, self.num_workers))
    }
}

impl<I, O> std::fmt::Debug for DataLoaderBuilder<I, O> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DataLoaderBuilder")
            .field("batch_size", &self.batch_size)
            .field("seed", &self.seed)
            .field("num_workers", &self.num_workers)
            .field("drop_last", &self.drop_last)
            .finish_non_exhaustive()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Training,
    Evaluation,
}
