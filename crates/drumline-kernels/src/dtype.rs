//! The names of element types at run time.

use std::fmt;
use std::str::FromStr;

use crate::UnknownName;

/// The type of the elements of a buffer.
///
/// ```
/// use drumline_kernels::DType;
///
/// assert_eq!("bf16".parse(), Ok(DType::Bf16));
/// assert_eq!(DType::Bf16.accumulator(), DType::F32);
/// assert_eq!(DType::from_code(DType::Bf16 as u8), Some(DType::Bf16));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum DType {
    /// 8-bit unsigned integer.
    U8 = 1,
    /// 64-bit signed integer.
    I64 = 2,
    /// IEEE 754 single precision.
    F32 = 3,
    /// IEEE 754 double precision.
    F64 = 4,
    /// 8-bit signed integer.
    I8 = 5,
    /// 16-bit unsigned integer.
    U16 = 6,
    /// 16-bit signed integer.
    I16 = 7,
    /// 32-bit unsigned integer.
    U32 = 8,
    /// 32-bit signed integer.
    I32 = 9,
    /// 64-bit unsigned integer.
    U64 = 10,
    /// IEEE 754 half precision: 5 bits of exponent, 10 of fraction.
    F16 = 11,
    /// The upper half of single precision: 8 bits of exponent, 7 of fraction.
    Bf16 = 12,
    /// A byte that means true unless it is 0: [`Bool`](crate::Bool).
    Bool = 13,
    /// Two `f32`, the real part first.
    Complex64 = 14,
    /// Two `f64`, the real part first.
    Complex128 = 15,
    /// 4 bits of exponent, 3 of fraction, no infinity: [`F8E4M3`](crate::F8E4M3).
    F8E4M3 = 16,
    /// 5 bits of exponent, 2 of fraction: [`F8E5M2`](crate::F8E5M2).
    F8E5M2 = 17,
}

/// A class of types. It decides which operators a type has.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    Bool,
    Integer,
    Float,
    Complex,
}

impl DType {
    /// All types, in the order of their codes.
    pub const ALL: [DType; 17] = [
        DType::U8,
        DType::I64,
        DType::F32,
        DType::F64,
        DType::I8,
        DType::U16,
        DType::I16,
        DType::U32,
        DType::I32,
        DType::U64,
        DType::F16,
        DType::Bf16,
        DType::Bool,
        DType::Complex64,
        DType::Complex128,
        DType::F8E4M3,
        DType::F8E5M2,
    ];

    /// The type with this code (`dtype as u8`, as in messages), if there is one.
    pub const fn from_code(code: u8) -> Option<DType> {
        match (code as usize).checked_sub(1) {
            Some(index) if index < DType::ALL.len() => Some(DType::ALL[index]),
            _ => None,
        }
    }

    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            DType::U8 | DType::I8 | DType::Bool | DType::F8E4M3 | DType::F8E5M2 => 1,
            DType::U16 | DType::I16 | DType::F16 | DType::Bf16 => 2,
            DType::U32 | DType::I32 | DType::F32 => 4,
            DType::U64 | DType::I64 | DType::F64 | DType::Complex64 => 8,
            DType::Complex128 => 16,
        }
    }

    /// The name of the type in Rust (such as `f32`), or the usual name where Rust has none.
    pub const fn name(self) -> &'static str {
        match self {
            DType::U8 => "u8",
            DType::I64 => "i64",
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::I8 => "i8",
            DType::U16 => "u16",
            DType::I16 => "i16",
            DType::U32 => "u32",
            DType::I32 => "i32",
            DType::U64 => "u64",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::Bool => "bool",
            DType::Complex64 => "complex64",
            DType::Complex128 => "complex128",
            DType::F8E4M3 => "f8e4m3",
            DType::F8E5M2 => "f8e5m2",
        }
    }

    /// The type in which partial results are kept: [`DType::F32`] for floats of 16 and 8 bits, the
    /// type itself for all others.
    pub const fn accumulator(self) -> DType {
        match self {
            DType::F16 | DType::Bf16 | DType::F8E4M3 | DType::F8E5M2 => DType::F32,
            wide => wide,
        }
    }

    /// Whether this is a real (not complex) floating-point type.
    pub const fn is_float(self) -> bool {
        matches!(self.class(), Class::Float)
    }

    /// Whether this is a type of complex numbers.
    pub const fn is_complex(self) -> bool {
        matches!(self.class(), Class::Complex)
    }

    pub(crate) const fn class(self) -> Class {
        match self {
            DType::Bool => Class::Bool,
            DType::U8 | DType::U16 | DType::U32 | DType::U64 => Class::Integer,
            DType::I8 | DType::I16 | DType::I32 | DType::I64 => Class::Integer,
            DType::F8E4M3 | DType::F8E5M2 | DType::F16 | DType::Bf16 => Class::Float,
            DType::F32 | DType::F64 => Class::Float,
            DType::Complex64 | DType::Complex128 => Class::Complex,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<DType, UnknownName> {
        let known = DType::ALL.into_iter().find(|dtype| dtype.name() == name);
        known.ok_or_else(|| UnknownName::new("element type", name, DType::ALL.map(DType::name)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_has_a_code() {
        for code in 0..=u8::MAX {
            let dtype = DType::from_code(code);
            assert_eq!(dtype.map(|dtype| dtype as u8), (1..=17).contains(&code).then_some(code));
        }
    }

    #[test]
    fn every_type_has_a_name() {
        for dtype in DType::ALL {
            assert_eq!(dtype.to_string().parse(), Ok(dtype));
        }
        let error = "float".parse::<DType>().unwrap_err().to_string();
        assert_eq!(
            error,
            "there is no element type \"float\"; \
             it is one of u8, i64, f32, f64, i8, u16, i16, u32, i32, u64, f16, bf16, \
             bool, complex64, complex128, f8e4m3, f8e5m2"
        );
    }
}
