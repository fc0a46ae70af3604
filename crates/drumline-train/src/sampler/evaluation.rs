use std::ops::Range;

use super::rank::check_rank;
use crate::Result;

/// The samples that this rank evaluates. All ranks together evaluate every sample exactly once.
///
/// A [`DistributedSampler`](super::DistributedSampler) repeats samples so that all ranks take the
/// same number of steps, and would count the repeated samples twice. Evaluation has no steps to
/// keep together. So the shares differ in length by at most one, and may be empty. Each is
/// contiguous.
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
/// [`Argument`](crate::ErrorKind::Argument) when there is no such rank.
pub fn evaluation_shard(samples: usize, world_size: usize, rank: usize) -> Result<Range<usize>> {
    check_rank("evaluation_shard", world_size, rank)?;
    let (share, longer) = (samples / world_size, samples % world_size);
    let start = |rank: usize| rank * share + rank.min(longer);
    Ok(start(rank)..start(rank + 1))
}
