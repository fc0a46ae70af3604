//! The two 8-bit floats of the OCP specification OFP8.

use std::cmp::Ordering;
use std::fmt;

use bytemuck::{Pod, Zeroable};

/// How a code of 8 bits encodes a number: a sign, an exponent, `fraction_bits` of fraction.
struct Format {
    fraction_bits: u32,
    bias: u32,
    /// The code of the largest finite number.
    largest: u32,
    /// The code of a number that is too large. Greater codes are NaN.
    overflow: u32,
}

const E4M3: Format = Format { fraction_bits: 3, bias: 7, largest: 0x7e, overflow: 0x7e };
const E5M2: Format = Format { fraction_bits: 2, bias: 15, largest: 0x7b, overflow: 0x7c };

const F32_FRACTION_BITS: u32 = 23;
const F32_BIAS: u32 = 127;
const F32_INFINITY: u32 = 0x7f80_0000;
const F32_NAN: u32 = 0x7fc0_0000;

/// The conversions have no branches, so the compiler vectorises them. Their results are the same in every
/// floating-point mode that a thread may have set.
impl Format {
    #[inline(always)]
    const fn decode(&self, code: u32) -> f32 {
        let (sign, magnitude) = ((code & 0x80) << 24, code & 0x7f);
        let rebias = (F32_BIAS - self.bias) << F32_FRACTION_BITS;
        let normal = (magnitude << (F32_FRACTION_BITS - self.fraction_bits)) + rebias;
        let unit = f32::from_bits((F32_BIAS + 1 - self.bias - self.fraction_bits) << 23);
        let subnormal = (magnitude as f32 * unit).to_bits();
        let finite = if magnitude >> self.fraction_bits == 0 { subnormal } else { normal };
        let infinite = if magnitude > self.overflow { F32_NAN } else { F32_INFINITY };
        f32::from_bits(sign | if magnitude > self.largest { infinite } else { finite })
    }

    /// Rounds to nearest, ties to even.
    #[inline(always)]
    const fn encode(&self, x: f32) -> u32 {
        let (sign, magnitude) = (x.to_bits() >> 24 & 0x80, x.to_bits() & 0x7fff_ffff);
        let exponent = magnitude >> F32_FRACTION_BITS;
        // The exponent of the smallest normal number, as `f32` encodes it.
        let least = F32_BIAS + 1 - self.bias;
        let significand = (magnitude & 0x7f_ffff) | 0x80_0000;
        // How many bits of the significand are rounded off: one more for each step below the normal
        // numbers. At 25 none of its 24 bits is left, and nothing is rounded up.
        let dropped = F32_FRACTION_BITS - self.fraction_bits + least.saturating_sub(exponent);
        let dropped = if dropped < 25 { dropped } else { 25 };
        // Half a unit in the last bit that stays, less one if that bit is 0 (ties to even).
        let half = (1 << (dropped - 1)) - 1 + (significand >> dropped & 1);
        // The leading bit of a normal number, and a carry out of the fraction, increment the
        // exponent.
        let code = (exponent.saturating_sub(least) << self.fraction_bits)
            + ((significand + half) >> dropped);
        let code = if code < self.overflow { code } else { self.overflow };
        sign | if magnitude > F32_INFINITY { 0x7f } else { code }
    }
}

macro_rules! floats {
    ($($(#[$doc:meta])* $name:ident = $format:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Default)]
        #[repr(transparent)]
        pub struct $name(u8);

        // SAFETY: the type is a transparent wrapper of `u8`, of which 0 is a value.
        unsafe impl Zeroable for $name {}

        // SAFETY: the type is a transparent wrapper of `u8`, and every byte is a valid value.
        unsafe impl Pod for $name {}

        impl $name {
            /// Zero.
            pub const ZERO: $name = $name::from_f32(0.0);
            /// One.
            pub const ONE: $name = $name::from_f32(1.0);
            /// The largest finite number.
            pub const MAX: $name = $name($format.largest as u8);
            /// The smallest finite number.
            pub const MIN: $name = $name($format.largest as u8 | 0x80);
            /// Not a number.
            pub const NAN: $name = $name(0x7f);

            /// The number with this code.
            pub const fn from_bits(bits: u8) -> $name {
                $name(bits)
            }

            /// The code of this number.
            pub const fn to_bits(self) -> u8 {
                self.0
            }

            /// The nearest number. Of two equally near ones, the one with the even code.
            #[inline(always)]
            pub const fn from_f32(x: f32) -> $name {
                $name($format.encode(x) as u8)
            }

            /// The same number as an `f32`. Always exact.
            #[inline(always)]
            pub const fn to_f32(self) -> f32 {
                $format.decode(self.0 as u32)
            }

            #[inline(always)]
            pub(crate) const fn encode(x: f32) -> u32 {
                $format.encode(x)
            }

            #[inline(always)]
            pub(crate) const fn decode(code: u32) -> f32 {
                $format.decode(code)
            }

            /// Whether this is not a number.
            pub const fn is_nan(self) -> bool {
                self.to_f32().is_nan()
            }
        }

        impl From<$name> for f32 {
            fn from(x: $name) -> f32 {
                x.to_f32()
            }
        }

        /// As for `f32`: NaN differs from itself, and the two zeros are equal.
        impl PartialEq for $name {
            fn eq(&self, other: &$name) -> bool {
                self.to_f32() == other.to_f32()
            }
        }

        impl PartialOrd for $name {
            fn partial_cmp(&self, other: &$name) -> Option<Ordering> {
                self.to_f32().partial_cmp(&other.to_f32())
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.to_f32(), f)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.to_f32(), f)
            }
        }
    )*};
}

floats! {
    /// An 8-bit float with 4 bits of exponent and 3 of fraction: `torch.float8_e4m3fn`.
    ///
    /// The range is ±448. The type has no infinity, and one NaN of each sign. Numbers that are too
    /// large, and infinity, become the largest number, as in PyTorch 2.15. (In some earlier releases
    /// of PyTorch and in other libraries they become NaN.) NaN stays NaN.
    ///
    /// ```
    /// use drumline_kernels::F8E4M3;
    ///
    /// // Numbers from 16 to 32 are 2 apart. 19 is halfway between 18 and 20.
    /// assert_eq!(F8E4M3::from_f32(19.0).to_f32(), 20.0);
    /// assert_eq!(F8E4M3::from_f32(1e9), F8E4M3::MAX);
    /// assert_eq!(F8E4M3::MAX.to_f32(), 448.0);
    /// ```
    F8E4M3 = E4M3;

    /// An 8-bit float with 5 bits of exponent and 2 of fraction: `torch.float8_e5m2`, the upper
    /// half of an `f16`.
    ///
    /// The range is ±57,344. Numbers that are too large become infinity.
    ///
    /// ```
    /// use drumline_kernels::F8E5M2;
    ///
    /// assert_eq!(F8E5M2::from_f32(1.1).to_f32(), 1.0);
    /// assert_eq!(F8E5M2::MAX.to_f32(), 57_344.0);
    /// assert_eq!(F8E5M2::from_f32(1e9), F8E5M2::INFINITY);
    /// ```
    F8E5M2 = E5M2;
}

impl F8E5M2 {
    /// Infinity.
    pub const INFINITY: F8E5M2 = F8E5M2(0x7c);
}
