//! Which ranks have data of their own, as marks that an all-reduce averages.
//!
//! Each rank has one bit. Seven ranks share a mark, and a rank that has data sets its mark to its bit. The average times
//! the number of ranks is the sum, and thus the set of bits. It has seven binary digits, so rounding to bf16 (eight
//! digits), twice even, moves it by less than a half.

use std::ops::Range;

use super::memory::Memory;

/// So many ranks share a mark.
const RANKS_PER_MARK: usize = 7;

/// The number of marks for `world_size` ranks.
pub(super) fn marks(world_size: usize) -> usize {
    world_size.div_ceil(RANKS_PER_MARK)
}

/// Sets the marks of this rank.
pub(super) fn write(memory: &mut Memory, at: Range<usize>, rank: usize, is_active: bool) {
    for (number, mark) in at.enumerate() {
        let is_mine = is_active && number == rank / RANKS_PER_MARK;
        memory.set_mark(mark, if is_mine { 1 << (rank % RANKS_PER_MARK) } else { 0 });
    }
}

/// Which ranks have data, by the sums of all ranks' marks, divided by `divisor`.
pub(super) fn read(memory: &Memory, at: Range<usize>, divisor: usize) -> Active {
    let mut active = Active::default();
    for (number, mark) in at.enumerate() {
        let bits = (memory.mark(mark) * divisor as f64).round() as u32;
        active.count += bits.count_ones() as usize;
        if active.lowest.is_none() && bits != 0 {
            active.lowest = Some(number * RANKS_PER_MARK + bits.trailing_zeros() as usize);
        }
    }
    active
}

/// The ranks that have data of their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Active {
    pub(super) count: usize,
    /// The lowest of them.
    pub(super) lowest: Option<usize>,
}

#[cfg(test)]
mod tests {
    use drumline_group::DType;
    use proptest::prelude::*;

    use super::{
        super::super::{Bucket, Wire},
        *,
    };

    /// The average of all ranks' marks, as an all-reduce rounds it.
    fn averaged(dtype: DType, is_active: &[bool]) -> Memory {
        let count = marks(is_active.len());
        let bucket = Bucket { dtype, parameters: vec![] };
        let mut sums = vec![0.0_f64; count];
        for (rank, &is_active) in is_active.iter().enumerate() {
            let mut memory = Memory::private(&bucket, count, Wire::AsIs);
            write(&mut memory, 0..count, rank, is_active);
            sums.iter_mut().enumerate().for_each(|(at, sum)| *sum += memory.mark(at));
        }
        let mut memory = Memory::private(&bucket, count, Wire::AsIs);
        for (at, sum) in sums.into_iter().enumerate() {
            let average = sum / is_active.len() as f64;
            memory.slice_mut(at..at + 1).replace(|_| average);
        }
        memory
    }

    proptest! {
        #[test]
        fn the_active_ranks_are_found_in_any_type(
            is_active in prop::collection::vec(any::<bool>(), 1..600), mostly in any::<bool>(),
        ) {
            let is_active: Vec<bool> =
                is_active.iter().enumerate().map(|(at, &it)| it || (mostly && at % 50 != 0)).collect();
            let wanted = Active {
                count: is_active.iter().filter(|it| **it).count(),
                lowest: is_active.iter().position(|it| *it),
            };
            for dtype in [DType::F32, DType::F64, DType::F16, DType::Bf16] {
                let memory = averaged(dtype, &is_active);
                let world_size = is_active.len();
                prop_assert_eq!(read(&memory, 0..marks(world_size), world_size), wanted);
            }
        }
    }
}
