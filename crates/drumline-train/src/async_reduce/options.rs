//! The settings of an engine.

use drumline_group::ReduceOp;

/// How tensors are reduced. The same on all ranks.
///
/// ```
/// use drumline::{ReduceOp, async_reduce::AsyncReduceOptions};
///
/// let options = AsyncReduceOptions::default().op(ReduceOp::Sum).bucket_bytes(1 << 20);
/// assert_eq!(options.bucket_bytes, 1 << 20);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AsyncReduceOptions {
    /// The operator: [`ReduceOp::Avg`] unless set.
    pub op: ReduceOp,
    /// The size of a bucket in bytes; 4 MiB unless set. Tensors shorter than this share a bucket with their
    /// neighbours until it is full. A longer tensor is a bucket of its own. A bucket is reduced when all
    /// ranks have brought all of its tensors. Adjacent buckets that become ready together are reduced in one
    /// call.
    pub bucket_bytes: usize,
}

impl Default for AsyncReduceOptions {
    fn default() -> Self {
        Self { op: ReduceOp::Avg, bucket_bytes: 4 << 20 }
    }
}

impl AsyncReduceOptions {
    /// Sets [`AsyncReduceOptions::op`].
    #[must_use]
    pub fn op(mut self, op: ReduceOp) -> Self {
        self.op = op;
        self
    }

    /// Sets [`AsyncReduceOptions::bucket_bytes`].
    #[must_use]
    pub fn bucket_bytes(mut self, bytes: usize) -> Self {
        self.bucket_bytes = bytes;
        self
    }
}
