//! Memory of the host that a device reaches.

use std::fmt;
use std::sync::Arc;

use drumline_shm::{PeerWindow, Registered};

/// Memory of this process that the driver has pinned. When it is dropped, it is unpinned, and then freed.
pub struct Pinned {
    // In this order: the driver lets go of pages before they get another use.
    guard: Box<dyn Send + Sync>,
    memory: Memory,
}

enum Memory {
    Registered(Registered<u8>),
    Drivers(Box<dyn DriverMemory>),
}

/// Memory that a driver has allocated.
pub trait DriverMemory: AsRef<[u8]> + AsMut<[u8]> + Send + Sync {}

impl<M: AsRef<[u8]> + AsMut<[u8]> + Send + Sync> DriverMemory for M {}

impl Pinned {
    /// A registered buffer that a driver has pinned, until `guard` is dropped.
    pub fn in_place(memory: Registered<u8>, guard: impl Send + Sync + 'static) -> Pinned {
        Pinned { guard: Box::new(guard), memory: Memory::Registered(memory) }
    }

    /// Memory of the driver's own.
    pub fn of_driver(memory: impl DriverMemory + 'static) -> Pinned {
        Pinned { guard: Box::new(()), memory: Memory::Drivers(Box::new(memory)) }
    }

    /// Whether neighbours can reach it: it is a registered buffer.
    pub fn is_registered(&self) -> bool {
        matches!(self.memory, Memory::Registered(_))
    }

    /// Unpins it, and gives the registered buffer back.
    pub fn unpin(self) -> Option<Registered<u8>> {
        let Pinned { guard, memory } = self;
        drop(guard);
        match memory {
            Memory::Registered(memory) => Some(memory),
            Memory::Drivers(_) => None,
        }
    }
}

impl AsRef<[u8]> for Pinned {
    fn as_ref(&self) -> &[u8] {
        match &self.memory {
            Memory::Registered(memory) => memory,
            Memory::Drivers(memory) => (**memory).as_ref(),
        }
    }
}

impl AsMut<[u8]> for Pinned {
    fn as_mut(&mut self) -> &mut [u8] {
        match &mut self.memory {
            Memory::Registered(memory) => memory,
            Memory::Drivers(memory) => (**memory).as_mut(),
        }
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinned")
            .field("bytes", &self.as_ref().len())
            .field("is_registered", &self.is_registered())
            .finish()
    }
}

/// Memory of a neighbour that the driver has pinned for this process, until the last clone is dropped.
#[derive(Clone)]
pub struct PinnedWindow {
    // In this order: see `Pinned`.
    _guard: Arc<dyn Send + Sync>,
    window: PeerWindow,
}

impl PinnedWindow {
    /// A window that a driver has pinned, until `guard` is dropped.
    pub fn new(window: PeerWindow, guard: impl Send + Sync + 'static) -> PinnedWindow {
        PinnedWindow { _guard: Arc::new(guard), window }
    }

    /// The memory.
    pub fn window(&self) -> &PeerWindow {
        &self.window
    }
}

impl fmt::Debug for PinnedWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedWindow").field("window", &self.window).finish()
    }
}
