//! Buffers that the ranks of a host can reach without a copy.

use std::{
    fmt,
    ops::{Deref, DerefMut},
};

use drumline_shm::{Arena, Registered};

use super::ProcessGroup;
use crate::{Element, Error, Result};

/// A buffer in memory that the ranks of a host share.
///
/// A collective on it (or on a part of it) works straight in everybody's buffer, instead of
/// through staging slots: one pass over memory. All ranks of a group must register a buffer for
/// the same call, or none. Apart from that it is a slice like any other. Where a group shares no
/// memory, it is ordinary memory.
///
/// ```
/// use drumline::{ProcessGroup, ReduceOp};
///
/// let group = ProcessGroup::alone();
/// let mut gradients = group.alloc_registered::<f32>(1_000_000)?;
/// gradients.fill(1.0);
/// group.all_reduce(&mut gradients, ReduceOp::Avg)?;
/// assert_eq!(gradients[999_999], 1.0);
/// # Ok::<_, drumline::Error>(())
/// ```
pub struct RegisteredBuffer<T: Element>(Memory<T>);

enum Memory<T: Element> {
    Shared(Registered<T>),
    Private(Vec<T>),
}

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
    /// [`Error::Memory`] says how much was asked for and how much there is.
    pub fn alloc_registered<T: Element>(&self, len: usize) -> Result<RegisteredBuffer<T>> {
        RegisteredBuffer::allocate(self.arena(), len)
    }

    /// This rank's part of the memory that ranks of its host share, if they do.
    pub(crate) fn arena(&self) -> Option<&Arena> {
        self.inner.arena.as_ref()
    }
}

impl<T: Element> RegisteredBuffer<T> {
    /// `len` zeros in the arena, or in ordinary memory where there is none.
    pub(crate) fn allocate(arena: Option<&Arena>, len: usize) -> Result<RegisteredBuffer<T>> {
        let memory = match arena {
            Some(arena) => Memory::Shared(
                arena
                    .allocate(len)
                    .map_err(|error| Error::Memory { problem: error.to_string() })?,
            ),
            None => Memory::Private(vec![T::zeroed(); len]),
        };
        Ok(RegisteredBuffer(memory))
    }
}

impl<T: Element> RegisteredBuffer<T> {
    /// Memory that no other rank reaches.
    pub(crate) fn private(len: usize) -> RegisteredBuffer<T> {
        RegisteredBuffer(Memory::Private(vec![T::zeroed(); len]))
    }
}

impl<T: Element> Deref for RegisteredBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.0 {
            Memory::Shared(buffer) => buffer,
            Memory::Private(buffer) => buffer,
        }
    }
}

impl<T: Element> DerefMut for RegisteredBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.0 {
            Memory::Shared(buffer) => buffer,
            Memory::Private(buffer) => buffer,
        }
    }
}

impl<T: Element> AsRef<[T]> for RegisteredBuffer<T> {
    fn as_ref(&self) -> &[T] {
        self
    }
}

impl<T: Element> AsMut<[T]> for RegisteredBuffer<T> {
    fn as_mut(&mut self) -> &mut [T] {
        self
    }
}

impl<T: Element> fmt::Debug for RegisteredBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.0 {
            Memory::Shared(_) => "shared",
            Memory::Private(_) => "private",
        };
        f.debug_tuple("RegisteredBuffer").field(&kind).finish()
    }
}
