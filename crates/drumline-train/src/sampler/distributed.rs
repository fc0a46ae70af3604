use std::{iter::StepBy, ops::Range};

use super::{
    permutation::{SAMPLES_TO_SHUFFLE_MAX, random_permutation},
    rank::check_rank,
    state::SamplerState,
};
use crate::{Error, Result};

/// Distributes the samples of a data set over the ranks, the same number to each.
///
/// All ranks shuffle alike, with seed + epoch. Each rank then takes every `world_size`-th index of
/// the order, beginning with its own rank. When the samples do not divide evenly, the sampler
/// repeats the first samples of the order at its end; with
/// [`drop_last`](DistributedSamplerBuilder::drop_last) it leaves out the last ones instead.
///
/// ```
/// use drumline::sampler::DistributedSampler;
///
/// // Seven samples, three ranks: the first two are repeated, so that each rank has three.
/// let of_rank = |rank| -> drumline::Result<Vec<usize>> {
///     let sampler: DistributedSampler =
///         DistributedSampler::builder(7, 3, rank).shuffle(false).build()?;
///     Ok(sampler.iter().collect())
/// };
/// assert_eq!([of_rank(0)?, of_rank(1)?, of_rank(2)?], [[0, 3, 6], [1, 4, 0], [2, 5, 1]]);
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct DistributedSampler {
    options: DistributedSamplerBuilder,
    epoch: u64,
    /// How many places of the epoch's order all ranks together have used.
    consumed: usize,
}

/// The settings of a [`DistributedSampler`], made by [`DistributedSampler::builder`].
#[derive(Clone, Debug)]
#[must_use]
pub struct DistributedSamplerBuilder {
    samples: usize,
    world_size: usize,
    rank: usize,
    shuffle: bool,
    seed: u64,
    drop_last: bool,
    allow_empty: bool,
}

impl DistributedSampler {
    /// Starts a sampler of `samples` samples for one rank: shuffled with seed 0, padded.
    pub fn builder(samples: usize, world_size: usize, rank: usize) -> DistributedSamplerBuilder {
        DistributedSamplerBuilder {
            samples,
            world_size,
            rank,
            shuffle: true,
            seed: 0,
            drop_last: false,
            allow_empty: false,
        }
    }

    /// Chooses the order of an epoch and goes to its start. Call it before each epoch; without it
    /// every epoch has the order of the first.
    pub fn set_epoch(&mut self, epoch: u64) {
        self.epoch = epoch;
        self.consumed = 0;
    }

    /// Notes that each rank has used `indices` more of its own indices, so that
    /// [`state`](Self::state) tells where to go on. Call it after every step with the size of
    /// this rank's batch. The sampler caps `indices` at the number that is left.
    pub fn advance(&mut self, indices: usize) {
        self.consumed += indices.min(self.len()) * self.options.world_size;
    }

    /// How many indices are left for each rank in this epoch. At the start of an epoch it is at
    /// least one, unless [`allow_empty`](DistributedSamplerBuilder::allow_empty) is set.
    #[allow(clippy::len_without_is_empty)] // An epoch that is over has no further use.
    pub fn len(&self) -> usize {
        let DistributedSamplerBuilder { samples, world_size, drop_last, .. } = self.options;
        let left = samples.saturating_sub(self.consumed);
        if drop_last { left / world_size } else { left.div_ceil(world_size) }
    }

    /// This rank's indices that are left in this epoch, in the order of their use.
    pub fn iter(&self) -> Indices {
        let DistributedSamplerBuilder { samples, world_size, rank, shuffle, seed, .. } =
            self.options;
        let end = self.consumed + self.len() * world_size;
        Indices {
            order: shuffle.then(|| random_permutation(samples, seed.wrapping_add(self.epoch))),
            samples,
            places: (self.consumed.saturating_add(rank)..end).step_by(world_size),
        }
    }

    /// How far all ranks are, according to [`advance`](Self::advance). The same on all ranks.
    pub fn state(&self) -> SamplerState {
        let DistributedSamplerBuilder { samples, seed, shuffle, drop_last, .. } = self.options;
        let (epoch, consumed) = (self.epoch, self.consumed);
        SamplerState { epoch, consumed, samples, seed, shuffle, drop_last }
    }

