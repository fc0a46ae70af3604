//! Whether all ranks have the same values.

use drumline_group::ProcessGroup;
use xxhash_rust::xxh3::xxh3_64;

use crate::Result;

/// The first parameter that differs between ranks.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Difference {
    /// Its index.
    pub(super) first: usize,
    /// The ranks whose value is not the one that most ranks have.
    pub(super) ranks: Vec<usize>,
    /// The lowest rank with the value that most ranks have; of values that equally many have, the lowest rank's.
    pub(super) reference: usize,
    /// The number of parameters that differ.
    pub(super) count: usize,
}

/// Compares the digests of this rank with those of the others: one number if they are equal, else all of them.
pub(super) fn compare(group: &ProcessGroup, digests: &[u64]) -> Result<Option<Difference>> {
    let mut all = vec![0; group.world_size()];
    group.all_gather(&[xxh3_64(bytemuck::cast_slice(digests))], &mut all)?;
    if all.iter().all(|of_rank| *of_rank == all[0]) {
        return Ok(None);
    }
    let mut all = vec![0; digests.len() * group.world_size()];
    group.all_gather(digests, &mut all)?;
    let by_rank: Vec<&[u64]> = all.chunks_exact(digests.len()).collect();
    Ok(difference(&by_rank))
}

fn difference(by_rank: &[&[u64]]) -> Option<Difference> {
    let differs = |at: &usize| by_rank.iter().any(|of_rank| of_rank[*at] != by_rank[0][*at]);
    let differing: Vec<usize> = (0..by_rank[0].len()).filter(differs).collect();
    let first = *differing.first()?;
    let value = |rank: usize| by_rank[rank][first];
    let ranks = 0..by_rank.len();
    let holders = |rank: usize| ranks.clone().filter(|&other| value(other) == value(rank)).count();
    // `max_by_key` takes the last of several.
    let reference = ranks.clone().rev().max_by_key(|&rank| holders(rank))?;
    let others = ranks.filter(|&rank| value(rank) != value(reference)).collect();
    Some(Difference { first, ranks: others, reference, count: differing.len() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_ranks_are_right_or_else_the_lowest() {
        let of = |by_rank: &[[u64; 3]]| {
            let by_rank: Vec<&[u64]> = by_rank.iter().map(|it| &it[..]).collect();
            difference(&by_rank)
        };
        let found = |first, ranks: &[usize], reference, count| {
            Some(Difference { first, ranks: ranks.to_vec(), reference, count })
        };
        assert_eq!(of(&[[1, 2, 3]; 4]), None);
        assert_eq!(of(&[[1, 2, 3], [1, 5, 4]]), found(1, &[1], 0, 2));
        assert_eq!(of(&[[1, 2, 9], [1, 2, 3], [1, 2, 3]]), found(2, &[0], 1, 1));
        assert_eq!(of(&[[5, 2, 3], [1, 2, 3], [1, 2, 3], [5, 2, 3]]), found(0, &[1, 2], 0, 1));
        assert_eq!(of(&[[1, 2, 3], [4, 2, 3], [6, 2, 3]]), found(0, &[1, 2], 0, 1));
    }
}
