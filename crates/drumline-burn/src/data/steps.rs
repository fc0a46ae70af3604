//! Batches by step and shard, in any order.

use std::{collections::VecDeque, fmt, ops::Range, sync::Arc};

use burn::data::dataset::DatasetError;

use super::{
    order::{Order, Pass},
    source::Source,
    workers::{Queue, Workers},
};
use crate::Error;

/// The batches of one epoch, by step and shard. [`DistributedDataLoader::steps`](super::DistributedDataLoader::steps)
/// makes it.
///
/// As an iterator it gives the numbers of the epoch's steps. Behind the last one the next epoch begins. If a program leaves
/// an epoch in the middle, or saves a checkpoint there, the place in the data is behind the last step that [`of`](Self::of)
/// was asked for. So save between two steps, not in the middle of one.
///
/// ```
/// use burn::{
///     data::{dataloader::batcher::Batcher, dataset::InMemDataset},
///     nn::{Linear, LinearConfig},
///     optim::SgdConfig,
///     tensor::{Device, Tensor, TensorData},
/// };
/// use drumline::ProcessGroup;
/// use drumline_burn::{DdpOptions, DistributedDataParallel, data::DataLoaderBuilder};
///
/// struct Rows;
///
/// impl Batcher<f32, Tensor<2>> for Rows {
///     fn batch(&self, items: Vec<f32>, device: &Device) -> Tensor<2> {
///         let rows = items.len() / 2;
///         Tensor::from_data(TensorData::new(items[..2 * rows].to_vec(), [rows, 2]), device)
///     }
/// }
///
/// let (group, device) = (ProcessGroup::alone(), Device::flex().autodiff());
/// let data = InMemDataset::new((0..64).map(|i| i as f32).collect());
/// let builder = DataLoaderBuilder::new(Rows).batch_size(4).shuffle(7).set_device(device.clone());
/// let loader = builder.shards(8).build(data, &group)?;
/// let (ddp, mut model): (_, Linear) = DistributedDataParallel::wrap_with(
///     LinearConfig::new(2, 1).init(&device),
///     &group,
///     &DdpOptions::default().shards(8),
/// )?;
/// let (mut optimizer, mut number) = (SgdConfig::new().init(), 0);
/// for _epoch in 0..2 {
///     let mut batches = loader.steps()?;
///     while let Some(step) = batches.next() {
///         let loss = |shard| Ok(model.forward(batches.of(step, shard)?).square().mean());
///         let averages = ddp.step(number, loss, &model)?.gradients;
///         model = optimizer.step(0.001, model, averages);
///         number += 1;
///     }
/// }
/// assert_eq!(number, 4);
/// # Ok::<_, drumline_burn::Error>(())
/// ```
pub struct Steps<'a, I, O> {
    order: &'a Order,
    source: &'a Source<I, O>,
    batch_size: usize,
    pass: Pass,
    left: Range<usize>,
    /// `None` if this thread loads the batches.
    ahead: Option<Ahead<O>>,
    /// The batch that was asked for last could not be loaded.
    has_failed: bool,
    has_ended: bool,
}

/// The batches that workers load before they are asked for. They suppose that a step is asked for as the one before.
struct Ahead<O> {
    queue: Queue<O>,
    /// Step and shard of each batch in the queue.
    ordered: VecDeque<(usize, usize)>,
    /// The shards of a step.
    run: Range<usize>,
    /// The step that was asked for last, and its shards so far.
    step: usize,
    asked: Range<usize>,
}

impl<'a, I, O> Steps<'a, I, O> {
    /// A pass over all shards, of which this rank has `own`.
    pub(super) fn new(
        order: &'a Order,
        source: &'a Source<I, O>,
        batch_size: usize,
        (pass, own): (Pass, Range<usize>),
        workers: Option<Arc<Workers<O>>>,
    ) -> Self {
        let count = (pass.indices.len() / pass.parts).div_ceil(batch_size);
        let left = pass.steps_before..pass.steps_before + count;
        let ahead = workers.map(|workers| Ahead {
            queue: Queue::new(workers),
            ordered: VecDeque::new(),
            run: own,
            step: left.start,
            asked: 0..0,
        });
        Self { order, source, batch_size, pass, left, ahead, has_failed: false, has_ended: false }
    }

