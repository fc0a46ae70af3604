//! Elements and operators, by their definitions, for the [oracle](crate::oracle).

use bytemuck::Pod;
use drumline::{Bool, Complex, F8E4M3, F8E5M2, ReduceOp, bf16, f16};
use fastrand::Rng;

/// An element type with its operators as they are defined.
pub(crate) trait Value: Pod {
    /// What partial results are kept in.
    type Wide: Copy;
    fn random(rng: &mut Rng) -> Self;
    /// Whether the bits are equal, or both are NaN.
    fn same(&self, other: &Self) -> bool {
        bytemuck::bytes_of(self) == bytemuck::bytes_of(other)
    }
    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
    fn apply(op: ReduceOp, a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn divide(wide: Self::Wide, by: u32) -> Self::Wide;
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Value for $type {
            type Wide = $type;

            fn random(rng: &mut Rng) -> $type {
                rng.u64(..) as $type
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
                    other => unreachable!("an operator that the oracle does not know: {other}"),
                }
            }

            fn divide(wide: $type, by: u32) -> $type {
                (i128::from(wide) / i128::from(by)) as $type
            }
        }
    )*};
}

integers!(u8, u16, u32, u64, i8, i16, i32, i64);

macro_rules! floats {
    ($($type:ty, $wide:ty, $narrow:expr, $of:expr);*) => {$(
        impl Value for $type {
            type Wide = $wide;

            /// Of many magnitudes, so that the order of sums shows.
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

            fn same(&self, other: &$type) -> bool {
                self.to_bits() == other.to_bits()
                    || (self.widen().is_nan() && other.widen().is_nan())
            }

            fn widen(self) -> $wide {
                self.into()
            }

            fn narrow(wide: $wide) -> $type {
                $narrow(wide)
            }

            fn apply(op: ReduceOp, a: $wide, b: $wide) -> $wide {
                match op {
                    ReduceOp::Sum | ReduceOp::Avg => a + b,
                    ReduceOp::Product => a * b,
                    _ if a.is_nan() || b.is_nan() => <$wide>::NAN,
                    ReduceOp::Min if a.total_cmp(&b).is_lt() => a,
                    ReduceOp::Max if a.total_cmp(&b).is_gt() => a,
                    ReduceOp::Min | ReduceOp::Max => b,
                    other => unreachable!("an operator that the oracle does not know: {other}"),
                }
            }

            fn divide(wide: $wide, by: u32) -> $wide {
                wide / by as $wide
            }
        }
    )*};
}

floats!(
    F8E4M3, f32, F8E4M3::from_f32, |value: f64| F8E4M3::from_f32(value as f32);
    F8E5M2, f32, F8E5M2::from_f32, |value: f64| F8E5M2::from_f32(value as f32);
    f16, f32, f16::from_f32, f16::from_f64;
    bf16, f32, bf16::from_f32, bf16::from_f64;
    f32, f32, std::convert::identity, |value: f64| value as f32;
    f64, f64, std::convert::identity, std::convert::identity
);

macro_rules! complex {
    ($($part:ty),*) => {$(
        impl Value for Complex<$part> {
            type Wide = Self;

            fn random(rng: &mut Rng) -> Self {
                Complex::new(<$part>::random(rng), <$part>::random(rng))
            }

            fn same(&self, other: &Self) -> bool {
                self.re.same(&other.re) && self.im.same(&other.im)
            }

            fn widen(self) -> Self {
                self
            }

            fn narrow(wide: Self) -> Self {
                wide
            }

            fn apply(op: ReduceOp, a: Self, b: Self) -> Self {
                match op {
                    ReduceOp::Sum | ReduceOp::Avg => a + b,
                    ReduceOp::Product => a * b,
                    other => unreachable!("an operator that complex numbers do not have: {other}"),
                }
            }

            fn divide(wide: Self, by: u32) -> Self {
                Complex::new(wide.re / by as $part, wide.im / by as $part)
            }
        }
    )*};
}

complex!(f32, f64);

impl Value for Bool {
    type Wide = bool;

    fn random(rng: &mut Rng) -> Bool {
        rng.bool().into()
    }

    fn widen(self) -> bool {
        self.into()
    }

    fn narrow(wide: bool) -> Bool {
        wide.into()
    }

    fn apply(op: ReduceOp, a: bool, b: bool) -> bool {
        match op {
            ReduceOp::Sum | ReduceOp::Max | ReduceOp::Bor => a || b,
            ReduceOp::Product | ReduceOp::Min | ReduceOp::Band => a && b,
            ReduceOp::Bxor => a != b,
            other => unreachable!("an operator that bool does not have: {other}"),
        }
    }

    fn divide(_wide: bool, by: u32) -> bool {
        unreachable!("an average of truths of {by} ranks")
    }
}
