//! The Rust types that collectives carry.

use std::fmt::Debug;

use half::{bf16, f16};
use num_complex::Complex;

use crate::kernels::Kernels;
use crate::number::OfNumber;
use crate::{Bool, DType, F8E4M3, F8E5M2};

/// A Rust type that a collective can carry.
///
/// The set of types is closed, because it is part of the wire format.
///
/// ```
/// use drumline_kernels::{DType, Element, f16};
///
/// /// Bytes of the partial sums of a buffer.
/// fn bytes_to_sum<T: Element>(buffer: &[T]) -> usize {
///     buffer.len() * size_of::<T::Accumulator>()
/// }
/// assert_eq!((f16::DTYPE, bytes_to_sum(&[f16::ONE; 3])), (DType::F16, 12));
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no type that a collective can carry",
    note = "the types are u8 to u64, i8 to i64, f32, f64, f16, bf16, F8E4M3, F8E5M2, Complex and Bool",
    note = "in place of `usize` and `isize`, which differ between machines, take `u64` and `i64`; in place of `bool`, `Bool`"
)]
pub trait Element:
    Kernels<Wide = <Self as Element>::Accumulator> + OfNumber + Send + Sync + PartialEq + Debug
{
    /// The run-time name of the type.
    const DTYPE: DType;

    /// The type in which partial results are kept: `f32` for floats of 16 and 8 bits, the type itself
    /// for all others.
    type Accumulator: Element<Accumulator = Self::Accumulator>;
}

macro_rules! elements {
    ($($type:ty => $dtype:ident, $accumulator:ty);*) => {$(
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
            type Accumulator = $accumulator;
        }
    )*};
}

elements!(
    u8 => U8, u8; u16 => U16, u16; u32 => U32, u32; u64 => U64, u64;
    i8 => I8, i8; i16 => I16, i16; i32 => I32, i32; i64 => I64, i64;
    f16 => F16, f32; bf16 => Bf16, f32; f32 => F32, f32; f64 => F64, f64;
    F8E4M3 => F8E4M3, f32; F8E5M2 => F8E5M2, f32;
    Complex<f32> => Complex64, Complex<f32>; Complex<f64> => Complex128, Complex<f64>;
    Bool => Bool, Bool
);
