//! Copies tensors from the memory of the CPU, row-major.

use std::ops::AddAssign;

use burn::tensor::{DType, Device, Element};
use bytemuck::Pod;
use drumline::ddp::{Place, Values, ValuesMut};

use crate::burn_version::backend::{DispatchDevice, FlexTensor, Layout};

/// Whether `device` is burn's flex backend.
pub(crate) fn is_flex(device: &Device) -> bool {
    matches!(device.clone().without_autodiff().as_dispatch(), DispatchDevice::Flex(_))
}

/// Whether gradients on `device` can be handed to the reducer during backward: [`GradientTap`](crate::tap::GradientTap)
/// is implemented for its backend.
pub(crate) fn is_tappable(device: &Device) -> bool {
    match device.clone().without_autodiff().as_dispatch() {
        DispatchDevice::Flex(_) => true,
        #[cfg(feature = "gpu")]
        DispatchDevice::Cube(_) => true,
        _ => false,
    }
}

/// The device without what autodiff adds to it, for messages: `NdArray(Cpu)`.
pub(crate) fn device_name(device: &Device) -> String {
    format!("{:?}", device.clone().without_autodiff().as_dispatch())
}

/// The elements of a tensor that has them row-major and without gaps.
pub(crate) fn slice(tensor: &FlexTensor) -> Option<Values<'_>> {
    match tensor.dtype() {
        DType::F32 => tensor.as_slice().map(Values::F32),
        DType::F64 => tensor.as_slice().map(Values::F64),
        DType::F16 => tensor.as_slice().map(Values::F16),
        DType::BF16 => tensor.as_slice().map(Values::Bf16),
        _ => None,
    }
}

/// Writes `tensor` to `place`, or adds it, with one pass over it. Returns whether type and length fit. Gradients of
/// weights are often transposed views.
pub(crate) fn pack_flex(tensor: &FlexTensor, place: Place<'_>) -> bool {
    if let Some(values) = slice(tensor) {
        return place.put(values);
    }
    let Place { values, holds_sum } = place;
    match (values, tensor.dtype()) {
        (ValuesMut::F32(place), DType::F32) => put(tensor, place, holds_sum),
        (ValuesMut::F64(place), DType::F64) => put(tensor, place, holds_sum),
        (ValuesMut::F16(place), DType::F16) => put(tensor, place, holds_sum),
        (ValuesMut::Bf16(place), DType::BF16) => put(tensor, place, holds_sum),
        _ => false,
    }
}

fn put<T: Element + Pod + AddAssign>(
    tensor: &FlexTensor,
    place: &mut [T],
    holds_sum: bool,
) -> bool {
    let (storage, layout) = (tensor.storage(), tensor.layout());
    match holds_sum {
        true => walk(storage, layout, place, |place, value| *place += value),
        false => walk(storage, layout, place, |place, value| *place = value),
    }
}

/// Calls `put` with each place and the element for it: the elements of `storage` that `layout` describes, row-major.
fn walk<T: Copy>(storage: &[T], layout: &Layout, place: &mut [T], put: impl Fn(&mut T, T)) -> bool {
    if layout.num_elements() != place.len() {
        return false;
    }
    let shape: Vec<usize> = layout.shape().to_vec();
    let strides = layout.strides();
    // One matrix after the other; a vector is a matrix of one row.
    let (matrices, matrix) = shape.split_at(shape.len().saturating_sub(2));
    let (matrix_strides, row_and_column) = strides.split_at(matrices.len());
    let ([rows, columns], [row_stride, column_stride]) = match (matrix, row_and_column) {
        (&[rows, columns], &[row, column]) => ([rows, columns], [row, column]),
        (&[columns], &[column]) => ([1, columns], [0, column]),
        _ => return false, // a scalar is contiguous
    };
    let mut index = vec![0_usize; matrices.len()];
    for target in place.chunks_exact_mut(rows * columns) {
        let offset: isize = index.iter().zip(matrix_strides).map(|(&i, s)| i as isize * s).sum();
        let first = layout.start_offset() as isize + offset;
        let at = |row: usize, column: usize| {
            storage[(first + row as isize * row_stride + column as isize * column_stride) as usize]
        };
        walk_matrix(rows, columns, at, target, &put);
        // Go to the next index. The last dimension runs fastest.
        for (index, &length) in index.iter_mut().zip(matrices).rev() {
            *index += 1;
            if *index < length {
                break;
            }
            *index = 0;
        }
    }
    true
}

/// Walks in square tiles, so that cache lines are used completely on both sides.
fn walk_matrix<T>(
    rows: usize,
    columns: usize,
    at: impl Fn(usize, usize) -> T,
    target: &mut [T],
    put: &impl Fn(&mut T, T),
) {
    const TILE: usize = 32;
    for top in (0..rows).step_by(TILE) {
        for left in (0..columns).step_by(TILE) {
            for row in top..rows.min(top + TILE) {
                for column in left..columns.min(left + TILE) {
                    put(&mut target[row * columns + column], at(row, column));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use burn::tensor::{Shape, TensorData};
    use proptest::prelude::*;

    use super::*;

    fn views() -> impl Strategy<Value = FlexTensor> {
        let shape = prop::collection::vec(1usize..40, 1..4);
        (shape, any::<u64>()).prop_map(|(shape, choice)| {
            let count: usize = shape.iter().product();
            let values: Vec<f32> = (0..count).map(|i| i as f32).collect();
            let tensor = FlexTensor::from_data(TensorData::new(values, Shape::from(shape.clone())));
            let mut layout = tensor.layout().clone();
            let dims = shape.len();
            layout = layout.transpose(choice as usize % dims, (choice >> 8) as usize % dims);
            if choice & 1 << 16 != 0 {
                layout = layout.flip(&[(choice >> 20) as usize % dims]);
            }
            if choice & 1 << 17 != 0 {
                let dim = (choice >> 24) as usize % dims;
                let length = layout.shape()[dim];
                layout = layout.narrow(dim, length / 2, length - length / 2);
            }
            tensor.with_layout(layout)
        })
    }

    proptest! {
        /// For transposed, flipped and narrowed views: the same elements as burn's own copy.
        #[test]
        fn any_view_is_packed_row_major(view in views()) {
            let wanted: Vec<f32> = view.clone().into_data().try_into_vec().unwrap();
            let mut packed = vec![f32::NAN; wanted.len()];
            let pack = |packed: &mut Vec<f32>, holds_sum| {
                pack_flex(&view, Place { values: ValuesMut::F32(packed), holds_sum })
            };
            prop_assert!(pack(&mut packed, false));
            prop_assert_eq!(&packed, &wanted);
            prop_assert!(pack(&mut packed, true));
            prop_assert_eq!(packed, wanted.iter().map(|it| it + it).collect::<Vec<f32>>());
        }
    }

    #[test]
    fn what_does_not_fit_is_not_packed() {
        let tensor = FlexTensor::from_data(TensorData::from([1.0_f32, 2.0]));
        for values in [ValuesMut::F32(&mut [0.0; 3]), ValuesMut::F64(&mut [0.0; 2])] {
            assert!(!pack_flex(&tensor, Place { values, holds_sum: false }));
        }
    }
}
