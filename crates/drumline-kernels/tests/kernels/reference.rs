//! The results by definition, computed slowly.

use drumline_kernels::{Bool, Complex, Element, F8E4M3, F8E5M2, ReduceOp, bf16, f16};

use crate::format::{BF16, E4M3, E5M2, F16};

/// An element type with its operators as defined.
pub(crate) trait Reference: Element {
    /// A value made of random bits. If `wild`, any value of the type; else one whose sums stay finite
    /// and depend on the order.
    fn random(bits: u64, wild: bool) -> Self;

    /// Reduces the values of all ranks over the canonical tree.
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
                    ReduceOp::Band => bits(column, |set| set == column.len()) as $type,
                    ReduceOp::Bor => bits(column, |set| set > 0) as $type,
                    ReduceOp::Bxor => bits(column, |set| set % 2 == 1) as $type,
                    other => unreachable!("{other} has no definition here"),
                }
            }

            fn same(self, other: $type) -> bool {
                self == other
            }
        }
    )*};
}

/// Computes each bit from the number of values that have it set.
fn bits<T: Copy>(column: &[T], rule: impl Fn(usize) -> bool) -> u64
where
    i128: From<T>,
{
    let set = |bit: u32| column.iter().filter(|x| i128::from(**x) >> bit & 1 == 1).count();
    (0..64).map(|bit| u64::from(rule(set(bit))) << bit).sum()
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
    // The type, its bits, its accumulator; the exponent of values that are not wild (its lowest bit,
    // its least value, how many values); the conversions to and from the accumulator.
    ($($type:ty, $bits:ty, $wide:ty, $exponent:expr, $to_wide:expr, $from_wide:expr);*) => {$(
        impl Reference for $type {
            fn random(bits: u64, wild: bool) -> $type {
                let any = <$type>::from_bits(bits as _);
                if wild {
                    return any;
                }
                let (place, least, count): (u32, $bits, $bits) = $exponent;
                let exponent = least + (bits >> 59) as $bits % count;
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
                    other => unreachable!("{other} has no definition here"),
                };
                $from_wide(wide)
            }

            fn same(self, other: $type) -> bool {
                self.to_bits() == other.to_bits() || (self.is_nan() && other.is_nan())
            }
        }
    )*};
}

// Exponents from -8 to 3, and from -4 to 2 where the type has fewer.
floats!(
    F8E4M3, u8, f32, (3, 7 - 4, 7),
    |x| E4M3.decode(F8E4M3::to_bits(x).into()), |x| F8E4M3::from_bits(E4M3.encode(x) as u8);
    F8E5M2, u8, f32, (2, 15 - 8, 12),
    |x| E5M2.decode(F8E5M2::to_bits(x).into()), |x| F8E5M2::from_bits(E5M2.encode(x) as u8);
    f16, u16, f32, (10, 15 - 8, 12),
    |x| F16.decode(f16::to_bits(x)), |x| f16::from_bits(F16.encode(x));
    bf16, u16, f32, (7, 127 - 8, 12),
    |x| BF16.decode(bf16::to_bits(x)), |x| bf16::from_bits(BF16.encode(x));
    f32, u32, f32, (23, 127 - 8, 12), |x| x, |x| x;
    f64, u64, f64, (52, 1023 - 8, 12), |x| x, |x| x
);

macro_rules! complex {
    ($($part:ty),*) => {$(
        impl Reference for Complex<$part> {
            fn random(bits: u64, wild: bool) -> Self {
                let part = |bits| <$part>::random(bits, wild);
                Complex::new(part(bits), part(bits.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
            }

            fn reduce(op: ReduceOp, column: &[Self], finish: Option<usize>) -> Self {
                let parts = |part: fn(&Self) -> $part| {
                    let parts: Vec<$part> = column.iter().map(part).collect();
                    <$part>::reduce(op, &parts, finish)
                };
                match op {
                    ReduceOp::Sum | ReduceOp::Avg => Complex::new(parts(|z| z.re), parts(|z| z.im)),
                    ReduceOp::Product => tree(column, &|a, b| {
                        let (ac, bd) = (a.re * b.re, a.im * b.im);
                        let (ad, bc) = (a.re * b.im, a.im * b.re);
                        Complex::new(ac - bd, ad + bc)
                    }),
                    other => unreachable!("{other} has no definition here"),
                }
            }

            fn same(self, other: Self) -> bool {
                self.re.same(other.re) && self.im.same(other.im)
            }
        }
    )*};
}

complex!(f32, f64);

impl Reference for Bool {
    /// If `wild`, any byte that a peer may send.
    fn random(bits: u64, wild: bool) -> Bool {
        let byte = (bits >> 32) as u8 & bits as u8 & if wild { 0xff } else { 1 };
        bytemuck::cast(byte)
    }

    fn reduce(op: ReduceOp, column: &[Bool], _finish: Option<usize>) -> Bool {
        let set = column.iter().filter(|value| value.get()).count();
        Bool::from(match op {
            ReduceOp::Sum | ReduceOp::Max | ReduceOp::Bor => set > 0,
            ReduceOp::Product | ReduceOp::Min | ReduceOp::Band => set == column.len(),
            ReduceOp::Bxor => set % 2 == 1,
            other => unreachable!("{other} has no definition here"),
        })
    }

    /// Compares bytes: results are 0 or 1, and inputs must not change.
    fn same(self, other: Bool) -> bool {
        bytemuck::cast::<Bool, u8>(self) == bytemuck::cast::<Bool, u8>(other)
    }
}

/// Every length up to several blocks, at aligned and other places: `(len, skip)`. Some of them under
/// Miri.
pub(crate) fn places() -> impl Iterator<Item = (usize, usize)> {
    let step = if cfg!(miri) { 21 } else { 1 };
    (0..=64).step_by(step).flat_map(|len| [(len, 0), (len, 1), (len, 3)])
}

/// The stack program of the canonical tree over `n` leaves.
pub(crate) fn canonical(n: usize) -> Vec<usize> {
    let mut merges: Vec<usize> =
        (1..=n).map(|count: usize| count.trailing_zeros() as usize).collect();
    merges[n - 1] += n.count_ones() as usize - 1;
    merges
}

/// SplitMix64.
pub(crate) fn random(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The operators that a type supports.
pub(crate) fn operators<T: Element>() -> impl Iterator<Item = ReduceOp> {
    ReduceOp::ALL.into_iter().filter(|op| op.supports(T::DTYPE))
}
