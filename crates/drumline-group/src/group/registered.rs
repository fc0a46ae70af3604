//! Buffers that the ranks of a host can reach without a copy.

pub use drumline_engine::registered::RegisteredBuffer;
use drumline_shm::Arena;

use super::ProcessGroup;
use crate::{Element, Result};

impl ProcessGroup {
    /// A buffer of `len` zeros that collectives of this group reach without a copy, if all ranks pass
    /// such buffers: for the results of `all_reduce`, `reduce`, `broadcast`, `all_gather`,
    /// `all_to_all` and scans, and as inputs of `reduce_scatter` and `gather`, among the ranks of one host; for
    /// `all_reduce` among several, too. `scatter`, and short calls, are copied through slots as from
    /// ordinary memory; so is an input that is multiplied before it is summed.
    ///
    /// It may outlive the group. It comes from this rank's part of the shared memory, whose size
    /// is [`Config::registered_bytes_max`](crate::Config::registered_bytes_max).
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// use drumline::{ProcessGroup, ReduceOp, RegisteredBuffer};
    ///
    /// let group = ProcessGroup::alone();
    /// let mut sums: RegisteredBuffer<f32> = group.alloc_registered(1000)?;
    /// sums[7] = 1.5;
    /// group.all_reduce(&mut sums, ReduceOp::Sum)?;
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Memory`](crate::Error::Memory) says how much was asked for and how much there is.
    pub fn alloc_registered<T: Element>(&self, len: usize) -> Result<RegisteredBuffer<T>> {
        Ok(RegisteredBuffer::allocate(self.arena(), len)?)
    }

    /// This rank's part of the memory that ranks of its host share, if they do.
    pub(crate) fn arena(&self) -> Option<&Arena> {
        self.inner.arena.as_ref()
    }
}
