//! Elements as the oracle computes with them.

use bytemuck::Pod;
use drumline::{
    ReduceOp,
    types::{Bool, F8E4M3, F8E5M2},
};
use fastrand::Rng;
use half::{bf16, f16};
use num_complex::Complex;

pub(crate) trait Value: Pod {
    /// The type of partial results.
    type Wide: Copy;
    fn random(rng: &mut Rng) -> Self;
    /// The same value for all NaN, whatever their payload and sign.
    fn canonical(self) -> Self;
    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
    fn apply(op: ReduceOp, a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn divide(wide: Self::Wide, by: u32) -> Self::Wide;
}

/// Evaluates an expression in which a name stands for a type as wide as a [`DType`](drumline::DType), one for each width.
/// What moves elements or holds them is the same for all of one width, and takes long to compile for each type.
macro_rules! with_width {
    ($dtype:expr, $name:ident => $value:expr) => {
        $crate::value::with_width!(@ $dtype, $name => $value;
            u8, half::bf16, f32, i64, num_complex::Complex<f64>)
    };
    (@ $dtype:expr, $name:ident => $value:expr; $($types:ty),*) => {
        match $dtype.size() {
            $(it if it == size_of::<$types>() => {
                type $name = $types;
                $value
            })*
            other => unreachable!("elements of {other} bytes"),
        }
    };
}
pub(crate) use with_width;

/// All elements; the bytes need no alignment.
pub(crate) fn read_all<T: Pod>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

pub(crate) fn random_elements<T: Value>(mut rng: Rng, elements: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(elements * size_of::<T>());
    for _ in 0..elements {
        bytes.extend_from_slice(bytemuck::bytes_of(&T::random(&mut rng)));
    }
    bytes
}

fn unknown(op: ReduceOp) -> ! {
    unreachable!("an operator that these elements do not have: {op}")
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Value for $type {
            type Wide = $type;

            fn random(rng: &mut Rng) -> $type {
                rng.u64(..) as $type
            }

            fn canonical(self) -> $type {
                self
            }

            fn widen(self) -> $type {
                self
            }

            fn narrow(wide: $type) -> $type {
                wide
            }

            fn apply(op: ReduceOp, a: $type, b: $type) -> $type {
                match op {
                    ReduceOp::Sum | ReduceOp::Avg => a.wrapping_add(b),
                    ReduceOp::Product => a.wrapping_mul(b),
                    ReduceOp::Min => a.min(b),
                    ReduceOp::Max => a.max(b),
                    ReduceOp::Band => a & b,
                    ReduceOp::Bor => a | b,
                    ReduceOp::Bxor => a ^ b,
                    other => unknown(other),
                }
            }

            fn divide(wide: $type, by: u32) -> $type {
                (i128::from(wide) / i128::from(by)) as $type
            }
        }
    )*};
}

integers!(u8, u16, u32, u64, i8, i16, i32, i64);

impl Value for Bool {
    type Wide = bool;

    fn random(rng: &mut Rng) -> Bool {
        rng.bool().into()
    }

    fn canonical(self) -> Bool {
        self
    }

    fn widen(self) -> bool {
        self.get()
    }

    fn narrow(wide: bool) -> Bool {
        wide.into()
    }

    fn apply(op: ReduceOp, a: bool, b: bool) -> bool {
        match op {
            ReduceOp::Sum | ReduceOp::Max | ReduceOp::Bor => a || b,
            ReduceOp::Product | ReduceOp::Min | ReduceOp::Band => a && b,
            ReduceOp::Bxor => a != b,
            other => unknown(other),
        }
    }

    fn divide(wide: bool, _by: u32) -> bool {
        wide
    }
}

macro_rules! floats {
    ($($type:ty, $wide:ty, $widen:expr, $narrow:expr, $of:expr);*) => {$(
        impl Value for $type {
            type Wide = $wide;

            /// Many magnitudes, so that the order of sums shows in the bits.
            fn random(rng: &mut Rng) -> $type {
                let fraction = rng.f64() * 2.0 - 1.0;
                $of(match rng.u8(..) {
                    0 => f64::INFINITY,
                    1 => -0.0,
                    2 => 0.0,
                    3 => f64::NAN,
                    4 => fraction * 1e-7,
                    _ => fraction * f64::from(1 << rng.u32(0..12)),
                })
            }

            fn canonical(self) -> $type {
                if self.widen().is_nan() { <$type>::narrow(<$wide>::NAN) } else { self }
            }

            fn widen(self) -> $wide {
                $widen(self)
            }

            fn narrow(wide: $wide) -> $type {
                $narrow(wide)
            }

            fn apply(op: ReduceOp, a: $wide, b: $wide) -> $wide {
                match op {
                    ReduceOp::Sum | ReduceOp::Avg => a + b,
                    ReduceOp::Product => a * b,
                    ReduceOp::Min | ReduceOp::Max if a.is_nan() || b.is_nan() => <$wide>::NAN,
                    ReduceOp::Min => if a.total_cmp(&b).is_lt() { a } else { b },
                    ReduceOp::Max => if a.total_cmp(&b).is_gt() { a } else { b },
                    other => unknown(other),
                }
            }

            fn divide(wide: $wide, by: u32) -> $wide {
                wide / by as $wide
            }
        }
    )*};
}

floats!(
    F8E4M3, f32, f32::from, F8E4M3::from_f32, |value: f64| F8E4M3::from_f32(value as f32);
    F8E5M2, f32, f32::from, F8E5M2::from_f32, |value: f64| F8E5M2::from_f32(value as f32);
    f16, f32, f32::from, f16::from_f32, f16::from_f64;
    bf16, f32, f32::from, bf16::from_f32, bf16::from_f64;
    f32, f32, std::convert::identity, std::convert::identity, |value: f64| value as f32;
    f64, f64, std::convert::identity, std::convert::identity, std::convert::identity
);

macro_rules! complex {
    ($($part:ty),*) => {$(
        impl Value for Complex<$part> {
            type Wide = Complex<$part>;

            fn random(rng: &mut Rng) -> Complex<$part> {
                Complex { re: <$part>::random(rng), im: <$part>::random(rng) }
            }

            fn canonical(self) -> Complex<$part> {
                Complex { re: self.re.canonical(), im: self.im.canonical() }
            }

            fn widen(self) -> Complex<$part> {
                self
            }

            fn narrow(wide: Complex<$part>) -> Complex<$part> {
                wide
            }

            fn apply(op: ReduceOp, a: Complex<$part>, b: Complex<$part>) -> Complex<$part> {
                match op {
                    ReduceOp::Sum | ReduceOp::Avg => {
                        Complex { re: a.re + b.re, im: a.im + b.im }
                    }
                    ReduceOp::Product => Complex {
                        re: a.re * b.re - a.im * b.im,
                        im: a.re * b.im + a.im * b.re,
                    },
                    other => unknown(other),
                }
            }

            fn divide(wide: Complex<$part>, by: u32) -> Complex<$part> {
                Complex { re: wide.re / by as $part, im: wide.im / by as $part }
            }
        }
    )*};
}

complex!(f32, f64);
