//! What the library's own reductions work on.

use std::fmt;

/// A type of numbers that every MPI knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Number {
    I8,
    U8,
    I16,
    U16,
    I32,
    U32,
    I64,
    U64,
    F32,
    F64,
    /// Two `f32`, the real part first.
    Complex64,
    /// Two `f64`, the real part first.
    Complex128,
}

impl Number {
    /// The length of one number.
    pub fn bytes(self) -> usize {
        match self {
            Number::I8 | Number::U8 => 1,
            Number::I16 | Number::U16 => 2,
            Number::I32 | Number::U32 | Number::F32 => 4,
            Number::I64 | Number::U64 | Number::F64 | Number::Complex64 => 8,
            Number::Complex128 => 16,
        }
    }

    /// The alignment of one number.
    pub(crate) fn align(self) -> usize {
        match self {
            Number::Complex64 | Number::Complex128 => self.bytes() / 2,
            other => other.bytes(),
        }
    }
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
    }
}

/// An operator that every MPI knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Op {
    Sum,
    Min,
    Max,
    Product,
    /// The bits that all ranks have set.
    BitAnd,
    /// The bits that any rank has set.
    BitOr,
    /// The bits that an odd number of ranks has set.
    BitXor,
}

impl Op {
    /// Whether MPI applies this operator to such numbers.
    pub fn serves(self, number: Number) -> bool {
        match number {
            Number::Complex64 | Number::Complex128 => matches!(self, Op::Sum | Op::Product),
            Number::F32 | Number::F64 => !matches!(self, Op::BitAnd | Op::BitOr | Op::BitXor),
            _ => true,
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
    }
}
