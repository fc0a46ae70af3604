//! The reduce operators on single values.

use bytemuck::Pod;
use num_complex::Complex;

use crate::Bool;

/// A type in which partial results are kept.
pub trait Arithmetic: Pod {
    /// Turns a sum into an average.
    fn divide(self, by: u32) -> Self;
}

/// A reduce operator as a type, so that the compiler makes loops for each.
pub(crate) trait Operator<A>: Averages {
    fn apply(a: A, b: A) -> A;
}

/// Whether an average uses this operator, and divides at the end. No other loop has a division in it.
pub(crate) trait Averages: Copy {
    const AVERAGES: bool;
}

macro_rules! names {
    ($($name:ident $averages:literal),*) => {$(
        #[derive(Clone, Copy)]
        pub(crate) struct $name;

        impl Averages for $name {
            const AVERAGES: bool = $averages;
        }
    )*};
}

names!(Sum true, Product false, Min false, Max false, And false, Or false, Xor false);

macro_rules! operators {
    ($type:ty: $($name:ident = |$a:ident, $b:ident| $value:expr),*) => {$(
        impl Operator<$type> for $name {
            #[inline(always)]
            fn apply($a: $type, $b: $type) -> $type { $value }
        }
    )*};
}

macro_rules! integers {
    // A quotient is computed in a type that holds every divisor.
    ($($type:ty, quotient in $wide:ty);*) => {$(
        operators!(
            $type:
            Sum = |a, b| a.wrapping_add(b),
            Product = |a, b| a.wrapping_mul(b),
            Min = |a, b| Ord::min(a, b),
            Max = |a, b| Ord::max(a, b),
            And = |a, b| a & b,
            Or = |a, b| a | b,
            Xor = |a, b| a ^ b
        );

        impl Arithmetic for $type {
            #[inline(always)]
            fn divide(self, by: u32) -> Self { (<$wide>::from(self) / <$wide>::from(by)) as Self }
        }
    )*};
}

macro_rules! floats {
    ($($type:ty),*) => {$(
        operators!(
            $type:
            Sum = |a, b| a + b,
            Product = |a, b| a * b,
            // `|` and `&` in place of `||` and `&&`: the loops must not branch.
            Min = |a, b| {
                let first = (a < b) | ((a == b) & a.is_sign_negative());
                let least = if first { a } else { b };
                if a.is_nan() | b.is_nan() { <$type>::NAN } else { least }
            },
            Max = |a, b| {
                let first = (a > b) | ((a == b) & a.is_sign_positive());
                let greatest = if first { a } else { b };
                if a.is_nan() | b.is_nan() { <$type>::NAN } else { greatest }
            }
        );

        // Not the operators of `num_complex`: every bit is promised, whatever that crate does.
        operators!(
            Complex<$type>:
            Sum = |a, b| Complex { re: a.re + b.re, im: a.im + b.im },
            Product = |a, b| Complex {
                re: a.re * b.re - a.im * b.im,
                im: a.re * b.im + a.im * b.re
            }
        );

        // Not a multiplication by the inverse: the result is promised to be sum / n.
        impl Arithmetic for $type {
            #[inline(always)]
            fn divide(self, by: u32) -> Self { self / by as $type }
        }

        impl Arithmetic for Complex<$type> {
            #[inline(always)]
            fn divide(self, by: u32) -> Self {
                Complex { re: self.re.divide(by), im: self.im.divide(by) }
            }
        }
    )*};
}

integers!(
    u8, quotient in u32; u16, quotient in u32; u32, quotient in u32; u64, quotient in u64;
    i8, quotient in i64; i16, quotient in i64; i32, quotient in i64; i64, quotient in i64
);
floats!(f32, f64);

operators!(Bool: And = |a, b| a.and(b), Or = |a, b| a.or(b), Xor = |a, b| a.xor(b));

impl Arithmetic for Bool {
    /// Never called: [`ReduceOp::supports`](crate::ReduceOp::supports) refuses averages of `Bool`.
    #[inline(always)]
    fn divide(self, _by: u32) -> Self {
        self
    }
}
