//! Copies, widening and narrowing, compared with the definitions of the formats.

use drumline_kernels::{
    Bool, Element, F8E4M3, F8E5M2, ReduceOp, Source, Target, bf16, copy, copy_past_cache, f16,
    fetch, fetch_past_cache,
};

use crate::format::{BF16, E4M3, E5M2, F16, Format, two_to};
use crate::{
    reference::{Reference, places},
    table::{narrow, scale, widen},
};

/// Under Miri, tests take every `STRIDE`th value.
const STRIDE: usize = if cfg!(miri) { 4999 } else { 1 };

fn widen_all<T: Element<Accumulator = f32>>(values: &[T]) -> Vec<f32> {
    let mut wide = vec![0.0; values.len()];
    widen(&mut wide[..], Source::from(values));
    wide
}

fn narrow_all<T: Element<Accumulator = f32>>(values: &[f32]) -> Vec<T> {
    let mut narrowed = vec![T::zeroed(); values.len()];
    narrow(Target::from(&mut narrowed[..]), values);
    narrowed
}

/// Widens all codes of `format` and narrows them again, alone and in blocks.
fn check_codes<T: Element<Accumulator = f32>>(
    format: &Format,
    value: fn(u16) -> T,
    bits: fn(&T) -> u16,
) {
    let last = format.sign() | (format.sign() - 1);
    let codes: Vec<u16> = (0..=last).step_by(STRIDE).collect();
    let values: Vec<T> = codes.iter().map(|code| value(*code)).collect();
    let wide = widen_all(&values);
    let back = narrow_all::<T>(&wide);
    for ((&code, wide), back) in codes.iter().zip(&wide).zip(&back) {
        let exact = format.decode(code);
        if exact.is_nan() {
            assert!(wide.is_nan() && format.decode(bits(back)).is_nan(), "{code:#x}");
            let signs = (bits(back) & format.sign(), code & format.sign());
            assert_eq!(signs.0, signs.1, "{code:#x}: a NaN has lost its sign");
        } else {
            assert_eq!(wide.to_bits(), exact.to_bits(), "{code:#x} widened");
            assert_eq!(bits(back), code, "{code:#x} narrowed again");
        }
        // A single element fills no block, so the kernel treats it differently.
        let alone = widen_all(&values[code as usize / STRIDE..][..1])[0];
        assert!(alone.to_bits() == wide.to_bits() || (alone.is_nan() && wide.is_nan()));
    }
}

