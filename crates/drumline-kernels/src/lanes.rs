//! Elements as they travel, and the wider values that are computed with.

use bytemuck::Pod;
use half::{bf16, f16};
use num_complex::Complex;

use crate::arithmetic::Arithmetic;
use crate::isa::Features;
use crate::{Bool, F8E4M3, F8E5M2};

/// Conversion of several elements at once. `narrow` rounds to nearest, ties to even; overflow
/// becomes infinity (the largest number where there is none), subnormal numbers are kept, a NaN
/// stays one.
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

/// A byte that came from elsewhere becomes 0 or 1 before it is computed with.
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
                // In steps of one width each, of which the compiler makes vectors.
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

/// Integer arithmetic on the bits: vectors of it are many times faster than `half`'s scalar
/// conversions, and unlike the instructions that some processors have, it keeps subnormals.
impl Lanes for bf16 {
    type Wide = f32;

    #[inline(always)]
    fn widen<F: Features, const N: usize>(lanes: [bf16; N]) -> [f32; N] {
        #[cfg(target_arch = "x86_64")]
        if F::AVX2 {
            // SAFETY: `F` says that the processor has AVX2.
            return unsafe { avx2::widen_bf16(lanes) };
        }
        lanes.map(|x| f32::from_bits(u32::from(x.to_bits()) << 16))
    }

    #[inline(always)]
    fn narrow<F: Features, const N: usize>(lanes: [f32; N]) -> [bf16; N] {
        #[cfg(target_arch = "x86_64")]
        if F::AVX2 {
            // SAFETY: `F` says that the processor has AVX2.
            return unsafe { avx2::narrow_bf16(lanes) };
        }
        lanes.map(|x| {
            let bits = x.to_bits();
            // Half a unit in the last place that stays, less one bit if that place is even: a
            // carry out of the lower half is a rounding up, out of the fraction too.
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
            // SAFETY: `F` says that the processor has AVX2 and F16C.
            return unsafe { avx2::widen_f16(lanes) };
        }
        lanes.map(f16::to_f32_const)
    }

    #[inline(always)]
    fn narrow<F: Features, const N: usize>(lanes: [f32; N]) -> [f16; N] {
        #[cfg(target_arch = "x86_64")]
        if F::AVX2 {
            // SAFETY: `F` says that the processor has AVX2 and F16C.
            return unsafe { avx2::narrow_f16(lanes) };
        }
        lanes.map(f16::from_f32_const)
    }
}

/// Conversions by eight, with instructions that keep subnormals whatever the thread's mode says. (Left
/// to itself the compiler makes vectors of the `bf16` ones, too, but puts them together word by word.)
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

    /// A conversion of `N` elements out of one of eight.
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
        // SAFETY: reads the 16 bytes of `lanes` and writes the 32 of `wide`; no instruction is added.
        unsafe {
            let narrow = _mm256_cvtepu16_epi32(_mm_loadu_si128(lanes.as_ptr().cast()));
            let mut bits = _mm256_slli_epi32::<16>(narrow);
            // Nothing. A compiler that looks through this, and through the same in `narrow_bf16s`, takes
            // the vectors apart again, to put them together otherwise, in half as much time again.
            asm!("/* {} */", inout(ymm_reg) bits, options(pure, nomem, nostack, preserves_flags));
            _mm256_storeu_ps(wide.as_mut_ptr(), _mm256_castsi256_ps(bits));
        }
        wide
    }

    /// The same arithmetic as that for every processor.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn narrow_bf16s(lanes: &[f32; LANES]) -> [bf16; LANES] {
        let mut narrow = [bf16::ZERO; LANES];
        // SAFETY: reads the 32 bytes of `lanes` and writes the 16 of `narrow`.
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
