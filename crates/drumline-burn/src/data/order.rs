//! Which samples come when, and how far the consumer is.

use std::{
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
    sampler: DistributedSampler,
    /// The number of the newest pass, which alone moves the sampler.
    pass: u64,
}

/// The samples that an iterator delivers.
#[derive(Debug)]
pub(super) struct Pass {
    pub(super) indices: Vec<usize>,
    /// How many samples of the epoch this rank had before.
    pub(super) before: usize,
    number: u64,
}

impl Order {
    pub(super) fn training(sampler: DistributedSampler) -> Self {
        Order::Training(Arc::new(Mutex::new(Position { sampler, pass: 0 })))
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
            Order::Training(position) => whole_epoch(&lock(position).sampler).len(),
        }
    }

    pub(super) fn begin(&self) -> Pass {
        match self {
            Order::Shard(range) => Pass { indices: range.clone().collect(), before: 0, number: 0 },
            Order::Training(position) => {
                let mut position = lock(position);
                position.pass += 1;
                let indices: Vec<usize> = position.sampler.iter().collect();
                let before = whole_epoch(&position.sampler).len().saturating_sub(indices.len());
                Pass { indices, before, number: position.pass }
            }
            Order::Part(position, range) => {
                let mut position = lock(position);
                position.pass += 1;
                let all = whole_epoch(&position.sampler).iter();
                let indices = all.skip(range.start).take(range.len()).collect();
                Pass { indices, before: 0, number: position.pass }
            }
        }
    }

    /// Notes that the consumer has got `samples` more samples of a pass.
    pub(super) fn delivered(&self, pass: &Pass, samples: usize) {
        if let Order::Training(position) = self
            && let mut position = lock(position)
            && position.pass == pass.number
        {
            position.sampler.advance(samples);
        }
    }

    /// The consumer has asked for more samples than the pass has.
    pub(super) fn end(&self, pass: &Pass) {
        if let Order::Training(position) | Order::Part(position, _) = self
            && let mut position = lock(position)
            && position.pass == pass.number
        {
            let epoch = position.sampler.state().epoch + 1;
            position.sampler.set_epoch(epoch);
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
        change: impl FnOnce(&mut DistributedSampler) -> drumline::train::Result<()>,
    ) -> drumline::train::Result<()> {
        if let Order::Training(position) | Order::Part(position, _) = self {
            let mut position = lock(position);
            change(&mut position.sampler)?;
            position.pass += 1;
        }
        Ok(())
    }
}

fn whole_epoch(sampler: &DistributedSampler) -> DistributedSampler {
    let mut whole = sampler.clone();
    whole.set_epoch(sampler.state().epoch);
    whole
}

/// No code panics while it holds the lock, so the position is whole.
fn lock(position: &Mutex<Position>) -> MutexGuard<'_, Position> {
    position.lock().unwrap_or_else(PoisonError::into_inner)
}
