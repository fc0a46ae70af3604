//! Errors of the core as Python exceptions.

use drumline::{Cause, Error};
use pyo3::{
    PyErr, create_exception,
    exceptions::{PyOSError, PyRuntimeError, PyValueError},
};

create_exception!(drumline, DrumlineError, PyRuntimeError, "Base of the errors of drumline.");
create_exception!(
    drumline,
    CollectiveError,
    DrumlineError,
    "An operation failed. The text names the group, this rank, the operation, the rank at fault \
     and the next step. The group is poisoned: every later call repeats the error."
);
create_exception!(
    drumline,
    CollectiveTimeoutError,
    CollectiveError,
    "An operation took longer than its time limit; the text names the ranks that did not answer."
);
create_exception!(
    drumline,
    CollectiveMismatchError,
    CollectiveError,
    "Ranks called different operations; the text has both calls."
);
create_exception!(
    drumline,
    ConnectError,
    DrumlineError,
    "The ranks of a group could not be connected with each other."
);
create_exception!(drumline, StoreError, DrumlineError, "A store answered wrongly or went away.");
create_exception!(
    drumline,
    StoreTimeoutError,
    StoreError,
    "Keys did not appear in a store in time; the text names them."
);

/// The exception for an error of the core.
pub(crate) fn raise(error: Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::InvalidArgument { .. }
        | Error::InvalidSetting { .. }
        | Error::NotAMember { .. }
        | Error::Object { .. } => PyValueError::new_err(text),
        Error::Store { .. } => StoreError::new_err(text),
        Error::StoreTimeout { .. } => StoreTimeoutError::new_err(text),
        Error::Connect { .. } => ConnectError::new_err(text),
        Error::Collective(error) if matches!(error.cause, Cause::Timeout { .. }) => {
            CollectiveTimeoutError::new_err(text)
        }
        Error::Collective(error) if matches!(error.cause, Cause::Mismatch { .. }) => {
            CollectiveMismatchError::new_err(text)
        }
        Error::Collective(_) | Error::Poisoned { .. } => CollectiveError::new_err(text),
        Error::Io { .. } => PyOSError::new_err(text),
        _ => DrumlineError::new_err(text),
    }
}
