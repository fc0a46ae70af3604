use std::ops::Range;

use drumline_schedule::Dealing;

use super::rank::check_rank;
use crate::{Error, Result};

/// The shards of a step that a rank has, in a training with [`DdpOptions::shards`](crate::ddp::DdpOptions::shards).
///
/// Their samples are those of a [`DistributedSampler`](super::DistributedSampler) with a shard in the place of a rank. So
/// they do not depend on the number of ranks, and any number of ranks can go on in the middle of an epoch:
///
/// ```
/// use drumline::sampler::{DistributedSampler, shards_of_rank};
///
/// let shards = 4;
/// for (rank, own) in [0..2, 2..3, 3..4].into_iter().enumerate() {
///     assert_eq!(shards_of_rank(shards, 3, rank)?, own);
/// }
/// let sampler = DistributedSampler::builder(8, shards, 2).shuffle(false).build()?; // of shard 2, which rank 1 has
/// assert_eq!(sampler.iter().collect::<Vec<_>>(), [2, 6]);
/// # Ok::<_, drumline::Error>(())
/// ```
///
/// # Errors
///
/// [`Argument`](crate::ErrorKind::Argument) when there is no such rank, or there are fewer shards than ranks.
pub fn shards_of_rank(shards: usize, world_size: usize, rank: usize) -> Result<Range<usize>> {
    check_rank("shards_of_rank", world_size, rank)?;
    let dealing = Dealing::new(shards, world_size).ok_or_else(|| {
        let problem =
            format!("{shards} shards are too few for {world_size} ranks: each needs at least one");
        Error::argument("shards_of_rank", problem)
    })?;
    Ok(dealing.run(rank))
}
