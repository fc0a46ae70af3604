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
    /// One for each shard of this rank, or one for the rank. All are at the same place.
    samplers: Vec<DistributedSampler>,
    batch_size: NonZeroUsize,
    /// The number of the newest pass, which alone moves the sampler.
    pass: u64,
}

/// The samples that an iterator delivers.
#[derive(Debug)]
pub(super) struct Pass {
    pub(super) indices: Vec<usize>,
    /// How many batches a step has on this rank.
    pub(super) shards: usize,
    /// How many samples of the epoch this rank had before.
    pub(super) before: usize,
    number: u64,
}

impl Order {
    /// `samplers` are those of this rank's shards, or that of the rank.
    pub(super) fn training(samplers: Vec<DistributedSampler>, batch_size: NonZeroUsize) -> Self {
        Order::Training(Arc::new(Mutex::new(Position { samplers, batch_size, pass: 0 })))
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
            Order::Training(position) => lock(position).whole_epoch().len(),
        }
    }

    pub(super) fn begin(&self) -> Pass {
        match self {
            Order::Shard(range) => {
                Pass { indices: range.clone().collect(), shards: 1, before: 0, number: 0 }
            }
            Order::Training(position) => {
                let mut position = lock(position);
                position.pass += 1;
                let (indices, shards) = (position.items(), position.samplers.len());
                let before = position.whole_epoch().len().saturating_sub(indices.len());
                Pass { indices, shards, before, number: position.pass }
            }
            Order::Part(position, range) => {
                let mut position = lock(position);
                position.pass += 1;
                let all = position.whole_epoch().into_iter();
                let indices = all.skip(range.start).take(range.len()).collect();
                Pass { indices, shards: 1, before: 0, number: position.pass }
            }
        }
    }

    /// Notes that the consumer has got `samples` more samples of a pass, of each shard.
    pub(super) fn delivered(&self, pass: &Pass, samples: usize) {
        if let Order::Training(position) = self
            && let mut position = lock(position)
            && position.pass == pass.number
        {
            position.samplers.iter_mut().for_each(|sampler| sampler.advance(samples));
        }
    }

    /// The consumer has asked for more samples than the pass has.
    pub(super) fn end(&self, pass: &Pass) {
        if let Order::Training(position) | Order::Part(position, _) = self
            && let mut position = lock(position)
            && position.pass == pass.number
        {
            for sampler in &mut position.samplers {
                sampler.set_epoch(sampler.state().epoch + 1);
            }
        }
    }

    pub(super) fn state(&self) -> Option<SamplerState> {
        match self {
            Order::Training(position) => Some(lock(position).samplers[0].state()),
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
        change: impl FnMut(&mut DistributedSampler) -> drumline::Result<()>,
    ) -> drumline::Result<()> {
        if let Order::Training(position) | Order::Part(position, _) = self {
            let mut position = lock(position);
            position.samplers.iter_mut().try_for_each(change)?;
            position.pass += 1;
        }
        Ok(())
    }
}

impl Position {
    /// The samples that are left, as batches deliver them: in each step, one batch after another of every shard.
    fn items(&self) -> Vec<usize> {
        let of_shards: Vec<Vec<usize>> =
            self.samplers.iter().map(|it| it.iter().collect()).collect();
        let steps = (0..of_shards[0].len()).step_by(self.batch_size.get());
        let batch = |of_shard: &Vec<usize>, start: usize| {
            let end = start.saturating_add(self.batch_size.get()).min(of_shard.len());
            of_shard[start..end].to_vec()
        };
        steps.flat_map(|start| of_shards.iter().flat_map(move |it| batch(it, start))).collect()
    }

    fn whole_epoch(&self) -> Vec<usize> {
        let mut whole = self.clone();
        whole.samplers.iter_mut().for_each(|it| it.set_epoch(it.state().epoch));
        whole.items()
    }
}

/// No code panics while it holds the lock, so the position is whole.
fn lock(position: &Mutex<Position>) -> MutexGuard<'_, Position> {
    position.lock().unwrap_or_else(PoisonError::into_inner)
}
