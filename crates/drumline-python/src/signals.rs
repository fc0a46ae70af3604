//! Handles Ctrl-C while a call waits. Python's own signal handler only sets a flag. The main thread must
//! check the flag to run the program's handlers.

use std::{cell::RefCell, sync::mpsc, thread, time::Duration};

use drumline::interruptible;
use pyo3::{exceptions::PyOSError, prelude::*};

use crate::error::{Raise, raise};

thread_local! {
    /// The exception that a signal handler raised while a call was waiting.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// The time between two checks for signals, in a wait that signals do not interrupt.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Whether this is the main thread, the only one that runs Python's signal handlers.
pub(crate) fn on_main_thread() -> bool {
    rustix::thread::gettid() == rustix::process::getpid()
}

/// Runs a blocking call of a group without the interpreter's lock. If a signal handler raises meanwhile
/// (Ctrl-C), this aborts the group and raises the handler's exception.
pub(crate) fn run<R: Send, E: Raise + Send>(
    py: Python<'_>,
    call: impl FnOnce() -> Result<R, E> + Send,
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

/// Runs pending signal handlers and keeps the exception that they raise in [`RAISED`]. Returns whether one
/// has raised.
fn signal_raised() -> bool {
    let raised = Python::try_attach(|py| py.check_signals().err()).flatten();
    let is_raised = raised.is_some();
    if is_raised {
        RAISED.set(raised);
    }
    is_raised
}

/// Runs `call`, which signals do not interrupt, without the interpreter's lock. If a signal handler
/// raises meanwhile, this raises the handler's exception, and `call` runs to its end in the background.
pub(crate) fn run_beside<R: Send + 'static, E: Raise + Send + 'static>(
    py: Python<'_>,
    call: impl FnOnce() -> Result<R, E> + Send + 'static,
) -> PyResult<R> {
    if !on_main_thread() {
        return py.detach(call).map_err(raise);
    }
    let (sender, mut result) = mpsc::sync_channel(1);
    thread::Builder::new().name("drumline-call".to_owned()).spawn(move || {
        // The caller may have stopped waiting.
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
