//! Settings of an engine.

use drumline_group::ReduceOp;

/// How tensors are reduced. Equal on all ranks.
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
    /// What becomes of the tensors of all ranks: [`ReduceOp::Avg`] unless set.
    pub op: ReduceOp,
    /// Tensors shorter than this share a bucket with their neighbours until it holds so many bytes;
    /// longer ones are buckets of their own. A bucket leaves when all of it is there on all ranks;
    /// neighbours that leave at the same time travel as one. 4 MiB unless set.
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
