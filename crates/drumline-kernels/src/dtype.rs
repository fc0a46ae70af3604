use bytemuck::Pod;

/// The type of the elements of a buffer.
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
}

impl DType {
    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            DType::U8 => 1,
            DType::F32 => 4,
            DType::I64 | DType::F64 => 8,
        }
    }

    /// The name that Rust gives the type: `f32` and so on.
    pub const fn name(self) -> &'static str {
        match self {
            DType::U8 => "u8",
            DType::I64 => "i64",
            DType::F32 => "f32",
            DType::F64 => "f64",
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A Rust type that a collective can carry.
pub trait Element: Arithmetic + Pod + Send + Sync + PartialEq + std::fmt::Debug {
    /// Its run-time name.
    const DTYPE: DType;
}

pub(crate) use sealed::Arithmetic;

mod sealed {
    /// What the operators need of a type. Sealed: the set of types is part of the wire format.
    pub trait Arithmetic: Copy {
        fn sum(self, other: Self) -> Self;
        fn min(self, other: Self) -> Self;
        fn max(self, other: Self) -> Self;
        fn divide(self, by: usize) -> Self;
    }
}

macro_rules! integers {
    ($($type:ty => $dtype:ident),*) => {$(
        impl Arithmetic for $type {
            #[inline(always)]
            fn sum(self, other: Self) -> Self { self.wrapping_add(other) }
            #[inline(always)]
            fn min(self, other: Self) -> Self { Ord::min(self, other) }
            #[inline(always)]
            fn max(self, other: Self) -> Self { Ord::max(self, other) }
            #[inline(always)]
            fn divide(self, by: usize) -> Self { (i128::from(self) / by as i128) as Self }
        }
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}

macro_rules! floats {
    ($($type:ty => $dtype:ident),*) => {$(
        impl Arithmetic for $type {
            #[inline(always)]
            fn sum(self, other: Self) -> Self { self + other }
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                if self.is_nan() || other.is_nan() {
                    <$type>::NAN
                } else if self < other || (self == other && self.is_sign_negative()) {
                    self
                } else {
                    other
                }
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                if self.is_nan() || other.is_nan() {
                    <$type>::NAN
                } else if self > other || (self == other && self.is_sign_positive()) {
                    self
                } else {
                    other
                }
            }
            // Dividing, not multiplying by the inverse: the result is promised to be sum / n.
            #[inline(always)]
            fn divide(self, by: usize) -> Self { self / by as $type }
        }
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}

integers!(u8 => U8, i64 => I64);
floats!(f32 => F32, f64 => F64);
