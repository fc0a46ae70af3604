//! Elements made of numbers whose type is known at run time only.

use half::{bf16, f16};
use num_complex::Complex;

use crate::{Bool, F8E4M3, F8E5M2};

/// A number of any type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    /// A whole number.
    Integer(i128),
    /// Any other number.
    Float(f64),
}

/// A type with an element for each number, or for some.
pub trait OfNumber: Sized {
    /// The element with this value.
    fn of_number(number: Number) -> Option<Self>;
}

macro_rules! of_integer {
    ($($type:ty),*) => {$(
        impl OfNumber for $type {
            fn of_number(number: Number) -> Option<$type> {
                match number {
                    Number::Integer(number) => number.try_into().ok(),
                    Number::Float(_) => None,
                }
            }
        }
    )*};
}

macro_rules! of_float {
    ($($type:ty: $of:expr;)*) => {$(
        impl OfNumber for $type {
            fn of_number(number: Number) -> Option<$type> {
                let of: fn(f64) -> $type = $of;
                Some(of(match number {
                    Number::Integer(number) => number as f64,
                    Number::Float(number) => number,
                }))
            }
        }
    )*};
}

of_integer!(u8, u16, u32, u64, i8, i16, i32, i64);
of_float! {
    f16: f16::from_f64;
    bf16: bf16::from_f64;
    f32: |number| number as f32;
    f64: |number| number;
    F8E4M3: |number| F8E4M3::from_f32(number as f32);
    F8E5M2: |number| F8E5M2::from_f32(number as f32);
    Complex<f32>: |number| Complex::new(number as f32, 0.0);
    Complex<f64>: |number| Complex::new(number, 0.0);
    Bool: |number| Bool::from(number != 0.0);
}
