//! Errors of the core as Python exceptions.

use drumline::{Cause, Error, ErrorKind, Reason};
use pyo3::{
    create_exception,
    exceptions::{PyOSError, PyRuntimeError, PyValueError},
    prelude::*,
};

create_exception!(
    drumline,
    DrumlineError,
    PyRuntimeError,
    "Base of the errors of drumline. `culprit` is the rank at fault, by its number in the job; None where no one rank is."
);
create_exception!(
    drumline,
    CollectiveError,
    DrumlineError,
    "A collective failed. The text names the group, this rank, the call, the rank at fault and the \
     next step. `cause` names the kind of failure. \
     The group is poisoned: every later call raises PoisonedError."
);
create_exception!(
    drumline,
    PoisonedError,
    CollectiveError,
    "A call on a group that has failed before. `cause` and `culprit` are those of that failure."
);
create_exception!(
    drumline,
    CollectiveTimeoutError,
    CollectiveError,
    "A call took longer than its time limit. The text names the ranks that did not answer."
);
create_exception!(
    drumline,
    CollectiveMismatchError,
    CollectiveError,
    "Ranks made different calls. The text has both calls."
);
create_exception!(
    drumline,
    NotBroughtError,
    DrumlineError,
    "In a step of an AsyncReduce, some ranks have not brought all tensors. The text names ranks and \
     tensors. The next step may go on."
);
create_exception!(
    drumline,
    ConnectError,
    DrumlineError,
    "The ranks of a group could not be connected with each other. `culprit` is the rank whose process has ended, if \
     that is why."
);
create_exception!(drumline, StoreError, DrumlineError, "A store answered wrongly or went away.");
create_exception!(
    drumline,
    StoreTimeoutError,
    StoreError,
    "Keys did not appear in a store in time. The text names the keys."
);

/// The exception for an error of the core.
pub(crate) fn raise(error: impl Into<Error>) -> PyErr {
    let error = error.into();
    let text = in_python(error.to_string());
    let cause = error.cause().map(kind);
    let exception = match (error.kind(), cause) {
        (
            ErrorKind::Argument | ErrorKind::Setting | ErrorKind::NotAMember | ErrorKind::Object,
            _,
        ) => PyValueError::new_err(text),
        (ErrorKind::Store, _) => StoreError::new_err(text),
        (ErrorKind::StoreTimeout, _) => StoreTimeoutError::new_err(text),
        (ErrorKind::Connect, _) => ConnectError::new_err(text),
        (ErrorKind::Io, _) => PyOSError::new_err(text),
        (ErrorKind::Poisoned, _) => PoisonedError::new_err(text),
        (_, Some(TIMEOUT)) => CollectiveTimeoutError::new_err(text),
        (ErrorKind::Mismatch, _) | (_, Some(MISMATCH)) => CollectiveMismatchError::new_err(text),
        (_, Some(_)) => CollectiveError::new_err(text),
        (ErrorKind::NotBrought, None) => NotBroughtError::new_err(text),
        _ => DrumlineError::new_err(text),
    };
    blaming(exception, cause, error.culprit())
}

/// Sets the attributes `cause` and `culprit`, so that no program has to read the text. The classes have None for both.
fn blaming(error: PyErr, cause: Option<&'static str>, culprit: Option<usize>) -> PyErr {
    let set = |py: Python<'_>| {
        let error = error.value(py);
        cause.map(|cause| error.setattr("cause", cause)).transpose()?;
        culprit.map(|culprit| error.setattr("culprit", culprit)).transpose()
    };
    // Without an interpreter, no code sees the attributes. If setting them fails, that failure is raised.
    match Python::try_attach(set) {
        Some(Err(other)) => other,
        Some(Ok(_)) | None => error,
    }
}

const TIMEOUT: &str = "timeout";
const MISMATCH: &str = "mismatch";

/// The kind of a failure. It is the same on the rank that noticed the failure first and on the ranks that it
/// told, because chance decides which rank notices first.
fn kind(cause: &Cause) -> &'static str {
    match cause.reason() {
        Reason::Timeout => TIMEOUT,
        Reason::Mismatch => MISMATCH,
        _ => cause.name(),
    }
}

/// Names of the Rust API in the core's texts, and the Python names that replace them.
const IN_PYTHON: [(&str, &str); 12] = [
    ("(GroupOptions::name)", "(name=)"),
    ("drop_last(false)", "drop_last=False"),
    ("shuffle(false)", "shuffle=False"),
    ("(in code: host_exposed, bind_exposed)", "(in code: TCPStore(exposed=True))"),
    ("host_exposed in code", "TCPStore(exposed=True) in code"),
    ("`TcpStore`", "`TCPStore`"),
    ("TcpStoreServer::open", "TCPStore"),
    ("DistributedSampler::resume", "load_state_dict"),
    ("`UnusedParameters::Ignore`", "find_unused_parameters=True"),
    ("register_backend adds", "Backend.register_backend adds"),
    ("freeze: ", "AsyncReduce: "),
    // `all_gather` takes uneven blocks, too.
    ("_v: ", ": "),
];

/// The text of an error, without names that only Rust has.
fn in_python(text: String) -> String {
    IN_PYTHON.into_iter().fold(text, |text, (rust, python)| match text.contains(rust) {
        true => text.replace(rust, python),
        false => text,
    })
}
