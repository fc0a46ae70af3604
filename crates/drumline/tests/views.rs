//! Collectives on views whose elements do not lie side by side.
#![cfg(feature = "ndarray")]
#![allow(clippy::unwrap_used)]

use drumline::{
    ReduceOp, local,
    views::{as_slice_mut, on_slice},
};
use ndarray::{Array2, s};

/// Every rank has its matrix in another layout.
#[test]
fn the_same_index_meets_the_same_index() {
    local(3, |group| {
        let rank = group.rank() as i64;
        let value = |row: usize, column: usize| 100 * row as i64 + column as i64 + rank;
        let mut big = Array2::from_elem((8, 12), -1);
        let mut transposed = Array2::from_elem((6, 4), -1);
        let mut view = match rank {
            0 => big.slice_mut(s![..4, ..6]),
            1 => big.slice_mut(s![..;2, ..;-2]),
            _ => transposed.view_mut().reversed_axes(),
        };
        view.indexed_iter_mut().for_each(|((row, column), it)| *it = value(row, column));
        on_slice(view.view_mut(), |data| group.all_reduce(data, ReduceOp::Sum)).unwrap();
        for ((row, column), sum) in view.indexed_iter() {
            assert_eq!(*sum, 300 * row as i64 + 3 * column as i64 + 3);
        }
        assert!(as_slice_mut(&mut view).is_err());
        let untouched = big.iter().filter(|value| **value == -1).count();
        assert_eq!(untouched, if rank == 2 { 96 } else { 72 }, "the gaps are left alone");
        Ok(())
    })
    .unwrap();
}
