use std::fmt;

use crate::Place;

/// What can go wrong with a device.
///
/// ```
/// use drumline_device::{Error, Place};
///
/// let place = Place { address: 0x10, bytes: 8 };
/// let error = Error::Place { place, problem: "it is memory of the host".to_owned() };
/// assert_eq!(error.to_string(), "8 bytes at 0x10 cannot be used on this device: it is memory of the host");
/// ```
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no library of the driver on this machine, or it is not complete.
    #[error("found no {library}: install it, or name its file; tried\n  {}", tried.join("\n  "))]
    NotFound {
        /// What was looked for.
        library: &'static str,
        /// What was tried, and why each attempt failed.
        tried: Vec<String>,
    },
    /// A call of the driver failed.
    #[error("{device}: {call} failed: {name} ({code}): {text}")]
    Driver {
        /// The device.
        device: String,
        /// The function of the driver.
        call: &'static str,
        /// The driver's number for the error.
        code: i32,
        /// The driver's name for the error.
        name: String,
        /// The driver's explanation.
        text: String,
    },
    /// These bytes are no memory of this device.
    #[error("{place} cannot be used on this device: {problem}")]
    Place {
        /// The bytes.
        place: Place,
        /// Why not.
        problem: String,
    },
    /// A stream that records a graph cannot be used: what is queued there runs later, or often.
    #[error("the stream is being captured into a graph: queue the call outside of the capture")]
    Capture,
    /// Another thread has aborted what this call was for.
    #[error("{device}: the communicator was aborted: make a new one")]
    Aborted {
        /// The device.
        device: String,
    },
    /// The machine cannot do this.
    #[error("{device} cannot {what}")]
    Unsupported {
        /// The device.
        device: String,
        /// What it cannot do.
        what: &'static str,
    },
    /// An argument is wrong.
    #[error("{problem}")]
    Argument {
        /// What is wrong with it.
        problem: String,
    },
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call was refused, and the memory that it got.
pub type Refused<T> = Box<(Error, T)>;
