//! What results ought to be, written as the definitions say and as slowly as need be.

use drumline_kernels::{Element, ReduceOp, bf16, f16};

use crate::format::{BF16, F16};

/// An element type with its operators as defined.
pub(crate) trait Reference: Element {
    /// A value made of random bits: any at all if `wild`, else one with which sums stay finite
    /// and depend on their order.
    fn random(bits: u64, wild: bool) -> Self;

    /// The result of all ranks whose values are in `column`, over the canonical tree.
    fn reduce(op: ReduceOp, column: &[Self], finish: Option<usize>) -> Self;

    /// Whether the bits are equal, or both are NaN.
    fn same(self, other: Self) -> bool;
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Reference for $type {
            fn random(bits: u64, _wild: bool) -> $type {
                bits as $type
            }

            fn reduce(op: ReduceOp, column: &[$type], finish: Option<usize>) -> $type {
                let wide = column.iter().map(|x| i128::from(*x));
                match op {
                    ReduceOp::Sum => wide.sum::<i128>() as $type,
                    ReduceOp::Product => wide.fold(1, i128::wrapping_mul) as $type,
                    ReduceOp::Min => wide.min().unwrap() as $type,
                    ReduceOp::Max => wide.max().unwrap() as $type,
                    ReduceOp::Avg => {
                        let wrapped = wide.sum::<i128>() as $type;
                        (i128::from(wrapped) / finish.unwrap_or(1) as i128) as $type
                    }
                    other => panic!("{other} has no definition here"),
                }
            }

            fn same(self, other: $type) -> bool {
                self == other
            }
        }
    )*};
}

integers!(u8, u16, u32, u64, i8, i16, i32, i64);

/// `T(0, n) = T(0, h) + T(h, n - h)`, with `h` the largest power of two below `n`.
pub(crate) fn tree<A: Copy>(leaves: &[A], f: &impl Fn(A, A) -> A) -> A {
    if let [leaf] = leaves {
        return *leaf;
    }
    let (left, right) = leaves.split_at(1 << (leaves.len() - 1).ilog2());
    f(tree(left, f), tree(right, f))
}

macro_rules! floats {
    // The type, its bits, what it is computed in, the place and bias of the exponent, and the
    // functions between the two types.
    ($($type:ty, $bits:ty, $wide:ty, $exponent:expr, $to_wide:expr, $from_wide:expr);*) => {$(
        impl Reference for $type {
            fn random(bits: u64, wild: bool) -> $type {
                let any = <$type>::from_bits(bits as _);
                if wild {
                    return any;
                }
                // Exponents from 8 below that of 1 to 3 above it.
                let (place, bias): (u32, $bits) = $exponent;
                let exponent = bias - 8 + (bits >> 59) as $bits % 12;
                let others = any.to_bits() & !(<$bits>::MAX >> 1 >> place << place);
                <$type>::from_bits(others | exponent << place)
            }

            fn reduce(op: ReduceOp, column: &[$type], finish: Option<usize>) -> $type {
                let leaves: Vec<$wide> = column.iter().map(|x| $to_wide(*x)).collect();
                let any_nan = leaves.iter().any(|x| x.is_nan());
                let mut ordered = leaves.clone();
                ordered.sort_by(<$wide>::total_cmp);
                let wide = match op {
                    ReduceOp::Sum => tree(&leaves, &|a, b| a + b),
                    ReduceOp::Product => tree(&leaves, &|a, b| a * b),
                    ReduceOp::Avg => {
                        tree(&leaves, &|a, b| a + b) / finish.unwrap_or(1) as $wide
                    }
                    ReduceOp::Min | ReduceOp::Max if any_nan => <$wide>::NAN,
                    ReduceOp::Min => ordered[0],
                    ReduceOp::Max => ordered[ordered.len() - 1],
                    other => panic!("{other} has no definition here"),
                };
                $from_wide(wide)
            }

            fn same(self, other: $type) -> bool {
                self.to_bits() == other.to_bits() || (self.is_nan() && other.is_nan())
            }
        }
    )*};
}

floats!(
    f16, u16, f32, (10, 15), |x| F16.decode(f16::to_bits(x)), |x| f16::from_bits(F16.encode(x));
    bf16, u16, f32, (7, 127), |x| BF16.decode(bf16::to_bits(x)), |x| bf16::from_bits(BF16.encode(x));
    f32, u32, f32, (23, 127), |x| x, |x| x;
    f64, u64, f64, (52, 1023), |x| x, |x| x
);
