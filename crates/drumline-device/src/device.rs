//! What a device must be able to do.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use drumline_shm::{PeerWindow, Registered};

use crate::fabric::Fabric;
use crate::{Gate, Pinned, PinnedWindow, Place, Refused, Result, Stream};

/// One accelerator, as this process sees it. Any thread may call.
pub trait Device: fmt::Debug + Send + Sync {
    /// What it is.
    fn identity(&self) -> &Identity;

    /// Checks that all bytes are memory of this device that is allocated now.
    ///
    /// # Errors
    ///
    /// [`Error::Place`](crate::Error::Place) says what they are: memory of the host, of another device or context, freed memory, or more
    /// than was allocated.
    fn check(&self, place: Place) -> Result<()>;

    /// A new stream.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`](crate::Error::Driver).
    fn stream(&self) -> Result<Arc<dyn Stream>>;

    /// Has the driver pin a buffer in place, for copies by this device, until it is dropped or detached.
    ///
    /// # Errors
    ///
    /// What the driver says, and the buffer: some drivers and some limits refuse.
    fn pin(&self, memory: Registered<u8>) -> Result<Pinned, Refused<Registered<u8>>>;

    /// Has the driver pin memory of a neighbour, for copies to this device.
    ///
    /// # Errors
    ///
    /// What the driver says.
    fn pin_window(&self, window: PeerWindow) -> Result<PinnedWindow>;

    /// Pinned memory of the driver's own, which no other rank reaches.
    ///
    /// # Errors
    ///
    /// What the driver says.
    fn pinned(&self, bytes: usize) -> Result<Pinned>;

    /// A closed gate, at which streams can wait.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`](crate::Error::Unsupported) where streams cannot wait for memory of the host.
    fn gate(&self) -> Result<Arc<dyn Gate>>;

    /// What joins this device to others: the library that the process has loaded already, or this file, or the first that
    /// is found.
    ///
    /// # Errors
    ///
    /// What was tried, and why nothing serves.
    fn fabric(&self, library: Option<&Path>) -> Result<Arc<dyn Fabric>>;

    /// Memory of the device, to try something.
    ///
    /// # Errors
    ///
    /// What the driver says: mostly that there is not as much.
    fn memory(&self, bytes: usize) -> Result<Box<dyn Memory>>;
}

/// Memory of a device, as long as it is not dropped.
pub trait Memory: fmt::Debug + Send + Sync {
    /// Where it is.
    fn place(&self) -> Place;
}

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The driver: `cuda` or `hip`, or `host` where there is none.
    pub kind: &'static str,
    /// The driver's number in this process.
    pub ordinal: usize,
    /// The driver's name for it.
    pub name: String,
    /// Where it is on the PCI bus.
    pub pci: String,
    /// The same for all processes, and different for all devices.
    pub uuid: [u8; 16],
    /// The node of memory that is nearest to it.
    pub numa_node: Option<usize>,
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{} ({}, {})", self.kind, self.ordinal, self.name, self.pci)
    }
}
