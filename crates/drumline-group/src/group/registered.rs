//! Buffers that the ranks of a host can reach without a copy.

pub use drumline_engine::registered::RegisteredBuffer;
use drumline_shm::Arena;

use super::ProcessGroup;
use crate::{Element, Result};

impl ProcessGroup {
    /// A buffer of `len` zeros in memory that the ranks of this host share. Collectives work in such buffers
    /// without copies, if all ranks pass one.
    ///
    /// Without copies are the results of `all_reduce`, `reduce`, `broadcast`, `all_gather`, and
    /// `all_to_all`, and the inputs of `reduce_scatter` and `gather`, where all ranks are on one host; `all_reduce`
    /// also on several hosts. `scatter`, short calls, and an input that is multiplied before it is summed are
    /// copied through slots, as from ordinary memory.
    ///
    /// The buffer may outlive the group. It lies in this rank's arena, which holds
    /// [`Config::registered_bytes_max`](crate::Config::registered_bytes_max) bytes.
    ///
    /// # Errors
    ///
    /// [`Memory`](crate::ErrorKind::Memory) says how much the caller asked for and how much there is.
    pub fn alloc_registered<T: Element>(&self, len: usize) -> Result<RegisteredBuffer<T>> {
        RegisteredBuffer::allocate(self.arena(), len)
    }

    /// The arena of this rank, if ranks of its host share memory.
    pub(crate) fn arena(&self) -> Option<&Arena> {
        self.inner.arena.as_ref()
    }
}
