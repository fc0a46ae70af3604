//! The memory of a bucket.

use std::{fmt, ops::Range};

use super::super::{Bucket, ParameterSpec};
use crate::{DType, Element, ProcessGroup, ReduceOp, Result};

/// Borrowed elements of a gradient, row-major.
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

    pub(super) fn fits(self, spec: &ParameterSpec) -> bool {
        let (dtype, elements) = match self {
            Values::F32(values) => (DType::F32, values.len()),
            Values::F64(values) => (DType::F64, values.len()),
        };
        dtype == spec.dtype && elements == spec.elements()
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

/// The elements of a bucket, and one more: the fault flag.
pub(super) enum Memory {
    F32(Vec<f32>),
    F64(Vec<f64>),
}

impl Memory {
    pub(super) fn new(bucket: &Bucket, parameters: &[ParameterSpec]) -> Self {
        let elements: usize = bucket.parameters.iter().map(|&p| parameters[p].elements()).sum();
        match bucket.dtype {
            DType::F64 => Memory::F64(vec![0.0; elements + 1]),
            _ => Memory::F32(vec![0.0; elements + 1]),
        }
    }

    pub(super) fn write(&mut self, range: Range<usize>, values: Values<'_>) {
        match (self, values) {
            (Memory::F32(memory), Values::F32(values)) => memory[range].copy_from_slice(values),
            (Memory::F64(memory), Values::F64(values)) => memory[range].copy_from_slice(values),
            _ => debug_assert!(false, "`fits` compared the dtypes"),
        }
    }

    pub(super) fn zero(&mut self, range: Range<usize>) {
        match self {
            Memory::F32(memory) => memory[range].fill(0.0),
            Memory::F64(memory) => memory[range].fill(0.0),
        }
    }

    pub(super) fn read(&self, range: Range<usize>) -> Values<'_> {
        match self {
            Memory::F32(memory) => Values::F32(&memory[range]),
            Memory::F64(memory) => Values::F64(&memory[range]),
        }
    }

    pub(super) fn set_flag(&mut self, fault: bool) {
        let last = self.elements();
        match self {
            Memory::F32(memory) => memory[last] = f32::from(u8::from(fault)),
            Memory::F64(memory) => memory[last] = f64::from(u8::from(fault)),
        }
    }

    /// Before the all-reduce: this rank has faults. After it: some rank has.
    pub(super) fn flag(&self) -> bool {
        let last = self.elements();
        match self {
            Memory::F32(memory) => memory[last] != 0.0,
            Memory::F64(memory) => memory[last] != 0.0,
        }
    }

    pub(super) fn all_reduce(&mut self, group: &ProcessGroup) -> Result<()> {
        match self {
            Memory::F32(memory) => group.all_reduce(memory, ReduceOp::Avg),
            Memory::F64(memory) => group.all_reduce(memory, ReduceOp::Avg),
        }
    }

    /// Without the flag.
    fn elements(&self) -> usize {
        match self {
            Memory::F32(memory) => memory.len() - 1,
            Memory::F64(memory) => memory.len() - 1,
        }
    }

    pub(super) fn gradient_bytes(&self) -> usize {
        match self {
            Memory::F32(_) => self.elements() * DType::F32.size(),
            Memory::F64(_) => self.elements() * DType::F64.size(),
        }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({} bytes)", self.gradient_bytes())
    }
}
