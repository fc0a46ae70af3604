//! Copies tensors from the memory of the CPU, row-major.

use burn::{
    backend::{
        DispatchDevice,
        flex::{FlexTensor, Layout},
    },
    tensor::{DType, Device},
};
use drumline::ddp::ValuesMut;

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

/// Writes `tensor` to `place` with one copy. Returns whether type and length fit. Gradients of weights
/// are often transposed views.
pub(crate) fn pack_flex(tensor: &FlexTensor, place: ValuesMut<'_>) -> bool {
    match (place, tensor.dtype()) {
        (ValuesMut::F32(place), DType::F32) => copy(tensor.storage(), tensor.layout(), place),
        (ValuesMut::F64(place), DType::F64) => copy(tensor.storage(), tensor.layout(), place),
        _ => false,
    }
}

/// Copies the elements of `storage` that `layout` describes, row-major.
fn copy<T: Copy>(storage: &[T], layout: &Layout, place: &mut [T]) -> bool {
    if layout.num_elements() != place.len() {
        return false;
    }
    if let Some((start, end)) = layout.contiguous_offsets() {
        place.copy_from_slice(&storage[start..end]);
        return true;
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
        copy_matrix(rows, columns, at, target);
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

/// Copies in square tiles, so that cache lines are used completely on both sides.
fn copy_matrix<T>(rows: usize, columns: usize, at: impl Fn(usize, usize) -> T, target: &mut [T]) {
    const TILE: usize = 32;
    for top in (0..rows).step_by(TILE) {
        for left in (0..columns).step_by(TILE) {
            for row in top..rows.min(top + TILE) {
                for column in left..columns.min(left + TILE) {
                    target[row * columns + column] = at(row, column);
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
            prop_assert!(pack_flex(&view, ValuesMut::F32(&mut packed)));
            prop_assert_eq!(packed, wanted);
        }
    }

    #[test]
    fn what_does_not_fit_is_not_packed() {
        let tensor = FlexTensor::from_data(TensorData::from([1.0_f32, 2.0]));
        assert!(!pack_flex(&tensor, ValuesMut::F32(&mut [0.0; 3])));
        assert!(!pack_flex(&tensor, ValuesMut::F64(&mut [0.0; 2])));
    }
}