/// Rounds each number of `format`, each middle between two, and their neighbours among the `f32`; the
/// limits of the range; and numbers spread over the range.
fn check_rounding<T: Element<Accumulator = f32>>(format: &Format, bits: fn(&T) -> u16) {
    let mut values = vec![f32::MAX, f32::MIN_POSITIVE, f32::from_bits(1), f32::INFINITY];
    for code in (0..format.end).step_by(STRIDE) {
        let low = format.decode(code);
        let high = match format.decode(code + 1) {
            // The next number, if the format had one more exponent.
            high if !high.is_finite() => low + (low - format.decode(code - 1)),
            high => high,
        };
        // Exact in `f64`, since `low` and `high` are neighbours with few bits each.
        let middle = ((f64::from(low) + f64::from(high)) / 2.0) as f32;
        for x in [low, middle] {
            values.extend([x, x.next_up(), x.next_down().max(0.0)]);
        }
    }
    values.extend((0..1_u64 << 18).step_by(STRIDE).map(|i| {
        let x = (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        f32::from_bits((x >> 32) as u32)
    }));
    values.extend(values.clone().iter().map(|x| -x));
    values.push(f32::from_bits(0x7f80_0001)); // A signalling NaN whose upper half is infinity.

    let narrowed = narrow_all::<T>(&values);
    for (x, narrowed) in values.iter().zip(&narrowed) {
        let expected = format.encode(*x);
        let both_nan = x.is_nan() && format.decode(bits(narrowed)).is_nan();
        assert!(
            bits(narrowed) == expected || both_nan,
            "{x:e} became {:#x}, not {expected:#x}",
            bits(narrowed)
        );
        let alone = narrow_all::<T>(&[*x]);
        assert_eq!(bits(&alone[0]), bits(narrowed), "{x:e} alone");
    }
}

#[test]
fn every_f16_widens_exactly() {
    check_codes::<f16>(&F16, f16::from_bits, |x| x.to_bits());
}

#[test]
fn every_bf16_widens_exactly() {
    check_codes::<bf16>(&BF16, bf16::from_bits, |x| x.to_bits());
}

#[test]
fn every_f8_widens_exactly() {
    check_codes::<F8E4M3>(&E4M3, |code| F8E4M3::from_bits(code as u8), |x| x.to_bits().into());
    check_codes::<F8E5M2>(&E5M2, |code| F8E5M2::from_bits(code as u8), |x| x.to_bits().into());
}

#[test]
fn f16_is_rounded_to_nearest_even() {
    check_rounding::<f16>(&F16, |x| x.to_bits());
}

#[test]
fn bf16_is_rounded_to_nearest_even() {
    check_rounding::<bf16>(&BF16, |x| x.to_bits());
}

#[test]
fn f8_is_rounded_to_nearest_even() {
    check_rounding::<F8E4M3>(&E4M3, |x| x.to_bits().into());
    check_rounding::<F8E5M2>(&E5M2, |x| x.to_bits().into());
}

/// The expected codes are those of PyTorch 2.15 on a CPU.
#[test]
fn f8_overflows_as_in_torch() {
    let large = [448.0, 463.9, 464.0, 464.01, 480.0, 1e9, f32::INFINITY, -500.0, f32::NAN];
    let codes = [0x7e, 0x7e, 0x7e, 0x7e, 0x7e, 0x7e, 0x7e, 0xfe, 0x7f];
    assert_eq!(large.map(|x| F8E4M3::from_f32(x).to_bits()), codes);
    let large = [57344.0, 61439.0, 61440.0, 65536.0, f32::INFINITY, -1e9, f32::NAN];
    let codes = [0x7b, 0x7b, 0x7c, 0x7c, 0x7c, 0xfc, 0x7f];
    assert_eq!(large.map(|x| F8E5M2::from_f32(x).to_bits()), codes);
}

/// Checks all 2^32 numbers.
#[test]
#[ignore = "takes minutes"]
fn every_f32_is_rounded_to_f8() {
    for bits in 0..=u32::MAX {
        let x = f32::from_bits(bits);
        let pairs = [
            (u16::from(F8E4M3::from_f32(x).to_bits()), &E4M3),
            (u16::from(F8E5M2::from_f32(x).to_bits()), &E5M2),
        ];
        for (code, format) in pairs {
            let both_nan = x.is_nan() && format.decode(code).is_nan();
            assert!(both_nan || code == format.encode(x), "{bits:#x} became {code:#x}");
        }
    }
}

#[test]
fn the_reference_rounds_correctly_at_the_limits() {
    // Infinity begins half a unit above the largest number.
    assert_eq!(F16.encode(65519.996), 0x7bff);
    assert_eq!(F16.encode(65520.0), 0x7c00);
    // Half of the smallest subnormal number is a tie with zero, whose code is even.
    assert_eq!(F16.encode(two_to(-25) as f32), 0);
    assert_eq!(F16.encode((two_to(-25) as f32).next_up()), 1);
    assert_eq!(BF16.encode(f32::MAX), 0x7f80);
    assert_eq!(BF16.encode((1.0 + two_to(-8)) as f32), 0x3f80);
    assert_eq!(BF16.encode((-1.0 - 3.0 * two_to(-8)) as f32), 0xbf82);
}

#[test]
fn wide_types_are_copied_as_they_are() {
    let values: Vec<f64> = (0..37).map(f64::from).chain([f64::NAN, -0.0]).collect();
    let mut wide = vec![0.0; values.len()];
    widen(&mut wide[..], Source::from(&values[..]));
    let mut back = vec![0.0; values.len()];
    narrow(Target::from(&mut back[..]), &wide[..]);
    let bits = |values: &[f64]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&values), bits(&back));
}

/// A peer may send any byte as a `bool`.
#[test]
fn every_byte_is_a_truth_value() {
    let bytes: Vec<u8> = (0..=u8::MAX).collect();
    let values: &[Bool] = bytemuck::cast_slice(&bytes);
    assert!(!values[0].get() && values[1..].iter().all(|value| value.get()));
    assert!(values[1..].iter().all(|value| *value == Bool::TRUE && *value != Bool::FALSE));
    let mut canonical = vec![Bool::FALSE; values.len()];
    widen(&mut canonical[..], Source::from(values));
    let bytes: &[u8] = bytemuck::cast_slice(&canonical);
    assert!(bytes[0] == 0 && bytes[1..].iter().all(|byte| *byte == 1));
}

/// For every length and place, compared with the product by definition.
#[test]
fn elements_are_scaled_by_a_factor() {
    fn check<T: Reference>() {
        let value = |i: u64| T::random((i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15), false);
        let factor = value(1000);
        for (len, skip) in places() {
            let before: Vec<T> = (0..(skip + len + 1) as u64).map(value).collect();
            let mut after = before.clone();
            scale(Target::from(&mut after[skip..skip + len]), factor);
            for (i, (after, before)) in after.iter().zip(&before).enumerate() {
                let product = || T::reduce(ReduceOp::Product, &[*before, factor], None);
                let inside = (skip..skip + len).contains(&i);
                let expected = if inside { product() } else { *before };
                assert!(after.same(expected), "{} {before:?} times {factor:?}", T::DTYPE);
            }
        }
    }
    by_type!(T => check::<T>());
}

