//! Narrow floating-point formats by definition.

use std::cmp::Ordering;

/// A narrow floating-point format: a sign, an exponent, and `fraction_bits` of fraction.
pub(crate) struct Format {
    pub(crate) bits: u32,
    pub(crate) fraction_bits: u32,
    pub(crate) bias: i32,
    /// The code after the largest finite number. For rounding it stands for the number that would
    /// come next.
    pub(crate) end: u16,
    /// The value of that code.
    pub(crate) end_value: f32,
    /// The code of a number that is nearest to `end`, or larger.
    pub(crate) overflow: u16,
}

pub(crate) const F16: Format = Format {
    bits: 16,
    fraction_bits: 10,
    bias: 15,
    end: 0x7c00,
    end_value: f32::INFINITY,
    overflow: 0x7c00,
};
pub(crate) const BF16: Format = Format {
    bits: 16,
    fraction_bits: 7,
    bias: 127,
    end: 0x7f80,
    end_value: f32::INFINITY,
    overflow: 0x7f80,
};
/// OFP8, table 1. Overflow saturates.
pub(crate) const E4M3: Format =
    Format { bits: 8, fraction_bits: 3, bias: 7, end: 0x7f, end_value: f32::NAN, overflow: 0x7e };
pub(crate) const E5M2: Format = Format {
    bits: 8,
    fraction_bits: 2,
    bias: 15,
    end: 0x7c,
    end_value: f32::INFINITY,
    overflow: 0x7c,
};

impl Format {
    /// The sign bit.
    pub(crate) fn sign(&self) -> u16 {
        1 << (self.bits - 1)
    }

    /// The value of a code.
    pub(crate) fn decode(&self, code: u16) -> f32 {
        let magnitude = code & (self.sign() - 1);
        let value = match magnitude.cmp(&self.end) {
            Ordering::Less => self.finite(magnitude) as f32,
            Ordering::Equal => self.end_value,
            Ordering::Greater => f32::NAN,
        };
        if code & self.sign() != 0 { -value } else { value }
    }

    /// The value of the code of a finite number that is not negative.
    fn finite(&self, magnitude: u16) -> f64 {
        let exponent = i32::from(magnitude >> self.fraction_bits);
        let fraction = f64::from(magnitude & ((1 << self.fraction_bits) - 1));
        let unit = two_to(exponent.max(1) - self.bias - self.fraction_bits as i32);
        let hidden = if exponent == 0 { 0.0 } else { f64::from(1 << self.fraction_bits) };
        (hidden + fraction) * unit
    }

    /// The code whose value is nearest to `x`; of two equally near ones, the even one. Every step is
    /// exact.
    pub(crate) fn encode(&self, x: f32) -> u16 {
        if x.is_nan() {
            return self.sign() - 1;
        }
        let sign = if x.is_sign_negative() { self.sign() } else { 0 };
        let x = f64::from(x.abs());
        // Finds the last code that is not above `x`.
        let (mut below, mut above) = (0, self.end);
        if x >= self.finite(above) {
            return sign | self.overflow;
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
        sign | if nearest == self.end { self.overflow } else { nearest }
    }
}

/// A power of two, exactly. `powi` promises no precision.
pub(crate) fn two_to(exponent: i32) -> f64 {
    f64::from_bits(((1023 + exponent) as u64) << 52)
}
