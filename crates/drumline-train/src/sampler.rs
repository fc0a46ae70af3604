//! Which samples of a data set a rank works on, and in which order.
//!
//! [`DistributedSampler`] gives the indices, in the order, that torch's sampler of that name gives
//! for the same arguments. So a run can move between the two and still see the same batches.
//! [`evaluation_shard`] is for counting: it never repeats a sample.
//!
//! ```
//! use drumline::sampler::{DistributedSampler, evaluation_shard};
//!
//! # fn main() -> drumline::train::Result<()> {
//! let (samples, world_size, rank) = (10, 4, 1);
//! let mut sampler = DistributedSampler::builder(samples, world_size, rank).seed(7).build()?;
//! for epoch in 0..3 {
//!     sampler.set_epoch(epoch); // another order, the same one on every rank
//!     let indices: Vec<usize> = sampler.iter().collect();
//!     assert_eq!(indices.len(), 3); // ceil(10 / 4): all ranks take equally many steps
//! }
//!
//! assert_eq!(evaluation_shard(samples, world_size, rank)?, 3..6);
//! # Ok(())
//! # }
//! ```
//!
//! An epoch can be interrupted and continued, also by another number of ranks; see
//! [`SamplerState`].

mod mt19937;
mod state;

use std::{iter::StepBy, ops::Range};

use self::mt19937::Mt19937;
pub use self::state::SamplerState;
use crate::{Error, Result};

/// Deals the samples of a data set out to the ranks, equally many to each.
///
/// All ranks shuffle alike (with seed + epoch) and then take every `world_size`-th index, beginning
/// with their own rank. When the samples do not divide evenly, the first ones of the order are
/// repeated at its end; with [`drop_last`](DistributedSamplerBuilder::drop_last) the last ones are
/// left out instead.
///
/// ```
/// use drumline::sampler::DistributedSampler;
///
/// // Three ranks, seven samples: the first two come once more, so that all ranks have three.
/// let of_rank = |rank| -> drumline::train::Result<Vec<usize>> {
///     let sampler: DistributedSampler =
///         DistributedSampler::builder(7, 3, rank).shuffle(false).build()?;
///     Ok(sampler.iter().collect())
/// };
/// assert_eq!([of_rank(0)?, of_rank(1)?, of_rank(2)?], [[0, 3, 6], [1, 4, 0], [2, 5, 1]]);
/// # Ok::<_, drumline::train::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct DistributedSampler {
    options: DistributedSamplerBuilder,
    epoch: u64,
    /// Places of the epoch's order that are done, over all ranks.
    consumed: usize,
}

/// The settings of a [`DistributedSampler`], made by [`DistributedSampler::builder`].
///
/// ```
/// use drumline::sampler::{DistributedSampler, DistributedSamplerBuilder};
///
/// let settings: DistributedSamplerBuilder = DistributedSampler::builder(100, 4, 0).seed(7);
/// assert_eq!(settings.clone().build()?.len(), 25);
/// assert_eq!(settings.drop_last(true).build()?.state().seed, 7);
/// # Ok::<_, drumline::train::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct DistributedSamplerBuilder {
    samples: usize,
    world_size: usize,
    rank: usize,
    shuffle: bool,
    seed: u64,
    drop_last: bool,
}

impl DistributedSampler {
    /// Starts a sampler over `samples` samples for one rank: shuffled with seed 0, padded.
    ///
    /// ```
    /// use drumline::sampler::DistributedSampler;
    ///
    /// let sampler = DistributedSampler::builder(10, 4, 1).build()?;
    /// assert_eq!(sampler.len(), 3); // ceil(10 / 4)
    /// assert!(DistributedSampler::builder(10, 4, 4).build().is_err()); // ranks count from 0
    /// # Ok::<_, drumline::train::Error>(())
    /// ```
    pub fn builder(samples: usize, world_size: usize, rank: usize) -> DistributedSamplerBuilder {
        DistributedSamplerBuilder {
            samples,
            world_size,
            rank,
            shuffle: true,
            seed: 0,
            drop_last: false,
        }
    }