    /// Goes on where another sampler stopped. The two must have the same data and settings; their
    /// numbers of ranks may differ.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) names the first setting that differs. This sampler is then
    /// unchanged.
    pub fn resume(&mut self, state: &SamplerState) -> Result<()> {
        let ours = SamplerState { epoch: state.epoch, consumed: state.consumed, ..self.state() };
        let differs = state.fields().into_iter().zip(ours.fields()).find(|(was, is)| was != is);
        if let Some(((setting, was), (_, is))) = differs {
            return Err(Error::argument(
                "DistributedSampler::resume",
                format!("the state is of {setting} {was}, but this sampler has {is}"),
            ));
        }
        (self.epoch, self.consumed) = (state.epoch, state.consumed);
        Ok(())
    }
}

impl IntoIterator for &DistributedSampler {
    type Item = usize;
    type IntoIter = Indices;

    fn into_iter(self) -> Indices {
        self.iter()
    }
}

impl DistributedSamplerBuilder {
    /// Whether each epoch has a random order. `true` unless set.
    pub fn shuffle(mut self, shuffle: bool) -> Self {
        self.shuffle = shuffle;
        self
    }

    /// The seed of the random orders, which must be the same on all ranks. Like torch's generator,
    /// the sampler uses the low 32 bits of seed + epoch. 0 unless set.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Whether to leave out the samples that do not divide evenly, instead of repeating some.
    /// `false` unless set.
    pub fn drop_last(mut self, drop_last: bool) -> Self {
        self.drop_last = drop_last;
        self
    }

    /// Whether ranks may get no sample at all, as in torch: when the data set is empty, or when
    /// [`drop_last`](Self::drop_last) leaves fewer samples than ranks. `false` unless set: it is an error
    /// then, because nothing would be trained.
    pub fn allow_empty(mut self, allow_empty: bool) -> Self {
        self.allow_empty = allow_empty;
        self
    }

    /// Checks the settings and makes the sampler, at epoch 0.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when there is no such rank, when some rank would get no sample,
    /// or when there are too many samples to shuffle in torch's order (2^32 / 20).
    pub fn build(self) -> Result<DistributedSampler> {
        let invalid = |problem| Err(Error::argument("DistributedSampler", problem));
        check_rank("DistributedSampler", self.world_size, self.rank)?;
        if self.samples == 0 && !self.allow_empty {
            return invalid("the data set is empty; nothing can be sampled from it".into());
        }
        if self.drop_last && self.samples < self.world_size && !self.allow_empty {
            return invalid(format!(
                "drop_last would drop all {} samples, because there are {} ranks; use fewer \
                 ranks, more samples, or drop_last(false)",
                self.samples, self.world_size
            ));
        }
        if self.shuffle && self.samples >= SAMPLES_TO_SHUFFLE_MAX {
            return invalid(format!(
                "{} samples cannot be shuffled in one go, the limit is {SAMPLES_TO_SHUFFLE_MAX}; \
                 shuffle groups of samples, or use shuffle(false)",
                self.samples
            ));
        }
        // The padded total is at most samples + world_size - 1.
        if self.samples.checked_add(self.world_size).is_none() {
            return invalid(format!("{} samples are too many to count", self.samples));
        }
        Ok(DistributedSampler { options: self, epoch: 0, consumed: 0 })
    }
}

/// The indices of one rank in one epoch, from [`DistributedSampler::iter`].
#[derive(Clone, Debug)]
pub struct Indices {
    /// A permutation of `0..samples`, the same on all ranks. `None` is the identity.
    order: Option<Vec<u32>>,
    samples: usize,
    /// This rank's places in the order. A place beyond the end of the order wraps round to its start.
    places: StepBy<Range<usize>>,
}

impl Iterator for Indices {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let place = self.places.next()? % self.samples;
        Some(self.order.as_ref().map_or(place, |order| order[place] as usize))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.places.size_hint()
    }
}

impl ExactSizeIterator for Indices {}
