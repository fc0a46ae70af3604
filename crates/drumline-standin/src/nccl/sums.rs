//! Arithmetic of reductions, in the type of the data. Ranks are added in their order.

use super::kinds::{Operator, Type};

/// `into` becomes `into` (operator) `from`, element by element.
pub(crate) fn fold(kind: Type, operator: Operator, into: &mut [u8], from: &[u8]) {
    let whole = |operator| match operator {
        Operator::Sum => i128::wrapping_add as fn(i128, i128) -> i128,
        Operator::Product => i128::wrapping_mul,
        Operator::Max => i128::max,
        Operator::Min => i128::min,
    };
    let real = |operator| match operator {
        Operator::Sum => (|a, b| a + b) as fn(f64, f64) -> f64,
        Operator::Product => |a, b| a * b,
        Operator::Max => f64::max,
        Operator::Min => f64::min,
    };
    if kind.is_float() {
        let combine = real(operator);
        each(kind, into, from, |a, b| to_real(kind, combine(of_real(kind, a), of_real(kind, b))));
    } else {
        let combine = whole(operator);
        each(kind, into, from, |a, b| combine(of_whole(kind, a), of_whole(kind, b)).to_le_bytes());
    }
}

/// Multiplies every element with a factor of the same type.
pub(crate) fn scale(kind: Type, data: &mut [u8], factor: &[u8]) {
    let factors = factor.repeat(data.len() / kind.size());
    fold(kind, Operator::Product, data, &factors);
}

/// Divides every element.
pub(crate) fn divide(kind: Type, data: &mut [u8], by: u64) {
    for element in data.chunks_exact_mut(kind.size()) {
        let result = if kind.is_float() {
            to_real(kind, of_real(kind, element) / by as f64)
        } else {
            (of_whole(kind, element) / i128::from(by)).to_le_bytes()
        };
        element.copy_from_slice(&result[..kind.size()]);
    }
}

/// 1 / `by` as an element.
pub(crate) fn one_over(kind: Type, by: u64) -> Vec<u8> {
    to_real(kind, 1.0 / by as f64)[..kind.size()].to_vec()
}

fn each(kind: Type, into: &mut [u8], from: &[u8], combine: impl Fn(&[u8], &[u8]) -> [u8; 16]) {
    let size = kind.size();
    for (a, b) in into.chunks_exact_mut(size).zip(from.chunks_exact(size)) {
        let result = combine(a, b);
        a.copy_from_slice(&result[..size]);
    }
}

/// An element as a whole number; its low bytes are the element.
fn of_whole(kind: Type, element: &[u8]) -> i128 {
    let is_signed = matches!(kind, Type::I8 | Type::I32 | Type::I64);
    let is_negative = is_signed && element.last().is_some_and(|it| it & 0x80 != 0);
    let mut bytes = [if is_negative { 0xFF } else { 0 }; 16];
    bytes[..element.len()].copy_from_slice(element);
    i128::from_le_bytes(bytes)
}

/// An element as a real number. Sums and products of two elements of a smaller type are then rounded as that type
/// rounds them: a double has more than twice its digits.
fn of_real(kind: Type, element: &[u8]) -> f64 {
    let mut bytes = [0; 8];
    bytes[..element.len()].copy_from_slice(element);
    let bits = u64::from_le_bytes(bytes);
    match kind {
        Type::F64 => f64::from_bits(bits),
        Type::F32 => f64::from(f32::from_bits(bits as u32)),
        Type::Bf16 => f64::from(f32::from_bits((bits as u32) << 16)),
        _ => of_half(bits as u16),
    }
}

fn to_real(kind: Type, value: f64) -> [u8; 16] {
    let bits = match kind {
        Type::F64 => value.to_bits(),
        Type::F32 => u64::from((value as f32).to_bits()),
        Type::Bf16 => round(value, 8, -126, 127) >> 16,
        _ => to_half(value),
    };
    u128::from(bits).to_le_bytes()
}

