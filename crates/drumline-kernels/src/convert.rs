use bytemuck::Pod;

use crate::isa::Isa;
use crate::kernels::copy_by_lines;
use crate::{Element, Source, Target};

/// Copies `src` to `dst`. The two may overlap in any way.
///
/// Not by `memmove` where that may take `rep movsb`: on AMD's Zen 3, which has it, some versions of glibc copy by
/// it from 2 KiB to 512 KiB, and where `dst` lies 1 to 31 bytes further in its page than
/// `src` in its own, a copy then takes 15 times as long or longer (measured, glibc 2.36: 2 to 3 GB/s, not 45). Memory
/// that `malloc` has mapped begins at byte 16 of a page, and slots at byte 0.
///
/// ```
/// use drumline_kernels::{Target, copy};
///
/// let mut data = [1, 2, 3, 4];
/// let all = Target::from(&mut data[..]);
/// copy(all.slice(1..4), all.slice(0..3).as_source()); // they overlap
/// assert_eq!(data, [1, 1, 2, 3]);
/// ```
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
    // SAFETY: the contracts of the operands: `src` is valid for reads and `dst` for writes of
    // this many aligned elements, and no other thread of this process interferes. `ptr::copy`
    // allows an overlap and forms no reference; bytes that another process changes meanwhile
    // are some bytes, and any bytes are a value of a `Pod` type.
    unsafe { std::ptr::copy(src.as_ptr(), dst.as_mut_ptr(), src.len()) };
}

/// How many bytes are copied line by line. What is longer is not copied by `rep movsb`, and may go past the
/// cache.
const BY_LINES: std::ops::Range<usize> = 2 << 10..2 << 20;

fn overlap<T: Pod>(dst: Target<'_, T>, src: Source<'_, T>) -> bool {
    let apart = (dst.as_mut_ptr() as usize).abs_diff(src.as_ptr() as usize);
    apart < src.len() * size_of::<T>()
}

/// Copies `src` to `dst`, and [takes over](take_over) the lines of `src`. The two must not overlap.
///
/// ```
/// use drumline_kernels::fetch;
///
/// let (mut slot, mut data) = ([7_u8; 100], [0; 100]);
/// fetch((&mut data[..]).into(), (&mut slot[..]).into());
/// assert_eq!((data, slot), ([7; 100], [7; 100]));
/// ```
///
/// # Panics
///
/// When the lengths differ.
pub fn fetch<T: Pod>(dst: Target<'_, T>, src: Target<'_, T>) {
    // Few enough to be in the first cache still when they are taken over.
    fetch_by::<T, 16>(dst, src, copy);
}

/// Fetches with a copy of the caller's, so many lines at a time.
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
        // Of one length, so that no call is needed to copy it.
        let part = start..start + stride;
        copy(dst.slice(part.clone()), src.as_source().slice(part.clone()));
        take_over(src.slice(part));
    }
    copy(dst.slice(whole..len), src.as_source().slice(whole..len));
    take_over(src.slice(whole..len));
}

/// Has this core take over lines that it has read: a word of each is written back.
///
/// For memory that one process fills and another empties, again and again. Between two cores, lines
/// that are only read remain half with their writer, which has to ask for them when it writes again;
/// measured, that takes up to six times as long as to hand them to and fro. Nobody else may write to
/// the memory meanwhile: words would be lost.
///
/// ```
/// use drumline_kernels::take_over;
///
/// let mut slot = [7_u64; 100];
/// take_over((&mut slot[..]).into());
/// assert_eq!(slot, [7; 100]); // written back as it was
/// ```
#[inline]
pub fn take_over<T: Pod>(memory: Target<'_, T>) {
    let line = (LINE_BYTES / size_of::<T>().max(1)).max(1);
    for at in (0..memory.len()).step_by(line) {
        let word = memory.slice(at..at + 1).as_mut_ptr();
        // SAFETY: the contract of the operand: one aligned element is valid for reads and writes.
        // Volatile, because a compiler sees that nothing changes, and would leave it out.
        unsafe { word.write_volatile(word.read_volatile()) };
    }
}

/// Bytes of a line of the cache.
pub(crate) const LINE_BYTES: usize = 64;

/// Writes the elements of `src` to `dst` in the type in which partial results are kept. Always
/// exact. A [`Bool`](crate::Bool) comes out as 0 or 1.
///
/// For algorithms that forward partial results: they widen their own elements, [`combine`] in
/// the wide type, and [`narrow`] the complete result once. For a type that is its own
/// accumulator this is a copy.
///
/// ```
/// use drumline_kernels::{ReduceOp, combine, f16, narrow, widen};
///
/// let mut sum = [0.0_f32; 2];
/// widen(&mut sum[..], (&[f16::MAX, f16::ONE][..]).into());
/// // Two more ranks: with the first of them the sum has no `f16` any more.
/// combine(ReduceOp::Avg, (&mut sum[..]).into(), (&[65504.0, 2.0][..]).into(), None);
/// combine(ReduceOp::Avg, (&mut sum[..]).into(), (&[65504.0, 6.0][..]).into(), Some(3));
/// let mut average = [f16::ZERO; 2];
/// narrow((&mut average[..]).into(), &sum[..]);
/// assert_eq!(average, [f16::MAX, f16::from_f32(3.0)]);
/// ```
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

/// Writes complete results to `dst`, rounded to nearest, ties to even. What is too large becomes
/// infinity, or the largest number of a type that has none; subnormal numbers are kept, a NaN
/// stays one.
///
/// See [`widen`].
///
/// ```
/// use drumline_kernels::{F8E4M3, bf16, narrow};
///
/// let sums = [1.0_f32, 1e9];
/// let (mut of_8_bits, mut of_16_bits) = ([F8E4M3::ZERO; 2], [bf16::ZERO; 2]);
/// narrow((&mut of_8_bits[..]).into(), &sums[..]);
/// narrow((&mut of_16_bits[..]).into(), &sums[..]);
/// assert_eq!(of_8_bits, [F8E4M3::ONE, F8E4M3::MAX]); // which has no infinity
/// assert_eq!(of_16_bits, sums.map(bf16::from_f32));
/// ```
///
/// # Panics
///
/// When the lengths differ.
pub fn narrow<'a, T: Element>(dst: Target<'_, T>, src: impl Into<Source<'a, T::Accumulator>>) {
    let src = src.into();
    same_length(dst.len(), src.len());
    T::narrow_kernel(Isa::best(), dst, src);
}

/// Multiplies each element by `factor`, computed in the [accumulator](Element::Accumulator) and
/// rounded to `T`. Integers wrap; for [`Bool`](crate::Bool) it is the logical and.
///
/// ```
/// use drumline_kernels::scale;
///
/// let mut data = [1.0_f32, -3.0];
/// scale((&mut data[..]).into(), 0.5);
/// assert_eq!(data, [0.5, -1.5]);
/// ```
pub fn scale<T: Element>(data: Target<'_, T>, factor: T) {
    T::scale_kernel(Isa::best(), data, factor);
}

fn same_length(dst: usize, src: usize) {
    assert_eq!(dst, src, "destination and source differ in length");
}
