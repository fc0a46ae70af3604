//! Conversion between elements and the wider values that kernels compute with.

use bytemuck::Pod;
use half::{bf16, f16};
use num_complex::Complex;

use crate::arithmetic::Arithmetic;
use crate::isa::Features;
use crate::{Bool, F8E4M3, F8E5M2};

/// An element type whose values are converted several at a time. `narrow` rounds to nearest, ties to
/// even. Overflow becomes infinity, or the largest number of a type without infinity. Subnormal
/// numbers are kept, and NaN stays NaN.
pub trait Lanes: Pod {
    type Wide: Arithmetic + Lanes<Wide = Self::Wide>;

    fn widen<F: Features, const N: usize>(lanes: [Self; N]) -> [Self::Wide; N];

    fn narrow<F: Features, const N: usize>(lanes: [Self::Wide; N]) -> [Self; N];
}

macro_rules! wide {
    ($($type:ty),*) => {$(
        impl Lanes for $type {
            type Wide = $type;

            #[inline(always)]
            fn widen<F: Features, const N: usize>(lanes: [Self; N]) -> [Self; N] { lanes }

            #[inline(always)]
            fn narrow<F: Features, const N: usize>(lanes: [Self; N]) -> [Self; N] { lanes }
        }
    )*};
}

wide!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64, Complex<f32>, Complex<f64>);

/// A byte from another rank becomes 0 or 1 before the kernel computes with it.
impl Lanes for Bool {
    type Wide = Bool;

    #[inline(always)]
    fn widen<F: Features, const N: usize>(lanes: [Bool; N]) -> [Bool; N] {
        lanes.map(Bool::canonical)
    }

    #[inline(always)]
    fn narrow<F: Features, const N: usize>(lanes: [Bool; N]) -> [Bool; N] {
        lanes
    }
}

macro_rules! float8 {
    ($($type:ty),*) => {$(
        impl Lanes for $type {
            type Wide = f32;

            #[inline(always)]
            fn widen<F: Features, const N: usize>(lanes: [Self; N]) -> [f32; N] {
                // In steps in which all values have one width, so that the compiler vectorises them.
                let mut codes = [0; N];
                for (code, lane) in codes.iter_mut().zip(lanes) {
                    *code = u32::from(lane.to_bits());
                }
                let mut wide = [0.0; N];
                for (wide, code) in wide.iter_mut().zip(codes) {
                    *wide = <$type>::decode(code);
                }
                wide
            }

            #[inline(always)]
            fn narrow<F: Features, const N: usize>(lanes: [f32; N]) -> [Self; N] {
                let mut codes = [0; N];
                for (code, lane) in codes.iter_mut().zip(lanes) {
                    *code = <$type>::encode(lane);
                }
                let mut narrow = [<$type>::default(); N];
                for (narrow, code) in narrow.iter_mut().zip(codes) {
                    *narrow = <$type>::from_bits(code as u8);
                }
                narrow
            }
        }
    )*};
}

float8!(F8E4M3, F8E5M2);

/// Converts by integer arithmetic on the bits. In vectors it is many times faster than the scalar
/// conversions of `half`. It keeps subnormals, which the `bf16` instructions of some processors do
/// not.
impl Lanes for bf16 {
    type Wide = f32;

    #[inline(always)]
    fn widen<F: Features, const N: usize>(lanes: [bf16; N]) -> [f32; N] {
        #[cfg(target_arch = "x86_64")]
        if F::AVX2 {
            // SAFETY: code with these features runs only where the processor has AVX2.
            return unsafe { avx2::widen_bf16(lanes) };
        }
        lanes.map(|x| f32::from_bits(u32::from(x.to_bits()) << 16))
    }

    #[inline(always)]
    fn narrow<F: Features, const N: usize>(lanes: [f32; N]) -> [bf16; N] {
        #[cfg(target_arch = "x86_64")]
        if F::AVX2 {
            // SAFETY: code with these features runs only where the processor has AVX2.
            return unsafe { avx2::narrow_bf16(lanes) };
        }
        lanes.map(|x| {
            let bits = x.to_bits();
            // Adds half a unit in the last bit that stays, less one if that bit is 0 (ties to even).
            // A carry out of the lower half rounds up, and may run on into the exponent.
            let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
            let quiet_nan = (bits >> 16) | 0x40;
            bf16::from_bits(if x.is_nan() { quiet_nan } else { rounded } as u16)
        })
    }
}

impl Lanes for f16 {
    type Wide = f32;

    #[inline(always)]
    fn widen<F: Features, const N: usize>(lanes: [f16; N]) -> [f32; N] {
        #[cfg(target_arch = "x86_64")]
        if F::AVX2 {
            // SAFETY: code with these features runs only where the processor has AVX2 and F16C.
            return unsafe { avx2::widen_f16(lanes) };
        }
        lanes.map(f16::to_f32_const)
    }

