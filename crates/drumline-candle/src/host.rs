//! Elements of candle's tensors in the memory of the host, and back.

use bytemuck::NoUninit;
use candle_core::{DType, Device, Result, Storage, Tensor, WithDType};
use drumline::ddp::{Values, ValuesMut};
use half::{bf16, f16, slice::HalfFloatSliceExt};

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

/// The type in which the gradients of a variable are summed: 16-bit floats are widened to f32, which is exact, and
/// their average is rounded once.
pub(crate) fn summed_as(dtype: DType) -> Option<drumline::DType> {
    match dtype {
        DType::F64 => Some(drumline::DType::F64),
        DType::F32 | DType::F16 | DType::BF16 => Some(drumline::DType::F32),
        _ => None,
    }
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
    let written = match (gradient.dtype(), place) {
        (DType::F32, place @ ValuesMut::F32(_)) => {
            with_slice(gradient, |it: &[f32]| place.copy_from(Values::F32(it)))
        }
        (DType::F64, place @ ValuesMut::F64(_)) => {
            with_slice(gradient, |it: &[f64]| place.copy_from(Values::F64(it)))
        }
        (DType::F16, ValuesMut::F32(place)) => with_slice(gradient, |it: &[f16]| widen(it, place)),
        (DType::BF16, ValuesMut::F32(place)) => {
            with_slice(gradient, |it: &[bf16]| widen(it, place))
        }
        _ => Ok(false),
    };
    written.unwrap_or(false)
}

/// An average as a gradient of `variable`, on its device and in its type.
pub(crate) fn read_average(average: Values<'_>, variable: &Tensor) -> Result<Tensor> {
    let (shape, device) = (variable.shape().clone(), variable.device());
    match (variable.dtype(), average) {
        (DType::F32, Values::F32(values)) => Tensor::from_vec(values.to_vec(), shape, device),
        (DType::F64, Values::F64(values)) => Tensor::from_vec(values.to_vec(), shape, device),
        (DType::F16, Values::F32(values)) => {
            let mut rounded = vec![f16::ZERO; values.len()];
            rounded.convert_from_f32_slice(values);
            Tensor::from_vec(rounded, shape, device)
        }
        (DType::BF16, Values::F32(values)) => {
            let mut rounded = vec![bf16::ZERO; values.len()];
            rounded.convert_from_f32_slice(values);
            Tensor::from_vec(rounded, shape, device)
        }
        (dtype, _) => candle_core::bail!("the average of a gradient of {dtype:?} has another type"),
    }
}

fn widen<T>(elements: &[T], place: &mut [f32]) -> bool
where
    [T]: HalfFloatSliceExt,
{
    let fits = elements.len() == place.len();
    if fits {
        elements.convert_to_f32_slice(place);
    }
    fits
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
        let (mut short, mut right, mut double) = ([0.0; 1], [0.0; 2], [0.0; 2]);
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            assert!(!write_gradient(&gradient(dtype), ValuesMut::F32(&mut short)));
            assert!(write_gradient(&gradient(dtype), ValuesMut::F32(&mut right)));
            assert!(!write_gradient(&gradient(dtype), ValuesMut::F64(&mut double)));
        }
        assert!(!write_gradient(&gradient(DType::I64), ValuesMut::F32(&mut right)));
    }

    #[test]
    fn averages_of_short_floats_are_rounded_once_to_the_nearest() {
        let like = Tensor::zeros(2, DType::BF16, &Device::Cpu).unwrap();
        // Halfway between two values of bf16, and a little above.
        let average = [1.0 + f32::powi(2.0, -8), 1.0 + f32::powi(2.0, -8) + f32::powi(2.0, -20)];
        let rounded = read_average(Values::F32(&average), &like).unwrap();
        assert_eq!(
            rounded.to_vec1::<bf16>().unwrap().map_to_f32(),
            [1.0, 1.0 + f32::powi(2.0, -7)]
        );
    }

    trait MapToF32 {
        fn map_to_f32(self) -> Vec<f32>;
    }

    impl MapToF32 for Vec<bf16> {
        fn map_to_f32(self) -> Vec<f32> {
            self.into_iter().map(bf16::to_f32).collect()
        }
    }
}
