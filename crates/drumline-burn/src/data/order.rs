//! Which samples come when, and how far the consumer is.

use std::{
    num::NonZeroUsize,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use drumline::sampler::{DistributedSampler, SamplerState};

/// The order of a rank's samples. Clones share the place in it.
#[derive(Clone, Debug)]
pub(super) enum Order {
    Training(Arc<Mutex<Position>>),
    Shard(Range<usize>),
    /// A part of every epoch's samples of a rank. Its place is not saved.
    Part(Arc<Mutex<Position>>, Range<usize>),
}

#[derive(Clone, Debug)]
pub(super) struct Position {
    /// Of a part that this rank has. All parts are at the same place.
    sampler: DistributedSampler,
    /// Of all samples in one part, for their order.
    whole: DistributedSampler,
    parts: Parts,
    batch_size: NonZeroUsize,
    /// The number of the newest pass, which alone moves the sampler.
    pass: u64,
    /// Where it began.
    began: DistributedSampler,
}

/// What the samples are dealt to: the shards of a step, or the ranks.
#[derive(Clone, Debug)]
pub(super) struct Parts {
    pub(super) count: usize,
    /// Those of this rank.
    pub(super) own: Range<usize>,
    pub(super) are_shards: bool,
}

/// The epochs of samples that are dealt to the shards of a step.
#[cfg_attr(not(feature = "train"), expect(dead_code, reason = "a `Learner` asks"))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct OfShards {
    pub(crate) count: usize,
    /// How many steps an epoch has.
    pub(crate) steps: usize,
    /// How many samples a shard has in an epoch.
    pub(crate) items: usize,
}

/// The samples that an iterator delivers.
#[derive(Debug)]
pub(super) struct Pass {
    pub(super) indices: Vec<usize>,
    /// How many batches a step has.
    pub(super) parts: usize,
    /// How many samples of the epoch this rank had before.
    pub(super) before: usize,
    /// How many steps of the epoch were made before.
    pub(super) steps_before: usize,
    number: u64,
}

impl Pass {
    /// The samples of a batch, if batches have so many; empty behind the last one.
    pub(super) fn batch(&self, number: usize, size: usize) -> &[usize] {
        let of_part = self.indices.len() / self.parts;
        let start = (number / self.parts).saturating_mul(size).min(of_part);
        let length = size.min(of_part - start);
        &self.indices[start * self.parts + number % self.parts * length..][..length]
    }
}

impl Order {
    /// `sampler` is that of one of this rank's parts, `whole` that of all samples in one part.
    pub(super) fn training(
        sampler: DistributedSampler,
        whole: DistributedSampler,
        parts: Parts,
        batch_size: NonZeroUsize,
    ) -> Self {
        let began = sampler.clone();
        let position = Position { sampler, whole, parts, batch_size, pass: 0, began };
        Order::Training(Arc::new(Mutex::new(position)))
    }

    pub(super) fn shard(range: Range<usize>) -> Self {
        Order::Shard(range)
    }

    /// The items `start..end` of this order in each epoch. An end that is too large is cut.
    pub(super) fn part(&self, start: usize, end: usize) -> Self {
        let cut = |range: &Range<usize>| {
            let at = |place: usize| range.start.saturating_add(place).min(range.end);
            at(start)..at(end).max(at(start))
        };
        let own = |position: &Mutex<Position>| Arc::new(Mutex::new(lock(position).clone()));
        match self {
            Order::Shard(range) => Order::Shard(cut(range)),
            Order::Training(position) => Order::Part(own(position), cut(&(0..self.len()))),
            Order::Part(position, range) => Order::Part(own(position), cut(range)),
        }
    }

    /// The number of samples of an epoch.
    pub(super) fn len(&self) -> usize {
        match self {
            Order::Shard(range) | Order::Part(_, range) => range.len(),
            Order::Training(position) => {
                let position = lock(position);
                position.epoch().len() * position.parts.own.len()
            }
        }
    }

    pub(super) fn begin(&self) -> Pass {
        let part = |indices| Pass { indices, parts: 1, before: 0, steps_before: 0, number: 0 };
        match self {
            Order::Shard(range) => part(range.clone().collect()),
            Order::Training(position) => {
                let mut position = lock(position);
                let own = position.parts.own.clone();
                position.begin(own)
            }
            Order::Part(position, range) => {
                let mut position = lock(position);
                position.pass += 1;
                let all = position.samples(&position.epoch(), position.parts.own.clone());
                let indices = all.into_iter().skip(range.start).take(range.len()).collect();
                Pass { number: position.pass, ..part(indices) }
            }
        }
    }

