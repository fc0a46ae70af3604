use drumline_kernels::{DType, Element};

use crate::{Error, Result};

/// A tensor without a framework: a name, a type, a shape, and bytes (dense, row-major,
/// little-endian).
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    name: String,
    dtype: DType,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Tensor {
    /// Puts a tensor together.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] when there are not exactly as many bytes as type and shape say.
    pub fn new(
        name: impl Into<String>,
        dtype: DType,
        shape: impl Into<Vec<usize>>,
        bytes: Vec<u8>,
    ) -> Result<Self> {
        let (name, shape) = (name.into(), shape.into());
        if byte_length(dtype, &shape) != Some(bytes.len()) {
            return Err(Error::InvalidArgument {
                operation: "Tensor::new",
                problem: format!("{name}: {} bytes do not fill {dtype} {shape:?}", bytes.len()),
            });
        }
        Ok(Self { name, dtype, shape, bytes })
    }

    /// Copies a tensor from its elements.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] when there are not exactly as many as the shape says.
    pub fn from_values<T: Element>(
        name: impl Into<String>,
        shape: impl Into<Vec<usize>>,
        values: &[T],
    ) -> Result<Self> {
        Self::new(name, T::DTYPE, shape, bytemuck::cast_slice(values).to_vec())
    }

    /// Unique in a checkpoint: `conv1.weight`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The length of each dimension; empty for a scalar.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The elements as bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Copies the elements out.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] when they are of another type.
    pub fn values<T: Element>(&self) -> Result<Vec<T>> {
        if T::DTYPE != self.dtype {
            return Err(Error::InvalidArgument {
                operation: "Tensor::values",
                problem: format!("{} holds {}, not {}", self.name, self.dtype, T::DTYPE),
            });
        }
        Ok(self.bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect())
    }
}

/// Bytes of a dense tensor; None if they cannot be counted.
pub(super) fn byte_length(dtype: DType, shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(dtype.size(), |product, &length| product.checked_mul(length))
}
