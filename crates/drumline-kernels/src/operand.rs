//! Operands: the memory that kernels read and write.
//!
//! A reduction often works directly on memory that another process maps too. A Rust reference
//! promises that nothing else writes to its memory, so no reference may point there. An operand
//! promises less: it is an address and a length, and kernels read and write through raw pointers. If
//! another process changes a value meanwhile, the result is a wrong number, never undefined
//! behaviour. Slices turn into operands with `into()`.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use bytemuck::Pod;

use crate::lanes::Lanes;

/// Elements that a kernel reads: a slice, or memory that other processes may write meanwhile.
pub struct Source<'a, T> {
    ptr: *const T,
    len: usize,
    life: PhantomData<&'a [T]>,
}

/// Elements that a kernel writes and may read: a slice, or memory that other processes may read and
/// write meanwhile.
///
/// It is `Copy`, so that the same memory can be destination and source of one kernel. All copies
/// share the borrow of the first, and stay on its thread.
pub struct Target<'a, T> {
    ptr: *mut T,
    len: usize,
    life: PhantomData<&'a mut [T]>,
}

/// An input of a sum whose inputs have different widths.
#[derive(Clone, Copy, Debug)]
pub enum Addend<'a, T: Lanes> {
    /// Elements.
    Element(Source<'a, T>),
    /// Partial results, in the [accumulator](crate::Element::Accumulator).
    Sum(Source<'a, T::Wide>),
}

impl<T: Lanes> Addend<'_, T> {
    /// Number of elements.
    pub const fn len(&self) -> usize {
        match self {
            Addend::Element(source) => source.len(),
            Addend::Sum(source) => source.len(),
        }
    }

    /// Whether there are no elements.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<'a, T: Pod> Source<'a, T> {
    /// The `len` elements at `ptr`.
    ///
    /// # Safety
    ///
    /// Until the end of `'a`:
    ///
    /// - `ptr` is aligned for `T` and valid for reads of `len` elements, all within one allocation or
    ///   mapping. (With `len` 0, any aligned address is allowed.)
    /// - No thread of this process writes to the elements, except through a [`Target`] for the same
    ///   memory on the thread that uses this operand. Other *processes* may write at any time. The
    ///   values that a kernel reads are then unspecified, but the behaviour is defined.
    pub const unsafe fn from_raw(ptr: *const T, len: usize) -> Source<'a, T> {
        Source { ptr, len, life: PhantomData }
    }
}

impl<'a, T: Pod> Target<'a, T> {
    /// The `len` elements at `ptr`.
    ///
    /// # Safety
    ///
    /// Until the end of `'a`:
    ///
    /// - `ptr` is aligned for `T` and valid for reads and writes of `len` elements, all within one
    ///   allocation or mapping. (With `len` 0, any aligned address is allowed.)
    /// - No other thread of this process reads or writes the elements, and no reference to them is
    ///   used. Other *processes* may read and write at any time. The values that either side reads
    ///   are then unspecified, but the behaviour is defined.
    pub const unsafe fn from_raw(ptr: *mut T, len: usize) -> Target<'a, T> {
        Target { ptr, len, life: PhantomData }
    }

    /// The same elements, for reading.
    pub const fn as_source(self) -> Source<'a, T> {
        Source { ptr: self.ptr, len: self.len, life: PhantomData }
    }

    pub(crate) const fn as_mut_ptr(self) -> *mut T {
        self.ptr
    }

    /// The same memory as bytes.
    pub const fn as_bytes(self) -> Target<'a, u8> {
        Target { ptr: self.ptr.cast(), len: self.len * size_of::<T>(), life: PhantomData }
    }

    /// Writes the `N` elements from `at` on.
    #[inline(always)]
    pub(crate) fn store<const N: usize>(self, at: usize, values: [T; N]) {
        assert!(at + N <= self.len);
        // SAFETY: the elements lie within the operand, for which the contract of `from_raw` holds.
        unsafe { self.ptr.add(at).cast::<[T; N]>().write(values) };
    }
}

impl<'a, T: Pod> Source<'a, T> {
    pub(crate) const fn as_ptr(self) -> *const T {
        self.ptr
    }