    /// Chooses the order of one epoch and goes to its start; call it before each, or every epoch
    /// has the order of the first.
    ///
    /// ```
    /// use drumline::sampler::DistributedSampler;
    ///
    /// let mut sampler = DistributedSampler::builder(100, 1, 0).build()?;
    /// let first: Vec<usize> = sampler.iter().collect();
    /// sampler.set_epoch(1);
    /// assert_ne!(sampler.iter().collect::<Vec<_>>(), first);
    /// sampler.set_epoch(0);
    /// assert_eq!(sampler.iter().collect::<Vec<_>>(), first);
    /// # Ok::<_, drumline::train::Error>(())
    /// ```
    pub fn set_epoch(&mut self, epoch: u64) {
        self.epoch = epoch;
        self.consumed = 0;
    }

    /// Notes that each rank has used `indices` more of its own, so that
    /// [`state`](Self::state) tells where to go on. Call it after every step with the size of
    /// this rank's batch. More than are left count as all of them.
    ///
    /// ```
    /// use drumline::sampler::DistributedSampler;
    ///
    /// let mut sampler = DistributedSampler::builder(10, 2, 0).shuffle(false).build()?;
    /// sampler.advance(2); // one batch
    /// assert_eq!(sampler.iter().collect::<Vec<_>>(), [4, 6, 8]);
    /// assert_eq!(sampler.state().consumed, 4); // on both ranks
    /// # Ok::<_, drumline::train::Error>(())
    /// ```
    pub fn advance(&mut self, indices: usize) {
        self.consumed += indices.min(self.len()) * self.options.world_size;
    }

    /// How many indices are left for each rank in this epoch. Of a whole epoch: at least one.
    ///
    /// ```
    /// use drumline::sampler::DistributedSampler;
    ///
    /// let mut sampler = DistributedSampler::builder(10, 4, 0).build()?;
    /// assert_eq!(sampler.len(), 3);
    /// sampler.advance(2);
    /// assert_eq!(sampler.len(), 1);
    /// # Ok::<_, drumline::train::Error>(())
    /// ```
    #[allow(clippy::len_without_is_empty)] // An epoch that is over has no further use.
    pub fn len(&self) -> usize {
        let DistributedSamplerBuilder { samples, world_size, drop_last, .. } = self.options;
        let left = samples.saturating_sub(self.consumed);
        if drop_last { left / world_size } else { left.div_ceil(world_size) }
    }

    /// This rank's indices that are left in this epoch, in the order of their use.
    ///
    /// ```
    /// use drumline::sampler::DistributedSampler;
    ///
    /// let sampler = DistributedSampler::builder(4, 1, 0).seed(3).build()?;
    /// let mut indices: Vec<usize> = sampler.iter().collect();
    /// assert_eq!(indices, sampler.iter().collect::<Vec<_>>()); // the order of this epoch
    /// indices.sort();
    /// assert_eq!(indices, [0, 1, 2, 3]);
    /// # Ok::<_, drumline::train::Error>(())
    /// ```
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
    ///
    /// ```
    /// use drumline::sampler::DistributedSampler;
    ///
    /// let sampler = DistributedSampler::builder(6, 2, 1).shuffle(false).build()?;
    /// assert_eq!(sampler.iter().collect::<Vec<_>>(), [1, 3, 5]);
    /// # Ok::<_, drumline::train::Error>(())
    /// ```
    pub fn shuffle(mut self, shuffle: bool) -> Self {
        self.shuffle = shuffle;
        self
    }

    /// Where the random orders start; must be the same on all ranks. Like torch's generator it
    /// uses the low 32 bits of seed + epoch. 0 unless set.
    ///
    /// ```
    /// use drumline::sampler::DistributedSampler;
    ///
    /// let order = |seed| -> drumline::train::Result<Vec<usize>> {
    ///     Ok(DistributedSampler::builder(100, 1, 0).seed(seed).build()?.iter().collect())
    /// };
    /// assert_eq!(order(1)?, order(1)?);
    /// assert_ne!(order(1)?, order(2)?);
    /// # Ok::<_, drumline::train::Error>(())
    /// ```
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Whether to leave out the samples that do not divide evenly, instead of repeating some.
    /// `false` unless set.
    ///
    /// ```
    /// use drumline::sampler::{DistributedSampler, DistributedSamplerBuilder, Indices};
    ///
    /// let settings: DistributedSamplerBuilder = DistributedSampler::builder(5, 2, 0).shuffle(false);
    /// let sampler = settings.drop_last(true).build()?;
    /// let indices: Indices = sampler.iter();
    /// assert_eq!(indices.collect::<Vec<_>>(), [0, 2]);
    /// # Ok::<_, drumline::train::Error>(())
    /// ```
    pub fn drop_last(mut self, drop_last: bool) -> Self {
        self.drop_last = drop_last;
        self
    }

