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

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that a collective can carry.
pub trait Element: sealed::Sealed + Pod + Send + Sync + PartialEq + std::fmt::Debug {
    /// Its run-time name.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($type:ty => $dtype:ident),*) => {$(
        impl sealed::Sealed for $type {}
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}

elements!(u8 => U8, i64 => I64, f32 => F32, f64 => F64);