    /// The same memory as bytes.
    pub const fn as_bytes(self) -> Source<'a, u8> {
        Source { ptr: self.ptr.cast(), len: self.len * size_of::<T>(), life: PhantomData }
    }

    /// Reads the `N` elements from `at` on.
    #[inline(always)]
    pub(crate) fn load<const N: usize>(self, at: usize) -> [T; N] {
        assert!(at + N <= self.len);
        // SAFETY: the elements lie within the operand, for which the contract of `from_raw` holds.
        unsafe { self.ptr.add(at).cast::<[T; N]>().read() }
    }
}

macro_rules! operand {
    ($name:ident) => {
        impl<'a, T> $name<'a, T> {
            /// Number of elements.
            pub const fn len(&self) -> usize {
                self.len
            }

            /// Whether there are no elements.
            pub const fn is_empty(&self) -> bool {
                self.len == 0
            }

            /// An operand without elements.
            pub(crate) const NONE: $name<'a, T> =
                $name { ptr: std::ptr::dangling::<T>().cast_mut(), len: 0, life: PhantomData };

            /// The elements in `range`.
            ///
            /// # Panics
            ///
            /// When `range` does not lie within the operand.
            #[inline]
            pub fn slice(self, range: Range<usize>) -> $name<'a, T> {
                let Range { start, end } = range;
                assert!(
                    start <= end && end <= self.len,
                    "elements {start}..{end} of an operand of {}",
                    self.len
                );
                // The address lies within the operand or at its end, so this never wraps.
                $name { ptr: self.ptr.wrapping_add(start), len: end - start, life: PhantomData }
            }
        }

        impl<'a> $name<'a, u8> {
            /// The bytes as elements.
            ///
            /// # Panics
            ///
            /// When the bytes are not aligned for `T`, or are no whole number of elements.
            #[inline(always)]
            pub fn elements<T: Pod>(self) -> $name<'a, T> {
                let (ptr, len) = (self.ptr.cast::<T>(), self.len / size_of::<T>());
                if self.len == 0 {
                    return $name::NONE;
                }
                assert!(
                    ptr.is_aligned() && len * size_of::<T>() == self.len,
                    "{} bytes are no elements of {}",
                    self.len,
                    size_of::<T>()
                );
                $name { ptr, len, life: PhantomData }
            }
        }

        // Not derived: a derive would ask for `T: Clone` and `T: Debug`.
        impl<T> Clone for $name<'_, T> {
            fn clone(&self) -> Self {
                *self
            }
        }

        impl<T> Copy for $name<'_, T> {}

        /// Shows address and length, not the elements: another process may be changing them.
        impl<T> fmt::Debug for $name<'_, T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($name))
                    .field("ptr", &self.ptr)
                    .field("len", &self.len)
                    .finish()
            }
        }
    };
}

operand!(Source);
operand!(Target);

impl<'a, T: Pod> From<&'a [T]> for Source<'a, T> {
    fn from(slice: &'a [T]) -> Source<'a, T> {
        Source { ptr: slice.as_ptr(), len: slice.len(), life: PhantomData }
    }
}

impl<'a, T: Pod> From<&'a mut [T]> for Target<'a, T> {
    fn from(slice: &'a mut [T]) -> Target<'a, T> {
        Target { ptr: slice.as_mut_ptr(), len: slice.len(), life: PhantomData }
    }
}

impl<'a, T: Pod> From<Target<'a, T>> for Source<'a, T> {
    fn from(target: Target<'a, T>) -> Source<'a, T> {
        target.as_source()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "elements 1..4 of an operand of 3")]
    fn a_range_past_the_end_is_refused() {
        let _ = Source::from(&[0_u8; 3][..]).slice(1..4);
    }

    #[test]
    #[should_panic(expected = "elements 2..1 of an operand of 3")]
    #[expect(clippy::reversed_empty_ranges)]
    fn a_reversed_range_is_refused() {
        let _ = Target::from(&mut [0_u8; 3][..]).slice(2..1);
    }

    #[test]
    fn a_slice_of_a_slice_is_where_it_should_be() {
        let values = [10_u16, 11, 12, 13, 14];
        let source = Source::from(&values[..]).slice(1..5).slice(1..3);
        assert_eq!(source.as_ptr(), &raw const values[2]);
        assert_eq!(source.len(), 2);
        assert!(source.slice(2..2).is_empty());
    }
}