    /// Checks the settings and makes the sampler, at epoch 0.
    ///
    /// ```
    /// use drumline::sampler::DistributedSampler;
    ///
    /// let error = DistributedSampler::builder(3, 4, 0).drop_last(true).build().unwrap_err();
    /// assert!(error.to_string().contains("drop_last would drop all 3 samples"));
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] when there is no such rank, when there would be no sample for
    /// each rank, or when there are too many samples to shuffle in torch's order (2^32 / 20).
    pub fn build(self) -> Result<DistributedSampler> {
        let invalid =
            |problem| Err(Error::InvalidArgument { operation: "DistributedSampler", problem });
        check_rank("DistributedSampler", self.world_size, self.rank)?;
        if self.samples == 0 {
            return invalid("the data set is empty; nothing can be sampled from it".into());
        }
        if self.drop_last && self.samples < self.world_size {
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
///
/// ```
/// use drumline::sampler::{DistributedSampler, Indices};
///
/// let mut indices: Indices =
///     DistributedSampler::builder(5, 2, 0).shuffle(false).build()?.iter();
/// assert_eq!(indices.len(), 3);
/// assert_eq!((indices.next(), indices.len()), (Some(0), 2));
/// # Ok::<_, drumline::train::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Indices {
    /// A permutation of `0..samples`, the same on all ranks. None: the identity.
    order: Option<Vec<u32>>,
    samples: usize,
    /// This rank's places in the order, which repeats from its start when it is too short.
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

/// The samples that this rank evaluates: over all ranks, every sample exactly once.
///
/// A [`DistributedSampler`] repeats samples so that no rank runs out of steps, which counts some
/// twice. Evaluation has no steps to keep together, so here the shares differ in length by at most
/// one, and may be empty. They are contiguous.
///
/// ```
/// use drumline::sampler::evaluation_shard;
///
/// let shards = [0, 1, 2].map(|rank| evaluation_shard(7, 3, rank).unwrap());
/// assert_eq!(shards, [0..3, 3..5, 5..7]);
/// assert!(evaluation_shard(7, 3, 3).is_err()); // ranks count from 0
/// ```
///
/// # Errors
///
/// [`Error::InvalidArgument`] when there is no such rank.
pub fn evaluation_shard(samples: usize, world_size: usize, rank: usize) -> Result<Range<usize>> {
    check_rank("evaluation_shard", world_size, rank)?;
    let (share, longer) = (samples / world_size, samples % world_size);
    let start = |rank: usize| rank * share + rank.min(longer);
    Ok(start(rank)..start(rank + 1))
}

fn check_rank(operation: &'static str, world_size: usize, rank: usize) -> Result<()> {
    if rank < world_size {
        return Ok(());
    }
    Err(Error::InvalidArgument {
        operation,
        problem: format!("there is no rank {rank} in a world of {world_size}; ranks count from 0"),
    })
}

/// From here on torch shuffles in another way, with 64-bit numbers.
const SAMPLES_TO_SHUFFLE_MAX: usize = u32::MAX as usize / 20;

/// What `torch.randperm(n, generator=torch.Generator().manual_seed(seed))` gives on a CPU.
fn random_permutation(n: usize, seed: u64) -> Vec<u32> {
    let n = n as u32; // `build` has checked it against the maximum.
    let mut generator = Mt19937::new(seed as u32);
    let mut order: Vec<u32> = (0..n).collect();
    for i in 0..n.saturating_sub(1) {
        // The modulo favours small numbers a little; the same bias makes the same order.
        let other = i + generator.next_u32() % (n - i);
        order.swap(i as usize, other as usize);
    }
    order
}
