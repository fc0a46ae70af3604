//! Views of arrays, whose elements need not be contiguous.
//!
//! Collectives work on slices. A contiguous view is passed on as it is. Any other view (a column, every
//! second row, a transposed matrix) is copied in the order of its indices, and copied back afterwards. So
//! arrays may have different memory layouts on different ranks: elements with the same index are combined.
//!
//! ```
//! use drumline::{ProcessGroup, ReduceOp, views};
//! use ndarray::{Array2, array};
//!
//! let group = ProcessGroup::alone();
//! let mut matrix: Array2<f32> = array![[1.0, 2.0], [3.0, 4.0]];
//! views::on_slice(matrix.column_mut(1), |column| group.all_reduce(column, ReduceOp::Sum))?;
//!
//! let transposed = matrix.t();
//! let mut gathered = Array2::zeros((2, 2));
//! group.all_gather(&views::as_slice(&transposed), views::as_slice_mut(&mut gathered.view_mut())?)?;
//! assert_eq!(gathered, transposed);
//! # Ok::<_, drumline::Error>(())
//! ```

use std::borrow::Cow;

use ndarray::{ArrayView, ArrayViewMut, Dimension};

use crate::{Element, Error, Result};

/// Runs `call` on the elements of `view` in the order of its indices. It works in place, or on a copy that is
/// copied back, even if the call fails.
///
/// ```
/// use drumline::{ProcessGroup, ReduceOp, views};
/// use ndarray::array;
///
/// let group = ProcessGroup::alone();
/// let mut matrix = array![[1, 2], [3, 4]];
/// views::on_slice(matrix.column_mut(1), |column| {
///     assert_eq!(column, [2, 4]);
///     column.fill(7);
///     group.all_reduce(column, ReduceOp::Sum)
/// })?;
/// assert_eq!(matrix, array![[1, 7], [3, 7]]);
/// # Ok::<_, drumline::Error>(())
/// ```
///
/// # Errors
///
/// The error of `call`.
pub fn on_slice<T: Element, D: Dimension, R>(
    mut view: ArrayViewMut<'_, T, D>,
    call: impl FnOnce(&mut [T]) -> Result<R>,
) -> Result<R> {
    if let Some(slice) = view.as_slice_mut() {
        return call(slice);
    }
    let mut copy: Vec<T> = view.iter().copied().collect();
    let result = call(&mut copy);
    view.iter_mut().zip(copy).for_each(|(to, from)| *to = from);
    result
}

/// The elements of `view` in the order of its indices: borrowed if they are contiguous, otherwise copied.
///
/// ```
/// use std::borrow::Cow;
///
/// use drumline::views::as_slice;
/// use ndarray::array;
///
/// let matrix = array![[1, 2], [3, 4]];
/// assert!(matches!(as_slice(&matrix.view()), Cow::Borrowed([1, 2, 3, 4])));
/// assert_eq!(as_slice(&matrix.t())[..], [1, 3, 2, 4]); // copied
/// ```
pub fn as_slice<'a, T: Element, D: Dimension>(view: &'a ArrayView<'_, T, D>) -> Cow<'a, [T]> {
    match view.as_slice() {
        Some(slice) => Cow::Borrowed(slice),
        None => Cow::Owned(view.iter().copied().collect()),
    }
}

/// The elements of `view`, if they are contiguous in the order of its indices.
///
/// ```
/// use drumline::views::as_slice_mut;
/// use ndarray::array;
///
/// let mut matrix = array![[1, 2], [3, 4]];
/// assert_eq!(as_slice_mut(&mut matrix.row_mut(1))?, [3, 4]);
/// let error = as_slice_mut(&mut matrix.column_mut(1)).unwrap_err().to_string();
/// assert!(error.contains("do not lie side by side"), "{error}");
/// # Ok::<_, drumline::Error>(())
/// ```
///
/// # Errors
///
/// [`Argument`](crate::ErrorKind::Argument) if they are not. [`on_slice`] makes a copy then.
pub fn as_slice_mut<'a, T: Element, D: Dimension>(
    view: &'a mut ArrayViewMut<'_, T, D>,
) -> Result<&'a mut [T]> {
    let strides = view.strides().to_vec();
    view.as_slice_mut().ok_or_else(|| Error::argument("as_slice_mut", format!(
            "the elements of this view, with strides {strides:?}, do not lie side by side in the \
             order of its indices: use on_slice, which copies them"
        )))
}
