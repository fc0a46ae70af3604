//! Work of a device, in order.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::{Event, Flight, Gate, Pinned, PinnedWindow, Place, Refused, Result};

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
