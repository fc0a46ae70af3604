//! How hosts and streams wait for each other.

use std::any::Any;
use std::fmt;

use crate::Result;

/// A point in a stream.
pub trait Event: fmt::Debug + Send + Sync {
    /// Whether the stream has come there. Does not wait.
    ///
    /// # Errors
    ///
    /// What the driver says: also why the device has failed.
    fn has_come(&self) -> Result<bool>;

    /// Waits until the stream has come there.
    ///
    /// # Errors
    ///
    /// As for [`Event::has_come`].
    fn wait(&self) -> Result<()>;

    /// For the driver that made it.
    fn as_any(&self) -> &dyn Any;
}

/// Where streams wait until the host says that they may go on. It opens once.
pub trait Gate: fmt::Debug + Send + Sync {
    /// Lets all streams pass, from now on.
    fn open(&self);

    /// For the driver that made it.
    fn as_any(&self) -> &dyn Any;
}