fn of_half(bits: u16) -> f64 {
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    let (exponent, fraction) = (i32::from(bits >> 10 & 0x1F), f64::from(bits & 0x3FF));
    sign * match exponent {
        0 => fraction * 2f64.powi(-24),
        31 if fraction == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        _ => (1.0 + fraction / 1024.0) * 2f64.powi(exponent - 15),
    }
}

fn to_half(value: f64) -> u64 {
    let rounded = f32::from_bits(round(value, 11, -14, 15) as u32);
    let sign = u64::from(rounded.to_bits() >> 16 & 0x8000);
    let size = f64::from(rounded.abs());
    sign | if rounded.is_nan() {
        0x7E00
    } else if rounded.is_infinite() {
        0x7C00
    } else if size < 2f64.powi(-14) {
        (size * 2f64.powi(24)) as u64
    } else {
        let bits = u64::from(rounded.abs().to_bits());
        (bits >> 13) - (112 << 10)
    }
}

/// The bits, as a single, of a value rounded to nearest, ties to even, to `digits` binary digits, with these exponents.
fn round(value: f64, digits: i32, lowest: i32, highest: i32) -> u64 {
    if !value.is_finite() || value == 0.0 {
        return u64::from((value as f32).to_bits());
    }
    let exponent = ((value.to_bits() >> 52 & 0x7FF) as i32 - 1023).max(lowest);
    let unit = 2f64.powi(exponent - digits + 1);
    let rounded = (value / unit).round_ties_even() * unit;
    let largest = (2.0 - 2f64.powi(1 - digits)) * 2f64.powi(highest);
    let result = if rounded.abs() > largest { f64::INFINITY.copysign(value) } else { rounded };
    u64::from((result as f32).to_bits())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_halves_survive_and_sums_round_to_even() {
        for bits in 0..=u16::MAX {
            let value = of_half(bits);
            if value.is_nan() {
                assert_eq!(to_half(value) & 0x7FFF, 0x7E00);
            } else {
                assert_eq!(to_half(value), u64::from(bits), "{value}");
            }
        }
        assert_eq!(to_half(2049.0), to_half(2048.0)); // a tie: to even
        assert_eq!(to_half(2051.0), to_half(2052.0));
        assert_eq!(to_half(65519.9), to_half(65504.0));
        assert_eq!(to_half(65520.0), 0x7C00);
        assert_eq!(to_half(2f64.powi(-25)), 0);
        assert_eq!(to_half(-1.5 * 2f64.powi(-25)), 0x8001);
    }

    #[test]
    fn all_brain_floats_survive_and_round_to_even() {
        let bits = |value: f64| round(value, 8, -126, 127) >> 16;
        for number in 0..=u16::MAX {
            let value = f64::from(f32::from_bits(u32::from(number) << 16));
            if !value.is_nan() {
                assert_eq!(bits(value), u64::from(number), "{value}");
            }
        }
        assert_eq!(bits(257.0), bits(256.0));
        assert_eq!(bits(259.0), bits(260.0));
        assert_eq!(bits(f64::from(f32::MAX)), 0x7F80);
    }

    #[test]
    fn whole_numbers_wrap_and_keep_their_sign() {
        let mut bytes = [200u8, 5, 0xFF];
        fold(Type::U8, Operator::Sum, &mut bytes, &[100, 1, 1]);
        assert_eq!(bytes, [44, 6, 0]);
        let mut bytes = [0xFFu8, 5];
        fold(Type::I8, Operator::Max, &mut bytes, &[1, 0x80]);
        assert_eq!(bytes, [1, 5]);
        let mut long = (-7i64).to_le_bytes();
        divide(Type::I64, &mut long, 2);
        assert_eq!(i64::from_le_bytes(long), -3);
        let mut unsigned = u64::MAX.to_le_bytes();
        fold(Type::U64, Operator::Min, &mut unsigned, &(u64::MAX - 1).to_le_bytes());
        assert_eq!(u64::from_le_bytes(unsigned), u64::MAX - 1);
    }
}
