//! The operators on single values.

use bytemuck::Pod;

/// What the operators need of a type that results are accumulated in.
pub trait Arithmetic: Pod {
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    fn divide(self, by: u32) -> Self;
}

/// A reduce operator that the compiler knows, so that each gets loops of its own. An average is
/// a sum until it is finished.
pub(crate) trait Operator: Copy {
    fn apply<A: Arithmetic>(a: A, b: A) -> A;
}

macro_rules! operators {
    ($($name:ident => $method:ident),*) => {$(
        #[derive(Clone, Copy)]
        pub(crate) struct $name;

        impl Operator for $name {
            #[inline(always)]
            fn apply<A: Arithmetic>(a: A, b: A) -> A { a.$method(b) }
        }
    )*};
}

operators!(Sum => sum, Product => product, Min => min, Max => max);

macro_rules! integers {
    // The quotient of a type is computed in one that holds every divisor.
    ($($type:ty, quotient in $wide:ty);*) => {$(
        impl Arithmetic for $type {
            #[inline(always)]
            fn sum(self, other: Self) -> Self { self.wrapping_add(other) }
            #[inline(always)]
            fn product(self, other: Self) -> Self { self.wrapping_mul(other) }
            #[inline(always)]
            fn min(self, other: Self) -> Self { Ord::min(self, other) }
            #[inline(always)]
            fn max(self, other: Self) -> Self { Ord::max(self, other) }
            #[inline(always)]
            fn divide(self, by: u32) -> Self { (<$wide>::from(self) / <$wide>::from(by)) as Self }
        }
    )*};
}

macro_rules! floats {
    ($($type:ty),*) => {$(
        // `|` and `&` in place of `||` and `&&`: the loops must not branch.
        impl Arithmetic for $type {
            #[inline(always)]
            fn sum(self, other: Self) -> Self { self + other }
            #[inline(always)]
            fn product(self, other: Self) -> Self { self * other }
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                let first = (self < other) | ((self == other) & self.is_sign_negative());
                let least = if first { self } else { other };
                if self.is_nan() | other.is_nan() { <$type>::NAN } else { least }
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                let first = (self > other) | ((self == other) & self.is_sign_positive());
                let greatest = if first { self } else { other };
                if self.is_nan() | other.is_nan() { <$type>::NAN } else { greatest }
            }
            // Dividing, not multiplying by the inverse: the result is promised to be sum / n.
            #[inline(always)]
            fn divide(self, by: u32) -> Self { self / by as $type }
        }
    )*};
}

integers!(
    u8, quotient in u32; u16, quotient in u32; u32, quotient in u32; u64, quotient in u64;
    i8, quotient in i64; i16, quotient in i64; i32, quotient in i64; i64, quotient in i64
);
floats!(f32, f64);
