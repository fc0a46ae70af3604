//! Elements of candle's tensors in the memory of the host, and back.

use bytemuck::NoUninit;
use candle_core::{DType, Device, Result, Storage, Tensor, WithDType};
use drumline::ddp::{Values, ValuesMut};
use half::{bf16, f16};

/// The type by drumline's name. `None` if drumline does not carry it.
pub(crate) fn carried_as(dtype: DType) -> Option<drumline::DType> {
    Some(match dtype {
        DType::U8 => drumline::DType::U8,
        DType::U32 => drumline::DType::U32,
        DType::I16 => drumline::DType::I16,
        DType::I32 => drumline::DType::I32,
        DType::I64 => drumline::DType::I64,
        DType::BF16 => drumline::DType::Bf16,
        DType::F16 => drumline::DType::F16,
        DType::F32 => drumline::DType::F32,
        DType::F64 => drumline::DType::F64,
        _ => return None,
    })
}

/// The type in which the gradients of a variable travel, by drumline's name. `None` if they cannot be averaged.
///
/// It is that of the variable. drumline sums 16-bit floats in f32, and rounds their average once.
pub(crate) fn averaged_as(dtype: DType) -> Option<drumline::DType> {
    matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16)
        .then(|| carried_as(dtype))
        .flatten()
}

/// The elements, row-major, as native-endian bytes.
pub(crate) fn to_bytes(tensor: &Tensor) -> Result<Vec<u8>> {
    fn copy<T: WithDType + NoUninit>(tensor: &Tensor) -> Result<Vec<u8>> {
        with_slice(tensor, |elements: &[T]| bytemuck::cast_slice(elements).to_vec())
    }
    match tensor.dtype() {
        DType::U8 => copy::<u8>(tensor),
        DType::U32 => copy::<u32>(tensor),
        DType::I16 => copy::<i16>(tensor),
        DType::I32 => copy::<i32>(tensor),
        DType::I64 => copy::<i64>(tensor),
        DType::BF16 => copy::<bf16>(tensor),
        DType::F16 => copy::<f16>(tensor),
        DType::F32 => copy::<f32>(tensor),
        DType::F64 => copy::<f64>(tensor),
        other => candle_core::bail!("tensors of {other:?} cannot be copied to the host"),
    }
}

/// A tensor that looks like `like` and holds what [`to_bytes`] gave.
pub(crate) fn from_bytes(bytes: &[u8], like: &Tensor) -> Result<Tensor> {
    Tensor::from_raw_buffer(bytes, like.dtype(), like.dims(), like.device())
}

/// Writes a gradient that is on the host to its place. Returns whether type and number of elements fit.
pub(crate) fn write_gradient(gradient: &Tensor, place: ValuesMut<'_>) -> bool {
    with_values(gradient, |values| place.copy_from(values)).unwrap_or(false)
}

/// Calls `each` with the elements of a gradient, row-major.
pub(crate) fn with_values<R>(gradient: &Tensor, each: impl FnOnce(Values<'_>) -> R) -> Result<R> {
    match gradient.dtype() {
        DType::F32 => with_slice(gradient, |it| each(Values::F32(it))),
        DType::F64 => with_slice(gradient, |it| each(Values::F64(it))),
        DType::F16 => with_slice(gradient, |it| each(Values::F16(it))),
        DType::BF16 => with_slice(gradient, |it| each(Values::Bf16(it))),
        other => candle_core::bail!("gradients of {other:?} cannot be averaged"),
    }
}

/// An average as a gradient of `variable`, on its device.
pub(crate) fn read_average(average: Values<'_>, variable: &Tensor) -> Result<Tensor> {
    let (shape, device) = (variable.shape().clone(), variable.device());
    match average {
        Values::F32(values) => Tensor::from_vec(values.to_vec(), shape, device),
        Values::F64(values) => Tensor::from_vec(values.to_vec(), shape, device),
        Values::F16(values) => Tensor::from_vec(values.to_vec(), shape, device),
        Values::Bf16(values) => Tensor::from_vec(values.to_vec(), shape, device),
        _ => candle_core::bail!("the average of a gradient has a type that candle does not have"),
    }
}

/// Calls `each` with the elements, row-major. They are copied only if they are strided or on another device.
fn with_slice<T: WithDType, R>(tensor: &Tensor, each: impl FnOnce(&[T]) -> R) -> Result<R> {
    let tensor = tensor.to_device(&Device::Cpu)?.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cpu(elements), Some((start, end))) => {
            Ok(each(&elements.as_slice::<T>()?[start..end]))
        }
        _ => candle_core::bail!("the tensor is not contiguous in the memory of the host"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strided_tensors_are_read_row_major() {
        let tensor = Tensor::new(&[[1_f32, 2.0, 3.0], [4.0, 5.0, 6.0]], &Device::Cpu).unwrap();
        let column = tensor.narrow(1, 1, 1).unwrap();
        let bytes = to_bytes(&column).unwrap();
        assert_eq!(bytes, [2_f32, 5.0].map(f32::to_ne_bytes).concat());
        let transposed = tensor.t().unwrap();
        let mut place = [0.0; 6];
        assert!(write_gradient(&transposed, ValuesMut::F32(&mut place)));
        assert_eq!(place, [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
        let back = from_bytes(&to_bytes(&transposed).unwrap(), &transposed).unwrap();
        assert_eq!(back.to_vec2::<f32>().unwrap(), transposed.to_vec2::<f32>().unwrap());
    }

    #[test]
    fn gradients_of_another_type_or_length_do_not_fit() {
        let gradient = |dtype| Tensor::ones(2, dtype, &Device::Cpu).unwrap();
        let (mut short, mut right) = ([0.0; 1], [0.0; 2]);
        assert!(!write_gradient(&gradient(DType::F32), ValuesMut::F32(&mut short)));
        assert!(write_gradient(&gradient(DType::F32), ValuesMut::F32(&mut right)));
        assert_eq!(right, [1.0; 2]);
        for dtype in [DType::F64, DType::F16, DType::BF16, DType::I64] {
            assert!(!write_gradient(&gradient(dtype), ValuesMut::F32(&mut right)));
        }
        let (mut half, mut brain) = ([f16::ZERO; 2], [bf16::ZERO; 2]);
        assert!(write_gradient(&gradient(DType::F16), ValuesMut::F16(&mut half)));
        assert!(write_gradient(&gradient(DType::BF16), ValuesMut::Bf16(&mut brain)));
        assert_eq!((half, brain), ([f16::ONE; 2], [bf16::ONE; 2]));
        assert!(!write_gradient(&gradient(DType::BF16), ValuesMut::F16(&mut half)));
    }

    #[test]
    fn gradients_travel_in_the_type_of_their_variable() {
        use drumline::DType::{Bf16, F16, F32, F64};
        let types = [DType::F32, DType::F64, DType::F16, DType::BF16].map(averaged_as);
        assert_eq!(types, [F32, F64, F16, Bf16].map(Some));
        assert_eq!([DType::I64, DType::F8E4M3].map(averaged_as), [None, None]);
    }
}
