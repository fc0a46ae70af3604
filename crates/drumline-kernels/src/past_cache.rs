//! Copies that leave other data in the cache.

use bytemuck::Pod;

use crate::convert::fetch_by;
use crate::operand::{Source, Target};

/// Copies `src` to `dst` and writes `dst` past the cache, directly to memory. The two must not
/// overlap.
///
/// An ordinary copy first fetches the lines of `dst` into the cache, which is of no use and evicts others.
/// Use this function when `dst` is too long to be still in the cache when it is next read: measured, the copy
/// then takes two thirds of the time. If `dst` fits in the cache, it takes twice as long.
///
/// # Panics
///
/// When the lengths differ.
pub fn copy_past_cache<T: Pod>(dst: Target<'_, T>, src: Source<'_, T>) {
    assert_eq!(dst.len(), src.len(), "operands differ in length");
    lines::copy(dst, src);
    lines::fence();
}

/// [`copy_past_cache`] that also [takes over](crate::take_over) the cache lines of `src`. The two
/// must not overlap.
///
/// # Panics
///
/// When the lengths differ.
pub fn fetch_past_cache<T: Pod>(dst: Target<'_, T>, src: Target<'_, T>) {
    // More lines at a time than `fetch`: those of `dst` need no place in the cache.
    fetch_by::<T, 64>(dst, src, lines::copy);
    lines::fence();
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod lines {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    use bytemuck::Pod;

    use crate::convert::{LINE_BYTES, copy as copy_through_cache};
    use crate::operand::{Source, Target};

    /// Copies, and writes whole lines of `dst` past the cache. The caller must call [`fence`] before
    /// it tells another thread or process of the data.
    pub(super) fn copy<T: Pod>(dst: Target<'_, T>, src: Source<'_, T>) {
        const WORDS: usize = LINE_BYTES / size_of::<__m128i>();
        let per_line = LINE_BYTES / size_of::<T>().max(1);
        let first = dst.as_mut_ptr().align_offset(LINE_BYTES).min(dst.len());
        if per_line * size_of::<T>() != LINE_BYTES {
            return copy_through_cache(dst, src);
        }
        let lines = (dst.len() - first) / per_line;
        let (end, len) = (first + lines * per_line, dst.len());
        copy_through_cache(dst.slice(0..first), src.slice(0..first));
        let to = dst.slice(first..end).as_mut_ptr().cast::<__m128i>();
        let from = src.slice(first..end).as_ptr().cast::<__m128i>();
        for at in (0..lines * WORDS).step_by(WORDS) {
            // SAFETY: by the contracts of the operands, `lines` lines are valid for reads at `from`
            // and for writes at `to`. `to` is aligned to a line, as `_mm_stream_si128` requires. SSE2
            // is part of x86-64. The caller fences before another thread or process reads `dst`.
            unsafe {
                let line: [_; WORDS] = std::array::from_fn(|i| _mm_loadu_si128(from.add(at + i)));
                for (i, word) in line.into_iter().enumerate() {
                    _mm_stream_si128(to.add(at + i), word);
                }
            }
        }
        copy_through_cache(dst.slice(end..len), src.slice(end..len));
    }

    /// Orders all writes past the cache before all later writes.
    pub(super) fn fence() {
        // SAFETY: SSE is part of x86-64.
        unsafe { _mm_sfence() };
    }
}

/// Ordinary copies, where writing past the cache has not been measured.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
mod lines {
    pub(super) use crate::convert::copy;

    pub(super) fn fence() {}
}
