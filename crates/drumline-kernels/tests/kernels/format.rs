//! 16-bit floating-point formats, by their definition.

use std::cmp::Ordering;

/// A 16-bit floating-point format: a sign, an exponent, and `fraction_bits` of fraction.
pub(crate) struct Format {
    pub(crate) fraction_bits: u32,
    pub(crate) bias: i32,
}

pub(crate) const F16: Format = Format { fraction_bits: 10, bias: 15 };
pub(crate) const BF16: Format = Format { fraction_bits: 7, bias: 127 };

impl Format {
    /// The code of plus infinity. Those below it are the finite numbers, in order.
    pub(crate) fn infinity(&self) -> u16 {
        0x7fff >> self.fraction_bits << self.fraction_bits
    }

    /// The value of a code, as IEEE 754 defines it.
    pub(crate) fn decode(&self, code: u16) -> f32 {
        let magnitude = code & 0x7fff;
        let value = match magnitude.cmp(&self.infinity()) {
            Ordering::Less => self.finite(magnitude) as f32,
            Ordering::Equal => f32::INFINITY,
            Ordering::Greater => f32::NAN,
        };
        if code >> 15 == 1 { -value } else { value }
    }

    /// The value of the code of a number that is not negative. Infinity counts as the number
    /// that would follow the largest finite one.
    fn finite(&self, magnitude: u16) -> f64 {
        let exponent = i32::from(magnitude >> self.fraction_bits);
        let fraction = f64::from(magnitude & ((1 << self.fraction_bits) - 1));
        let unit = two_to(exponent.max(1) - self.bias - self.fraction_bits as i32);
        let hidden = if exponent == 0 { 0.0 } else { f64::from(1 << self.fraction_bits) };
        (hidden + fraction) * unit
    }

    /// The code nearest to `x`; of two equally near ones, the even one. All steps are exact.
    pub(crate) fn encode(&self, x: f32) -> u16 {
        if x.is_nan() {
            return 0x7fff;
        }
        let sign = u16::from(x.is_sign_negative()) << 15;
        let x = f64::from(x.abs());
        // The last code that is not above x.
        let (mut below, mut above) = (0, self.infinity());
        if x >= self.finite(above) {
            return sign | above;
        }
        while above - below > 1 {
            let middle = below + (above - below) / 2;
            *if self.finite(middle) <= x { &mut below } else { &mut above } = middle;
        }
        let (down, up) = (x - self.finite(below), self.finite(above) - x);
        let nearest = match down.total_cmp(&up) {
            Ordering::Less => below,
            Ordering::Greater => above,
            Ordering::Equal => below + (below & 1),
        };
        sign | nearest
    }
}

/// The power, exactly; `powi` promises no precision.
pub(crate) fn two_to(exponent: i32) -> f64 {
    f64::from_bits(((1023 + exponent) as u64) << 52)
}