/// For lengths around the number of lines that are taken over together, at several places in a line.
#[test]
fn fetching_copies_and_leaves_the_source_unchanged() {
    fn check<T: Copy + PartialEq + std::fmt::Debug + bytemuck::Pod>(value: fn(usize) -> T) {
        let step = if cfg!(miri) { 97 } else { 1 };
        for len in (0..2_100).step_by(step) {
            let offset = len % 9;
            let original: Vec<T> = (0..len + offset).map(value).collect();
            let (mut src, mut dst) = (original.clone(), vec![value(1 << 20); len]);
            fetch(Target::from(&mut dst[..]), Target::from(&mut src[offset..]));
            assert_eq!((&src, &dst[..]), (&original, &original[offset..]));
            dst.fill(value(1 << 20));
            fetch_past_cache(Target::from(&mut dst[..]), Target::from(&mut src[offset..]));
            assert_eq!((&src, &dst[..]), (&original, &original[offset..]));
        }
    }
    check(|i| i as u8 ^ (i >> 8) as u8);
    check(|i| i as u64 * 0x1_0001);
}

/// For all lengths and all places in a line. No element beyond the destination may change.
#[test]
fn a_copy_past_the_cache_is_whole_and_not_an_element_more() {
    fn check<T: Copy + PartialEq + std::fmt::Debug + bytemuck::Pod>(value: fn(usize) -> T) {
        let step = if cfg!(miri) { 97 } else { 1 };
        let src: Vec<T> = (0..600).map(value).collect();
        for (len, at) in (0..500).step_by(step).flat_map(|len| (0..70).map(move |at| (len, at))) {
            let mut dst = vec![value(1 << 20); at + len + 3];
            copy_past_cache(
                Target::from(&mut dst[at..at + len]),
                Source::from(&src[at / 2..at / 2 + len]),
            );
            assert_eq!(dst[at..at + len], src[at / 2..at / 2 + len]);
            let around = dst[..at].iter().chain(&dst[at + len..]);
            assert!(around.copied().all(|it| it == value(1 << 20)), "{len} elements at {at}");
        }
    }
    check(|i| i as u8 ^ (i >> 8) as u8);
    check(|i| (i as u32).wrapping_mul(0x1_0001));
    check(|i| [i as u64, !(i as u64)]);
    check(|i| [i as u8, 1, 2]);
}

/// Short, medium and long copies use different code.
#[test]
fn a_copy_of_any_length_and_place_is_whole_and_not_an_element_more() {
    fn check<T: Copy + PartialEq + std::fmt::Debug + bytemuck::Pod>(value: fn(usize) -> T) {
        let (step, long) = if cfg!(miri) { (311, 5 << 10) } else { (7, (2 << 20) + 3) };
        let lengths = (0..5_000).step_by(step).chain([long / size_of::<T>()]);
        for (len, at) in lengths.flat_map(|len| [0, 1, 16, 63].map(|at| (len, at))) {
            let src: Vec<T> = (0..at / 2 + len).map(value).collect();
            let mut dst = vec![value(1 << 20); at + len + 3];
            copy(Target::from(&mut dst[at..at + len]), Source::from(&src[at / 2..]));
            assert!(dst[at..at + len] == src[at / 2..], "{len} elements at {at}");
            let around = dst[..at].iter().chain(&dst[at + len..]);
            assert!(around.copied().all(|it| it == value(1 << 20)), "{len} elements at {at}");
        }
    }
    check(|i| i as u8 ^ (i >> 8) as u8);
    check(|i| (i as u32).wrapping_mul(0x1_0001));
    check(|i| [i as u8, 1, 2]);
}

#[test]
fn a_copy_may_overlap() {
    for (len, by) in [(100, 1), (4_000, 1), (4_000, 40), (4_000, 2_000), (4_000, 3_999)] {
        let data: Vec<u16> = (0..len as u16).collect();
        let (mut up, mut down) = (data.clone(), data.clone());
        let target = Target::from(&mut up[..]);
        copy(target.slice(by..len), target.as_source().slice(0..len - by));
        assert_eq!((&up[..by], &up[by..]), (&data[..by], &data[..len - by]));
        let target = Target::from(&mut down[..]);
        copy(target.slice(0..len - by), target.as_source().slice(by..len));
        assert_eq!((&down[..len - by], &down[len - by..]), (&data[by..], &data[len - by..]));
    }
}

#[test]
#[should_panic(expected = "destination and source differ in length")]
fn a_copy_to_a_shorter_place_is_refused() {
    copy(Target::from(&mut [0_u8; 3][..]), Source::from(&[0; 4][..]));
}
