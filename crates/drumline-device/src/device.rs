//! What a device must be able to do.

use std::any::Any;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use drumline_shm::{PeerWindow, Registered};

use crate::fabric::Fabric;
use crate::{Event, Flight, Gate, Pinned, PinnedWindow, Place, Refused, Result};

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

/// Work of a device that is carried out in order. Calls queue it and return.
pub trait Stream: fmt::Debug + Send + Sync {
    /// Queues copies from the device to `memory`. Parts are where they lie there. If `memory` is in flight already,
    /// it stays so until the earlier copies have ended, too.
    ///
    /// # Errors
    ///
    /// What the driver says, and the memory. Copies of a first part may then be under way, and the flight knows it.
    fn copy_out(
        &self,
        parts: &[Part],
        memory: Flight<Pinned>,
    ) -> Result<Flight<Pinned>, Refused<Flight<Pinned>>>;

    /// Queues copies to the device: from `memory`, or from the window of a part that has one.
    ///
    /// # Errors
    ///
    /// As for [`Stream::copy_out`].
    fn copy_in(
        &self,
        parts: &[Part],
        memory: Flight<Pinned>,
    ) -> Result<Flight<Pinned>, Refused<Flight<Pinned>>>;

    /// Queues a copy within the device, of as many bytes as both places have.
    ///
    /// # Errors
    ///
    /// What the driver says; [`Error::Argument`](crate::Error::Argument) when the lengths differ.
    fn copy_within(&self, from: Place, to: Place) -> Result<()>;

    /// An event that comes when all that was queued until now has ended.
    ///
    /// # Errors
    ///
    /// What the driver says.
    fn record(&self) -> Result<Arc<dyn Event>>;

    /// Has what is queued from now on wait for an event of any stream of the same driver.
    ///
    /// # Errors
    ///
    /// What the driver says.
    fn wait(&self, event: &dyn Event) -> Result<()>;

    /// Has what is queued from now on wait until a gate is open.
    ///
    /// # Errors
    ///
    /// What the driver says.
    fn wait_gate(&self, gate: &Arc<dyn Gate>) -> Result<()>;

    /// Whether the stream is recording a graph instead of working.
    ///
    /// # Errors
    ///
    /// What the driver says.
    fn is_capturing(&self) -> Result<bool>;

    /// For the driver that made it.
    fn as_any(&self) -> &dyn Any;
}

/// One of several places that are copied together.
#[derive(Clone, Debug)]
pub struct Part {
    /// On the device.
    pub place: Place,
    /// Where it begins in the memory of the host, in bytes.
    pub at: usize,
    /// The memory of the neighbour from which it is copied in. `None`: the memory that the call got.
    pub window: Option<PinnedWindow>,
}

/// What a device is.
///
/// ```
/// use drumline_device::Identity;
///
/// let identity = Identity {
///     kind: "cuda",
///     ordinal: 1,
///     name: "Example 40".to_owned(),
///     pci: "0000:41:00.0".to_owned(),
///     uuid: [7; 16],
///     numa_node: Some(0),
/// };
/// assert_eq!(identity.to_string(), "cuda:1 (Example 40, 0000:41:00.0)");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The driver: `cuda` or `hip`.
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
