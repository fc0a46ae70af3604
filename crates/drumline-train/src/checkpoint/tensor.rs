use drumline_kernels::{DType, Element};

use crate::{Error, Result};

/// A tensor without a framework: a name, a type, a shape, and bytes (dense, row-major,
/// little-endian).
///
/// ```
/// use drumline::{DType, checkpoint::Tensor};
///
/// let weight = Tensor::from_values("fc.weight", [2, 3], &[0.5_f32; 6])?;
/// assert_eq!((weight.name(), weight.dtype()), ("fc.weight", DType::F32));
/// assert_eq!(weight.shape(), [2, 3]);
/// assert_eq!(weight.bytes().len(), 24);
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    name: String,
    dtype: DType,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Tensor {
    /// A tensor whose elements are `bytes`.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when the number of bytes is not the one that type and shape need.
    pub fn new(
        name: impl Into<String>,
        dtype: DType,
        shape: impl Into<Vec<usize>>,
        bytes: Vec<u8>,
    ) -> Result<Self> {
        let (name, shape) = (name.into(), shape.into());
        if byte_length(dtype, &shape) != Some(bytes.len()) {
            return Err(Error::argument(
                "Tensor::new",
                format!("{name}: {} bytes do not fill {dtype} {shape:?}", bytes.len()),
            ));
        }
        Ok(Self { name, dtype, shape, bytes })
    }

    /// A tensor whose elements are a copy of `values`.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when the number of values is not the one that the shape needs.
    pub fn from_values<T: Element>(
        name: impl Into<String>,
        shape: impl Into<Vec<usize>>,
        values: &[T],
    ) -> Result<Self> {
        Self::new(name, T::DTYPE, shape, bytemuck::cast_slice(values).to_vec())
    }

    /// Keeps 64-bit words, such as the state of a random generator, as elements of type i64.
    ///
    /// If each rank has its own generator (for dropout, say), a checkpoint needs all their states:
    /// collect them with [`all_gather`](drumline_group::ProcessGroup::all_gather), and keep one row
    /// per rank.
    ///
    /// # Errors
    ///
    /// As for [`Tensor::from_values`].
    pub fn from_words(
        name: impl Into<String>,
        shape: impl Into<Vec<usize>>,
        words: &[u64],
    ) -> Result<Self> {
        Self::from_values::<i64>(name, shape, bytemuck::cast_slice(words))
    }

    /// The words of a tensor that [`Tensor::from_words`] made, copied.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when the elements are not i64.
    pub fn words(&self) -> Result<Vec<u64>> {
        Ok(self.values::<i64>()?.into_iter().map(i64::cast_unsigned).collect())
    }

    /// The name, unique in a checkpoint: `conv1.weight`.
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
    /// [`Argument`](crate::ErrorKind::Argument) when the elements are not `T`.
    pub fn values<T: Element>(&self) -> Result<Vec<T>> {
        if T::DTYPE != self.dtype {
            return Err(Error::argument(
                "Tensor::values",
                format!("{} holds {}, not {}", self.name, self.dtype, T::DTYPE),
            ));
        }
        Ok(self.bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect())
    }
}

/// The length of a dense tensor in bytes; `None` on overflow.
pub(super) fn byte_length(dtype: DType, shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(dtype.size(), |product, &length| product.checked_mul(length))
}
