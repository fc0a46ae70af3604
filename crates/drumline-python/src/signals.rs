//! Ctrl-C while a call waits. Python's own signal handler only leaves a note, which the main thread
//! must look at.

use std::{cell::RefCell, sync::mpsc, thread, time::Duration};

use drumline::interruptible;
use pyo3::{exceptions::PyOSError, prelude::*};

use crate::error::raise;

thread_local! {
    /// What a signal handler has raised while a call was waiting.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// How often a wait that knows nothing of signals is interrupted for them.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Only this thread runs signal handlers.
pub(crate) fn on_main_thread() -> bool {
    rustix::thread::gettid() == rustix::process::getpid()
}

/// Runs a blocking call of a group without the interpreter's lock. If a signal handler raises
/// meanwhile (Ctrl-C), the group is broken off and that is what is raised.
pub(crate) fn run<R: Send>(
    py: Python<'_>,
    call: impl FnOnce() -> drumline::Result<R> + Send,
) -> PyResult<R> {
    if !on_main_thread() {
        return py.detach(call).map_err(raise);
    }
    let result = py.detach(|| interruptible(signal_raised, call));
    match RAISED.take() {
        Some(raised) => Err(raised),
        None => result.map_err(raise),
    }
}

/// Whether a signal handler has raised.
fn signal_raised() -> bool {
    let raised = Python::try_attach(|py| py.check_signals().err()).flatten();
    let is_raised = raised.is_some();
    if is_raised {
        RAISED.set(raised);
    }
    is_raised
}

/// Runs `call`, which knows nothing of signals, without the interpreter's lock. If a signal handler
/// raises meanwhile, that is raised, and `call` goes on in the background to its own end.
pub(crate) fn run_beside<R: Send + 'static>(
    py: Python<'_>,
    call: impl FnOnce() -> drumline::Result<R> + Send + 'static,
) -> PyResult<R> {
    if !on_main_thread() {
        return py.detach(call).map_err(raise);
    }
    let (sender, mut result) = mpsc::sync_channel(1);
    thread::Builder::new().name("drumline-call".to_owned()).spawn(move || {
        // Nobody may be there any more.
        let _ = sender.send(call());
    })?;
    loop {
        let waited;
        (waited, result) = py.detach(move || (result.recv_timeout(LOOK_EVERY), result));
        match waited {
            Ok(result) => return result.map_err(raise),
            Err(mpsc::RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(PyOSError::new_err("the call has panicked; its message is on stderr"));
            }
        }
    }
}