    /// A pass over the batches of all shards, and which of them are this rank's. `None` if the samples are not dealt to
    /// shards.
    pub(super) fn begin_steps(&self) -> Option<(Pass, Range<usize>)> {
        let Order::Training(position) = self else { return None };
        let mut position = lock(position);
        let Parts { count, own, are_shards } = position.parts.clone();
        are_shards.then(|| (position.begin(0..count), own))
    }

    /// What the epochs of samples are that are dealt to shards.
    pub(super) fn shards(&self) -> Option<OfShards> {
        let Order::Training(position) = self else { return None };
        let position = lock(position);
        let items = position.epoch().len();
        let steps = items.div_ceil(position.batch_size.get());
        position.parts.are_shards.then(|| OfShards { count: position.parts.count, steps, items })
    }

    /// Lets the next iterator yield the batches of the shards `own`, from a step of an epoch on.
    pub(super) fn deal(&self, own: Range<usize>, epoch: u64, step: usize) {
        if let Order::Training(position) = self {
            let mut position = lock(position);
            let samples = step.saturating_mul(position.batch_size.get());
            position.parts.own = own;
            position.sampler.set_epoch(epoch);
            position.sampler.advance(samples);
            position.pass += 1;
        }
    }

    /// Notes how many samples of a pass the consumer has got, of each part.
    pub(super) fn delivered(&self, pass: &Pass, samples: usize) {
        if let Order::Training(position) = self
            && let mut position = lock(position)
            && position.pass == pass.number
        {
            position.sampler = position.began.clone();
            position.sampler.advance(samples);
        }
    }

    /// The consumer has asked for more samples than the pass has.
    pub(super) fn end(&self, pass: &Pass) {
        if let Order::Training(position) | Order::Part(position, _) = self
            && let mut position = lock(position)
            && position.pass == pass.number
        {
            let epoch = position.sampler.state().epoch;
            position.sampler.set_epoch(epoch + 1);
        }
    }

    pub(super) fn state(&self) -> Option<SamplerState> {
        match self {
            Order::Training(position) => Some(lock(position).sampler.state()),
            Order::Shard(_) | Order::Part(..) => None,
        }
    }

    /// Goes to the beginning of an epoch. It has no effect on a shard.
    pub(super) fn set_epoch(&self, epoch: u64) {
        let change = self.change(|sampler| {
            sampler.set_epoch(epoch);
            Ok(())
        });
        debug_assert!(change.is_ok(), "setting an epoch does not fail");
    }

    /// Iterators that exist already do not move the new place.
    pub(super) fn change(
        &self,
        change: impl FnOnce(&mut DistributedSampler) -> drumline::Result<()>,
    ) -> drumline::Result<()> {
        if let Order::Training(position) | Order::Part(position, _) = self {
            let mut position = lock(position);
            change(&mut position.sampler)?;
            position.pass += 1;
        }
        Ok(())
    }
}

impl Position {
    /// Begins a pass over some of the parts.
    fn begin(&mut self, parts: Range<usize>) -> Pass {
        self.pass += 1;
        self.began = self.sampler.clone();
        let of_step = self.batch_size.get().saturating_mul(self.parts.count);
        Pass {
            parts: parts.len(),
            before: (self.epoch().len() - self.sampler.len()) * parts.len(),
            steps_before: self.sampler.state().consumed.div_ceil(of_step),
            indices: self.samples(&self.sampler, parts),
            number: self.pass,
        }
    }

    /// The samples of some parts that are left to a sampler, as batches deliver them: in each step, one batch after
    /// another of every part.
    fn samples(&self, sampler: &DistributedSampler, parts: Range<usize>) -> Vec<usize> {
        let SamplerState { epoch, consumed, samples, .. } = sampler.state();
        let mut whole = self.whole.clone();
        whole.set_epoch(epoch);
        let order: Vec<usize> = whole.iter().collect();
        let (left, size) = (sampler.len(), self.batch_size.get());
        let mut all = Vec::with_capacity(left * parts.len());
        for start in (0..left).step_by(size) {
            for part in parts.clone() {
                let of_batch = start..start.saturating_add(size).min(left);
                let places = of_batch.map(|at| consumed + at * self.parts.count + part);
                all.extend(places.map(|place| order[place % samples]));
            }
        }
        all
    }

    /// The sampler, at the beginning of its epoch.
    fn epoch(&self) -> DistributedSampler {
        let mut sampler = self.sampler.clone();
        sampler.set_epoch(sampler.state().epoch);
        sampler
    }
}

/// No code panics while it holds the lock, so the position is whole.
fn lock(position: &Mutex<Position>) -> MutexGuard<'_, Position> {
    position.lock().unwrap_or_else(PoisonError::into_inner)
}