    /// The steps of the epoch that are left: from the next one up to the number of all.
    pub fn left(&self) -> Range<usize> {
        self.left.clone()
    }

    /// The batch of a shard in a step of this epoch: the same on any rank, whenever it is asked for, and also again.
    ///
    /// The workers load ahead if a step's shards come in their order, the same ones in each step. Others are loaded at once.
    ///
    /// # Errors
    ///
    /// There is no such shard, or no such step left in the epoch: the steps before the place where this object was made
    /// are over. Or the batch cannot be loaded; the error names the rank and the samples.
    pub fn of(&mut self, step: usize, shard: usize) -> Result<O, DatasetError> {
        if let Some(problem) = self.find_problem(step, shard) {
            return Err(DatasetError::new(Error::argument("Steps::of", problem)));
        }
        let loaded = self.load(step, shard);
        self.has_failed = loaded.is_err();
        // A step that is not complete has to be repeated.
        let done = step + usize::from(loaded.is_ok()) - self.pass.steps_before;
        self.order.delivered(&self.pass, done.saturating_mul(self.batch_size));
        self.left.start = step + 1;
        loaded
    }

    fn find_problem(&self, step: usize, shard: usize) -> Option<String> {
        let (shards, steps) = (self.pass.parts, self.pass.steps_before..self.left.end);
        if shard >= shards {
            return Some(format!("there is no shard {shard}: a step has {shards}, from 0 on"));
        }
        (!steps.contains(&step)).then(|| match steps.is_empty() {
            true => format!("there is no step {step}: all {} steps are over", steps.end),
            false => format!(
                "there is no step {step}: the first is {}, the last {}",
                steps.start,
                steps.end - 1
            ),
        })
    }

    fn load(&mut self, step: usize, shard: usize) -> Result<O, DatasetError> {
        let samples = |(step, shard): (usize, usize)| {
            let batch = (step - self.pass.steps_before) * self.pass.parts + shard;
            self.pass.batch(batch, self.batch_size)
        };
        let wanted = samples((step, shard));
        let Some(ahead) = &mut self.ahead else { return self.source.load(wanted) };
        let is_ahead = ahead.ask(step, shard);
        while ahead.queue.has_room()
            && let Some(next) = ahead.following()
            && next.0 < self.left.end
        {
            ahead.queue.order(samples(next).to_vec());
            ahead.ordered.push_back(next);
        }
        if !is_ahead {
            return self.source.load(wanted);
        }
        ahead.queue.take().unwrap_or_else(|| {
            Err(DatasetError::new(self.source.error(wanted, "its thread has ended")))
        })
    }
}

impl<O> Ahead<O> {
    /// Notes what is asked for. Returns whether it is the next in the queue.
    fn ask(&mut self, step: usize, shard: usize) -> bool {
        if step != self.step && !self.asked.is_empty() {
            self.run = std::mem::take(&mut self.asked);
        }
        self.step = step;
        if shard != self.asked.end {
            self.asked = shard..shard;
        }
        self.asked.end += 1;
        let is_next = self.ordered.pop_front() == Some((step, shard));
        if !is_next {
            self.queue.clear();
            self.ordered.clear();
        }
        is_next
    }

    /// What is behind the end of the queue, if that can be foreseen.
    fn following(&self) -> Option<(usize, usize)> {
        let asked = (self.step, self.asked.end - 1);
        let (step, shard) = self.ordered.back().copied().unwrap_or(asked);
        self.run.contains(&shard).then(|| match shard + 1 == self.run.end {
            true => (step + 1, self.run.start),
            false => (step, shard + 1),
        })
    }
}

impl<I, O> Iterator for Steps<'_, I, O> {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        if self.has_failed || self.has_ended {
            return None;
        }
        let step = self.left.next();
        if step.is_none() {
            self.has_ended = true;
            self.order.end(&self.pass);
        }
        step
    }
}

impl<I, O> fmt::Debug for Steps<'_, I, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Steps")
            .field("left", &self.left)
            .field("shards", &self.pass.parts)
            .finish_non_exhaustive()
    }
}