    #[inline(always)]
    fn narrow<F: Features, const N: usize>(lanes: [f32; N]) -> [f16; N] {
        #[cfg(target_arch = "x86_64")]
        if F::AVX2 {
            // SAFETY: code with these features runs only where the processor has AVX2 and F16C.
            return unsafe { avx2::narrow_f16(lanes) };
        }
        lanes.map(f16::from_f32_const)
    }
}

/// Conversions of eight elements, with instructions that keep subnormals in every floating-point mode
/// of a thread. (The compiler vectorises the plain `bf16` conversions, too, but builds the vectors
/// word by word.)
#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::asm;
    use std::arch::x86_64::{
        __m256i, _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm_packus_epi32,
        _mm_storeu_si128, _mm256_add_epi32, _mm256_and_si256, _mm256_blendv_epi8,
        _mm256_castps_si256, _mm256_castsi256_ps, _mm256_castsi256_si128, _mm256_cmp_ps,
        _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_extracti128_si256,
        _mm256_loadu_ps, _mm256_or_si256, _mm256_set1_epi32, _mm256_slli_epi32, _mm256_srli_epi32,
        _mm256_storeu_ps,
    };

    use half::{bf16, f16};

    /// Elements that are converted at once.
    const LANES: usize = 8;

    /// Defines a conversion of `N` elements by a conversion of eight.
    macro_rules! by_eight {
        ($name:ident: $from:ty => $to:ty, $convert:ident) => {
            #[inline]
            #[target_feature(enable = "avx2,f16c")]
            pub(super) fn $name<const N: usize>(lanes: [$from; N]) -> [$to; N] {
                let mut converted = [<$to>::default(); N];
                let (whole, rest) = converted.as_chunks_mut();
                let (from_whole, from_rest) = lanes.as_chunks();
                for (to, from) in whole.iter_mut().zip(from_whole) {
                    *to = $convert(from);
                }
                for (to, from) in rest.iter_mut().zip(from_rest) {
                    *to = $convert(&[*from; LANES])[0];
                }
                converted
            }
        };
    }

    by_eight!(widen_f16: f16 => f32, widen_f16s);
    by_eight!(narrow_f16: f32 => f16, narrow_f16s);
    by_eight!(widen_bf16: bf16 => f32, widen_bf16s);
    by_eight!(narrow_bf16: f32 => bf16, narrow_bf16s);

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    fn widen_f16s(lanes: &[f16; LANES]) -> [f32; LANES] {
        let mut wide = [0.0; LANES];
        // SAFETY: reads the 16 bytes of `lanes` and writes the 32 of `wide`.
        unsafe {
            let narrow = _mm_loadu_si128(lanes.as_ptr().cast());
            _mm256_storeu_ps(wide.as_mut_ptr(), _mm256_cvtph_ps(narrow));
        }
        wide
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    fn narrow_f16s(lanes: &[f32; LANES]) -> [f16; LANES] {
        let mut narrow = [f16::ZERO; LANES];
        // SAFETY: reads the 32 bytes of `lanes` and writes the 16 of `narrow`.
        unsafe {
            let wide = _mm256_loadu_ps(lanes.as_ptr());
            let rounded = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(wide);
            _mm_storeu_si128(narrow.as_mut_ptr().cast(), rounded);
        }
        narrow
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn widen_bf16s(lanes: &[bf16; LANES]) -> [f32; LANES] {
        let mut wide = [0.0; LANES];
        // SAFETY: reads the 16 bytes of `lanes` and writes the 32 of `wide`. The `asm!` is empty.
        unsafe {
            let narrow = _mm256_cvtepu16_epi32(_mm_loadu_si128(lanes.as_ptr().cast()));
            let mut bits = _mm256_slli_epi32::<16>(narrow);
            // Emits no instruction. Without this barrier, and the one in `narrow_bf16s`, the compiler
            // splits the vectors and reassembles them, which takes half as much time again.
            asm!("/* {} */", inout(ymm_reg) bits, options(pure, nomem, nostack, preserves_flags));
            _mm256_storeu_ps(wide.as_mut_ptr(), _mm256_castsi256_ps(bits));
        }
        wide
    }

    /// The same arithmetic as in the plain `narrow`.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn narrow_bf16s(lanes: &[f32; LANES]) -> [bf16; LANES] {
        let mut narrow = [bf16::ZERO; LANES];
        // SAFETY: reads the 32 bytes of `lanes` and writes the 16 of `narrow`. The `asm!` is empty.
        unsafe {
            let mut x = _mm256_loadu_ps(lanes.as_ptr());
            asm!("/* {} */", inout(ymm_reg) x, options(pure, nomem, nostack, preserves_flags));
            let bits: __m256i = _mm256_castps_si256(x);
            let high = _mm256_srli_epi32::<16>(bits);
            let odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
            let half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
            let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, half));
            let quiet_nan = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
            let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
            let codes = _mm256_blendv_epi8(rounded, quiet_nan, is_nan);
            let halves = (_mm256_castsi256_si128(codes), _mm256_extracti128_si256::<1>(codes));
            _mm_storeu_si128(narrow.as_mut_ptr().cast(), _mm_packus_epi32(halves.0, halves.1));
        }
        narrow
    }
}
