//! The memory of a bucket.

use std::{
    fmt,
    ops::{AddAssign, Range},
    time::Instant,
};

use drumline_group::{DType, Element, ProcessGroup, ReduceOp, RegisteredBuffer, Work, driving};
use drumline_kernels::copy;

use super::super::Bucket;
use crate::Result;

/// Memory in which a collective works without copies between the ranks of a host.
type Buffer<T> = RegisteredBuffer<T>;

/// Borrowed elements of a gradient, row-major.
///
/// ```
/// use drumline::ddp::Values;
///
/// let gradient = vec![1.0_f64, 2.0];
/// assert_eq!(Values::from(&gradient[..]), Values::F64(&[1.0, 2.0]));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Values<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// Double precision.
    F64(&'a [f64]),
}

impl<'a> Values<'a> {
    /// The elements, if they are `T`.
    pub fn as_slice<T: Element>(self) -> Option<&'a [T]> {
        match self {
            Values::F32(values) if T::DTYPE == DType::F32 => Some(bytemuck::cast_slice(values)),
            Values::F64(values) if T::DTYPE == DType::F64 => Some(bytemuck::cast_slice(values)),
            _ => None,
        }
    }
}

impl<'a> From<&'a [f32]> for Values<'a> {
    fn from(values: &'a [f32]) -> Self {
        Values::F32(values)
    }
}

impl<'a> From<&'a [f64]> for Values<'a> {
    fn from(values: &'a [f64]) -> Self {
        Values::F64(values)
    }
}

/// The place of a gradient in its bucket: as many elements as the parameter has, row-major.
///
/// ```
/// use drumline::ddp::ValuesMut;
///
/// /// Writes the transpose of a 2 x 2 gradient to its place.
/// fn fill(place: ValuesMut<'_>, [[a, b], [c, d]]: [[f32; 2]; 2]) -> bool {
///     let ValuesMut::F32(place) = place else { return false };
///     place.copy_from_slice(&[a, c, b, d]);
///     true
/// }
/// let mut place = [0.0; 4];
/// assert!(fill(ValuesMut::F32(&mut place), [[1.0, 2.0], [3.0, 4.0]]));
/// assert_eq!(place, [1.0, 3.0, 2.0, 4.0]);
/// ```
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub enum ValuesMut<'a> {
    /// Single precision.
    F32(&'a mut [f32]),
    /// Double precision.
    F64(&'a mut [f64]),
}

impl ValuesMut<'_> {
    /// Copies `values`, if they have the right dtype and number. Returns whether they had.
    pub fn copy_from(self, values: Values<'_>) -> bool {
        match (self, values) {
            (ValuesMut::F32(target), Values::F32(values)) if target.len() == values.len() => {
                copy(target.into(), values.into());
            }
            (ValuesMut::F64(target), Values::F64(values)) if target.len() == values.len() => {
                copy(target.into(), values.into());
            }
            _ => return false,
        }
        true
    }
}

/// The elements of a bucket: the gradients of its members, then one mark for each member, then two marks of
/// the rank. A rank sets a mark to 1. After the all-reduce a mark is above zero if *some* rank had set it,
/// because it is an average of zeros and ones.
pub(super) enum Memory {
    F32(Buffer<f32>),
    F64(Buffer<f64>),
}

/// Evaluates one expression for either dtype.
macro_rules! with_elements {
    ($memory:expr, $elements:ident => $result:expr) => {
        match $memory {
            Memory::F32($elements) => $result,
            Memory::F64($elements) => $result,
        }
    };
}

impl Memory {
    /// Memory for `elements` elements of gradients, and the marks.
    pub(super) fn new(bucket: &Bucket, elements: usize, group: &ProcessGroup) -> Result<Self> {
        let elements = elements + bucket.parameters.len() + 2;
        Ok(match bucket.dtype {
            DType::F64 => Memory::F64(group.alloc_registered(elements)?),
            _ => Memory::F32(group.alloc_registered(elements)?),
        })
    }

    /// Memory of the same size that no neighbour reaches. The step goes on with it until it returns an error.
    pub(super) fn stopgap(bucket: &Bucket, elements: usize) -> Self {
        let elements = elements + bucket.parameters.len() + 2;
        match bucket.dtype {
            DType::F64 => Memory::F64(RegisteredBuffer::private(elements)),
            _ => Memory::F32(RegisteredBuffer::private(elements)),
        }
    }

    pub(super) fn slice(&self, range: Range<usize>) -> Values<'_> {
        with_elements!(self, elements => (&elements[range]).into())
    }

    pub(super) fn slice_mut(&mut self, range: Range<usize>) -> ValuesMut<'_> {
        match self {
            Memory::F32(elements) => ValuesMut::F32(&mut elements[range]),
            Memory::F64(elements) => ValuesMut::F64(&mut elements[range]),
        }
    }

    /// Adds what `fill` writes. Returns whether `fill` succeeded.
    pub(super) fn add(
        &mut self,
        range: Range<usize>,
        fill: impl FnOnce(ValuesMut<'_>) -> bool,
    ) -> bool {
        fn add_to<T: Element + AddAssign>(
            target: &mut [T],
            fill: impl FnOnce(&mut [T]) -> bool,
        ) -> bool {
            let mut values = vec![T::zeroed(); target.len()];
            let is_filled = fill(&mut values);
            if is_filled {
                target.iter_mut().zip(values).for_each(|(target, value)| *target += value);
            }
            is_filled
        }
        match self {
            Memory::F32(elements) => {
                add_to(&mut elements[range], |values| fill(ValuesMut::F32(values)))
            }
            Memory::F64(elements) => {
                add_to(&mut elements[range], |values| fill(ValuesMut::F64(values)))
            }
        }
    }

    pub(super) fn zero(&mut self, range: Range<usize>) {
        with_elements!(self, elements => elements[range].fill(0.0));
    }

    pub(super) fn set_mark(&mut self, at: usize, is_set: bool) {
        with_elements!(self, elements => elements[at] = u8::from(is_set).into());
    }

    pub(super) fn mark(&self, at: usize) -> bool {
        with_elements!(self, elements => elements[at] != 0.0)
    }

    pub(super) fn all_reduce(self, group: &ProcessGroup) -> Travelling {
        match self {
            Memory::F32(buffer) => Travelling::F32(group.all_reduce_async(buffer, ReduceOp::Avg)),
            Memory::F64(buffer) => Travelling::F64(group.all_reduce_async(buffer, ReduceOp::Avg)),
        }
    }
}

/// Memory that is being averaged.
#[derive(Debug)]
pub(super) enum Travelling {
    F32(Work<Buffer<f32>>),
    F64(Work<Buffer<f64>>),
}

impl Travelling {
    /// The averages, and when they were complete.
    pub(super) fn wait(self) -> Result<(Memory, Instant)> {
        Ok(match self {
            Travelling::F32(work) => {
                let (buffer, at) = driving::wait_and_tell(work)?;
                (Memory::F32(buffer), at)
            }
            Travelling::F64(work) => {
                let (buffer, at) = driving::wait_and_tell(work)?;
                (Memory::F64(buffer), at)
            }
        })
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = with_elements!(self, elements => size_of_val(&elements[..]));
        write!(f, "Memory({bytes} bytes)")
    }
}
