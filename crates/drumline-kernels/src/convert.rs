//! Copies, conversions between types, and products with a factor.

use bytemuck::Pod;

use crate::isa::Isa;
use crate::kernels::copy_by_lines;
use crate::{Element, Source, Target};

/// Copies `src` to `dst`. The two may overlap in any way.
///
/// From 2 KiB to 2 MiB this avoids `memmove`, because `memmove` may use `rep movsb`: on AMD's Zen 3,
/// some versions of glibc do so from 2 KiB to 512 KiB. If `dst` then lies 1 to 31 bytes further into
/// its page than `src` into its own, the copy takes at least 15 times as long (measured with glibc
/// 2.36: 2 to 3 GB/s instead of 45). This case is common: large buffers from `malloc` begin at byte
/// 16 of a page, and slots at byte 0.
///
/// # Panics
///
/// When the lengths differ.
pub fn copy<T: Pod>(dst: Target<'_, T>, src: Source<'_, T>) {
    same_length(dst.len(), src.len());
    if cfg!(all(target_arch = "x86_64", not(miri)))
        && BY_LINES.contains(&(src.len() * size_of::<T>()))
        && !overlap(dst, src)
    {
        return copy_by_lines(Isa::best(), dst.as_bytes(), src.as_bytes());
    }
    // SAFETY: by the contracts of the operands, `src` is valid for reads and `dst` for writes of
    // `len` aligned elements, and no other thread of this process uses them. `ptr::copy` allows an
    // overlap and forms no reference. Another process may change bytes meanwhile; the copy then has
    // unspecified bytes, and any bytes are a value of a `Pod` type.
    unsafe { std::ptr::copy(src.as_ptr(), dst.as_mut_ptr(), src.len()) };
}

/// Sizes in bytes that are copied line by line. Longer copies do not use `rep movsb`, and `memmove`
/// may write them past the cache.
const BY_LINES: std::ops::Range<usize> = 2 << 10..2 << 20;

fn overlap<T: Pod>(dst: Target<'_, T>, src: Source<'_, T>) -> bool {
    let apart = (dst.as_mut_ptr() as usize).abs_diff(src.as_ptr() as usize);
    apart < src.len() * size_of::<T>()
}

/// Copies `src` to `dst` and [takes over](take_over) the cache lines of `src`. The two must not
/// overlap.
///
/// # Panics
///
/// When the lengths differ.
pub fn fetch<T: Pod>(dst: Target<'_, T>, src: Target<'_, T>) {
    // Few enough lines to be still in the first-level cache when they are taken over.
    fetch_by::<T, 16>(dst, src, copy);
}

/// [`fetch`] with a `copy` of the caller's choice, `LINES` cache lines at a time.
#[inline(always)]
pub(crate) fn fetch_by<T: Pod, const LINES: usize>(
    dst: Target<'_, T>,
    src: Target<'_, T>,
    copy: impl Fn(Target<'_, T>, Source<'_, T>),
) {
    same_length(dst.len(), src.len());
    let line = (LINE_BYTES / size_of::<T>().max(1)).max(1);
    let (stride, len) = (LINES * line, src.len());
    let whole = len - len % stride;
    for start in (0..whole).step_by(stride) {
        // The compiler knows this length, so the copy needs no function call.
        let part = start..start + stride;
        copy(dst.slice(part.clone()), src.as_source().slice(part.clone()));
        take_over(src.slice(part));
    }
    copy(dst.slice(whole..len), src.as_source().slice(whole..len));
    take_over(src.slice(whole..len));
}

/// Moves cache lines that this core has read from shared to exclusive state, by writing one element
/// of each line back.
///
/// For memory that one process fills and another empties, again and again. A line that the reader
/// only reads stays shared, and the writer must ask for it when it writes again. Measured, this takes
/// up to six times as long as passing exclusive lines back and forth. No other thread or process may
/// write to the memory meanwhile, because its writes could be lost.
#[inline]
pub fn take_over<T: Pod>(memory: Target<'_, T>) {
    let line = (LINE_BYTES / size_of::<T>().max(1)).max(1);
    for at in (0..memory.len()).step_by(line) {
        let word = memory.slice(at..at + 1).as_mut_ptr();
        // SAFETY: by the contract of the operand, this aligned element is valid for reads and writes.
        // Volatile, because the compiler would otherwise remove a write that changes nothing.
        unsafe { word.write_volatile(word.read_volatile()) };
    }
}

/// Bytes of a cache line.
pub(crate) const LINE_BYTES: usize = 64;

/// Converts elements to their [accumulator](Element::Accumulator), the type in which partial results
/// are kept. Always exact. A [`Bool`](crate::Bool) becomes 0 or 1.
///
/// For algorithms that forward partial results. Such an algorithm widens its own elements,
/// [`combine`]s in the wide type, and [`narrow`]s the complete result once. For a type that is its
/// own accumulator this is a copy.
///
/// [`combine`]: crate::combine()
///
/// # Panics
///
/// When the lengths differ.
pub fn widen<'a, T: Element>(dst: impl Into<Target<'a, T::Accumulator>>, src: Source<'_, T>) {
    let dst = dst.into();
    same_length(dst.len(), src.len());
    T::widen_kernel(Isa::best(), dst, src);
}

/// Converts complete results from their [accumulator](Element::Accumulator), rounded to nearest, ties
/// to even. A number that is too large becomes infinity, or the largest number of a type without
/// infinity. Subnormal numbers are kept, and NaN stays NaN.
///
/// See [`widen`].
///
/// # Panics
///
/// When the lengths differ.
pub fn narrow<'a, T: Element>(dst: Target<'_, T>, src: impl Into<Source<'a, T::Accumulator>>) {
    let src = src.into();
    same_length(dst.len(), src.len());
    T::narrow_kernel(Isa::best(), dst, src);
}

/// Multiplies each element by `factor`, in the [accumulator](Element::Accumulator), and rounds the
/// product to `T`. Integers wrap. For [`Bool`](crate::Bool) the product is the logical and.
pub fn scale<T: Element>(data: Target<'_, T>, factor: T) {
    T::scale_kernel(Isa::best(), data, factor);
}

fn same_length(dst: usize, src: usize) {
    assert_eq!(dst, src, "destination and source differ in length");
}
