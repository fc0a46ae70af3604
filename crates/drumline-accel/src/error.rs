use std::fmt;
use std::sync::Arc;

use drumline_error::{Cause, ErrorKind, Section, in_section};
use drumline_group::Rank;

/// Why a call on a device failed.
///
/// ```
/// use drumline_accel::Error;
///
/// let problem = "the output overlaps the input".to_owned();
/// let error = Error::Argument { operation: "all_to_all", problem };
/// assert_eq!(error.to_string(), "all_to_all: the output overlaps the input (drumline explain argument)");
/// ```
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument is wrong. No other rank has heard of the call.
    #[error("{}", in_section(Section::Argument, &format!("{operation}: {problem}")))]
    Argument {
        /// The call.
        operation: &'static str,
        /// What is wrong, and what would be right.
        problem: String,
    },
    /// The device of this rank, or its driver, does not do what it should.
    #[error("{}", in_section(Section::Device, &format!("{operation}: {error}")))]
    Device {
        /// The call.
        operation: &'static str,
        /// What the device says.
        error: drumline_device::Error,
    },
    /// The group of ranks has failed: the error names the rank at fault.
    #[error(transparent)]
    Group(#[from] drumline_group::Error),
    /// Ranks differ in what must be the same for all.
    #[error("{}", in_section(Section::Mismatch, &format!(
        "{operation}: rank {peer} has {theirs}, this rank has {ours}; they must be the same on all ranks"
    )))]
    Differs {
        /// The call.
        operation: &'static str,
        /// A rank that differs.
        peer: Rank,
        /// What it has.
        theirs: String,
        /// What this rank has.
        ours: String,
    },
    /// An earlier call has failed, and with it the group of this device.
    #[error("{attempted} did not happen, because an earlier call on this device has failed: {by}")]
    Poisoned {
        /// The call that was attempted.
        attempted: &'static str,
        /// The first failure.
        by: Arc<Error>,
    },
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The end of an engine of `drumline-train` that works on a device.
impl From<Error> for drumline_error::Error {
    fn from(error: Error) -> drumline_error::Error {
        let kind = match &error {
            Error::Argument { .. } => ErrorKind::Argument,
            Error::Device { .. } => ErrorKind::Device,
            Error::Differs { .. } => ErrorKind::Mismatch,
            Error::Poisoned { .. } => ErrorKind::Poisoned,
            Error::Group(error) => return error.clone().into(),
        };
        let told = drumline_error::Error::quoting(kind, Section::Device, &error)
            .blaming(error.culprit())
            .because(error.cause().cloned());
        match error {
            Error::Poisoned { by, .. } => {
                told.of_origin(drumline_error::Error::from(Arc::unwrap_or_clone(by)).origin())
            }
            _ => told,
        }
    }
}

/// Results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// The rank at fault, where the error of the group of ranks names one: that a rank has died, for example. That is its
    /// number in the whole job. A failure of this rank's own device, and a wrong argument, name none.
    pub fn culprit(&self) -> Option<Rank> {
        match self {
            Error::Group(error) => error.culprit(),
            Error::Differs { peer, .. } => Some(*peer),
            Error::Poisoned { by, .. } => by.culprit(),
            Error::Argument { .. } | Error::Device { .. } => None,
        }
    }

    /// Why the group of ranks has failed, if it is why.
    pub fn cause(&self) -> Option<&Cause> {
        match self {
            Error::Group(drumline_group::Error::Collective(by))
            | Error::Group(drumline_group::Error::Poisoned { by, .. }) => Some(&by.cause),
            Error::Poisoned { by, .. } => by.cause(),
            _ => None,
        }
    }

    /// For `map_err`: what a device says of a call.
    pub(crate) fn of(operation: &'static str) -> impl Fn(drumline_device::Error) -> Error {
        move |error| Error::Device { operation, error }
    }
}

#[cfg(test)]
mod tests {
    use drumline_device as device;
    use drumline_error::ErrorOrigin;

    use super::*;

    #[test]
    fn a_poisoned_group_has_the_origin_of_its_first_failure() {
        let origin = |by: Error| {
            let poisoned = Error::Poisoned { attempted: "barrier", by: Arc::new(by) };
            drumline_error::Error::from(poisoned).origin()
        };
        let problem = "no memory".to_owned();
        assert_eq!(origin(Error::Argument { operation: "barrier", problem }), ErrorOrigin::User);
        let lost = device::Error::NotFound { library: "driver", tried: Vec::new() };
        assert_eq!(origin(Error::of("barrier")(lost)), ErrorOrigin::Surroundings);
    }
}
