//! The memory of a bucket.

use std::{fmt, ops::Range, time::Instant};

use drumline_group::{
    DType, Element, ProcessGroup, ReduceOp, RegisteredBuffer, Work, bf16, driving, f16,
};
use drumline_kernels::{narrow, widen};

use super::{
    super::{Bucket, Wire},
    values::{Values, ValuesMut},
};
use crate::Result;

/// Memory in which a collective works without copies between the ranks of a host.
type Buffer<T> = RegisteredBuffer<T>;

/// The elements of a bucket: the gradients of its members, then one mark for each member, then marks of the rank. A
/// rank sets a mark to 1. After the all-reduce a mark is above zero if *some* rank had set it, because it is an
/// average of zeros and ones. The first bucket also has the marks of [`activity`](super::activity).
pub(super) enum Memory {
    F32(Buffer<f32>),
    F64(Buffer<f64>),
    F16(Buffer<f16>),
    Bf16(Buffer<bf16>),
    /// `values` are rounded to `wire` when they leave, and replaced by what comes back.
    Narrowed {
        values: Vec<f32>,
        wire: Buffer<bf16>,
    },
}

/// Evaluates one expression for any dtype.
macro_rules! with_elements {
    ($memory:expr, $elements:ident => $result:expr) => {
        match $memory {
            Memory::F32($elements) => $result,
            Memory::F64($elements) => $result,
            Memory::F16($elements) => $result,
            Memory::Bf16($elements) => $result,
            Memory::Narrowed { values: $elements, .. } => $result,
        }
    };
}

impl Memory {
    /// Memory for `elements` elements, marks among them.
    pub(super) fn new(
        bucket: &Bucket,
        elements: usize,
        wire: Wire,
        group: &ProcessGroup,
    ) -> Result<Self> {
        Ok(match (bucket.dtype, wire) {
            (DType::F64, _) => Memory::F64(group.alloc_registered(elements)?),
            (DType::F16, _) => Memory::F16(group.alloc_registered(elements)?),
            (DType::Bf16, _) => Memory::Bf16(group.alloc_registered(elements)?),
            (_, Wire::Bf16) => {
                let wire = group.alloc_registered(elements)?;
                Memory::Narrowed { values: vec![0.0; elements], wire }
            }
            (_, Wire::AsIs) => Memory::F32(group.alloc_registered(elements)?),
        })
    }

    /// Memory of the same size that no neighbour reaches. The step goes on with it until it returns an error.
    pub(super) fn stopgap(bucket: &Bucket, elements: usize) -> Self {
        match bucket.dtype {
            DType::F64 => Memory::F64(RegisteredBuffer::private(elements)),
            DType::F16 => Memory::F16(RegisteredBuffer::private(elements)),
            DType::Bf16 => Memory::Bf16(RegisteredBuffer::private(elements)),
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
            Memory::F16(elements) => ValuesMut::F16(&mut elements[range]),
            Memory::Bf16(elements) => ValuesMut::Bf16(&mut elements[range]),
            Memory::Narrowed { values, .. } => ValuesMut::F32(&mut values[range]),
        }
    }

    pub(super) fn zero(&mut self, range: Range<usize>) {
        with_elements!(self, elements => elements[range].fill(bytemuck::Zeroable::zeroed()));
    }

    pub(super) fn set_mark(&mut self, at: usize, mark: u8) {
        with_elements!(self, elements => elements[at] = mark.into());
    }

    pub(super) fn mark(&self, at: usize) -> f64 {
        with_elements!(self, elements => widened(elements[at]))
    }

    pub(super) fn is_marked(&self, at: usize) -> bool {
        self.mark(at) != 0.0
    }

    /// Makes averages over `all` ranks those over `active` of them.
    pub(super) fn divide_again(&mut self, range: Range<usize>, all: usize, active: usize) {
        let (all, active) = (all as f64, active as f64);
        // A product that is exact before the division keeps whole numbers whole.
        let again = |average: f64| average * all / active;
        match self.slice_mut(range) {
            ValuesMut::F32(values) => {
                values.iter_mut().for_each(|it| *it = again((*it).into()) as f32);
            }
            ValuesMut::F64(values) => values.iter_mut().for_each(|it| *it = again(*it)),
            ValuesMut::F16(values) => {
                values.iter_mut().for_each(|it| *it = f16::from_f64(again((*it).into())));
            }
            ValuesMut::Bf16(values) => {
                values.iter_mut().for_each(|it| *it = bf16::from_f64(again((*it).into())));
            }
        }
    }

    pub(super) fn all_reduce(self, group: &ProcessGroup) -> Travelling {
        match self {
            Memory::F32(buffer) => Travelling::F32(average(buffer, group)),
            Memory::F64(buffer) => Travelling::F64(average(buffer, group)),
            Memory::F16(buffer) => Travelling::F16(average(buffer, group)),
            Memory::Bf16(buffer) => Travelling::Bf16(average(buffer, group)),
            Memory::Narrowed { values, mut wire } => {
                narrow((&mut wire[..]).into(), &values[..]);
                Travelling::Narrowed { values, wire: average(wire, group) }
            }
        }
    }
}

fn widened(mark: impl Into<f64>) -> f64 {
    mark.into()
}

fn average<T: Element>(buffer: Buffer<T>, group: &ProcessGroup) -> Work<Buffer<T>> {
    group.all_reduce_async(buffer, ReduceOp::Avg)
}

/// Memory that is being averaged.
#[derive(Debug)]
pub(super) enum Travelling {
    F32(Work<Buffer<f32>>),
    F64(Work<Buffer<f64>>),
    F16(Work<Buffer<f16>>),
    Bf16(Work<Buffer<bf16>>),
    Narrowed { values: Vec<f32>, wire: Work<Buffer<bf16>> },
}

impl Travelling {
    /// The averages, and when they were complete.
    pub(super) fn wait(self) -> Result<(Memory, Instant)> {
        fn end<T: Element>(
            work: Work<Buffer<T>>,
            memory: impl FnOnce(Buffer<T>) -> Memory,
        ) -> Result<(Memory, Instant)> {
            let (buffer, at) = driving::wait_and_tell(work)?;
            Ok((memory(buffer), at))
        }
        match self {
            Travelling::F32(work) => end(work, Memory::F32),
            Travelling::F64(work) => end(work, Memory::F64),
            Travelling::F16(work) => end(work, Memory::F16),
            Travelling::Bf16(work) => end(work, Memory::Bf16),
            Travelling::Narrowed { mut values, wire } => end(wire, |wire| {
                widen(&mut values[..], (&wire[..]).into());
                Memory::Narrowed { values, wire }
            }),
        }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = with_elements!(self, elements => size_of_val(&elements[..]));
        write!(f, "Memory({bytes} bytes)")
    }
}
