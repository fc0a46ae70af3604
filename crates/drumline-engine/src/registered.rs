//! Buffers that the ranks of a host can reach without a copy.

use std::{
    fmt,
    ops::{Deref, DerefMut},
};

use drumline_shm::{Arena, Registered};

use crate::{Element, Error, Result};

/// A buffer in memory that the ranks of a host share.
///
/// A collective on the buffer, or on a part of it, works directly in the buffers of all ranks. It needs no
/// staging slots and passes over memory once. Either all ranks of a group pass a registered buffer to a call,
/// or none does. In other respects the buffer is a slice like any other. In a group that shares no memory it is
/// ordinary memory.
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

impl<T: Element> RegisteredBuffer<T> {
    /// `len` zeros in the arena, or in ordinary memory without an arena.
    ///
    /// # Errors
    ///
    /// [`Memory`](drumline_error::ErrorKind::Memory) when the arena has no room.
    pub fn allocate(arena: Option<&Arena>, len: usize) -> Result<RegisteredBuffer<T>> {
        let memory = match arena {
            Some(arena) => Memory::Shared(arena.allocate(len).map_err(Error::memory)?),
            None => Memory::Private(vec![T::zeroed(); len]),
        };
        Ok(RegisteredBuffer(memory))
    }

    /// `len` zeros in ordinary memory, which no other rank reaches.
    pub fn private(len: usize) -> RegisteredBuffer<T> {
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
