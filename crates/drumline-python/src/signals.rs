//! Handles Ctrl-C while a call waits. Python's own signal handler only sets a flag. The main thread must
//! check the flag to run the program's handlers. These may call any group, so no lock is held meanwhile.

use std::{
    cell::{Cell, RefCell},
    sync::{Mutex, MutexGuard, PoisonError, mpsc},
    thread::{self, ThreadId},
    time::Duration,
};

use drumline::{backend::interruptible, driving};
use pyo3::{
    exceptions::{PyException, PyOSError},
    prelude::*,
};

use crate::error::raise;

thread_local! {
    /// The exception that a signal handler raised while a call was waiting.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
    /// Whether a handler wants the call that it interrupts to be aborted.
    static ABORTS: Cell<bool> = const { Cell::new(false) };
}

/// The time between two checks for signals, in a wait that signals do not interrupt.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Whether this is the main thread, the only one that runs Python's signal handlers.
pub(crate) fn on_main_thread() -> bool {
    rustix::thread::gettid() == rustix::process::getpid()
}

/// Runs a blocking call of a group without the interpreter's lock. If a signal handler raises meanwhile
/// (Ctrl-C), this aborts the group and raises the handler's exception.
pub(crate) fn run<R: Send, E: Into<drumline::Error> + Send>(
    py: Python<'_>,
    call: impl FnOnce() -> Result<R, E> + Send,
) -> PyResult<R> {
    run_raising(py, call, raise)
}

/// [`run`], for a call with errors of its own.
pub(crate) fn run_raising<R: Send, E: Send>(
    py: Python<'_>,
    call: impl FnOnce() -> Result<R, E> + Send,
    raise: impl FnOnce(E) -> PyErr,
) -> PyResult<R> {
    if !on_main_thread() {
        return py.detach(call).map_err(raise);
    }
    // A handler that interrupts another call may make this one.
    let of_outer_call = RAISED.take();
    let result = py.detach(|| interruptible(signal_raised, call));
    match RAISED.replace(of_outer_call) {
        Some(raised) => Err(raised),
        None => result.map_err(raise),
    }
}

/// Runs the handlers of signals that have come.
pub(crate) fn check(py: Python<'_>) -> PyResult<()> {
    driving::handling(|| py.check_signals())
}

/// Runs pending signal handlers and keeps the exception that they raise in [`RAISED`]. Returns whether one
/// has raised, or wants the call to be aborted.
fn signal_raised() -> bool {
    let aborts_outer = ABORTS.replace(false);
    let raised = Python::try_attach(|py| py.check_signals().err()).flatten();
    let aborts = ABORTS.replace(aborts_outer);
    let is_raised = raised.is_some();
    if is_raised {
        RAISED.set(raised);
    }
    is_raised || aborts
}

/// The text of an exception. One that ends the program (Ctrl-C, `sys.exit` in a handler) is raised when the call has
/// ended.
pub(crate) fn text_of(py: Python<'_>, raised: PyErr) -> String {
    let text = raised.to_string();
    if !raised.is_instance_of::<PyException>(py) {
        RAISED.set(Some(raised));
    }
    text
}

/// What one thread at a time uses in calls that may take long. `None` once it has gone.
pub(crate) struct Exclusive<T> {
    value: Mutex<Option<T>>,
    user: Mutex<Option<ThreadId>>,
}

impl<T> Exclusive<T> {
    pub(crate) fn new(value: T) -> Exclusive<T> {
        Exclusive { value: Mutex::new(Some(value)), user: Mutex::default() }
    }

    /// Uses the value, after other threads. `None`: this thread is in a handler that interrupts its own use.
    /// Release the interpreter's lock before this, because the other thread may wait for that lock.
    pub(crate) fn with<R>(&self, call: impl FnOnce(&mut Option<T>) -> R) -> Option<R> {
        let this = Some(thread::current().id());
        if *lock(&self.user) == this {
            return None;
        }
        let mut value = lock(&self.value);
        *lock(&self.user) = this;
        let _end = End(&self.user);
        Some(call(&mut value))
    }

    /// [`Exclusive::with`], which aborts the use that a handler interrupts.
    pub(crate) fn with_or_abort<R>(&self, call: impl FnOnce(&mut Option<T>) -> R) -> Option<R> {
        let result = self.with(call);
        ABORTS.set(ABORTS.get() || result.is_none());
        result
    }
}

struct End<'a>(&'a Mutex<Option<ThreadId>>);

impl Drop for End<'_> {
    fn drop(&mut self) {
        *lock(self.0) = None;
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `call`, which signals do not interrupt, without the interpreter's lock. If a signal handler
/// raises meanwhile, this raises the handler's exception, and `call` runs to its end in the background.
pub(crate) fn run_beside<R: Send + 'static, E: Into<drumline::Error> + Send + 'static>(
    py: Python<'_>,
    call: impl FnOnce() -> Result<R, E> + Send + 'static,
) -> PyResult<R> {
    if !on_main_thread() {
        return py.detach(call).map_err(raise);
    }
    let (sender, mut result) = mpsc::sync_channel(1);
    let caller = driving::Caller::this();
    thread::Builder::new().name("drumline-call".to_owned()).spawn(move || {
        // The caller may have stopped waiting.
        let _ = sender.send(caller.act(call));
    })?;
    loop {
        let waited;
        (waited, result) = py.detach(move || (result.recv_timeout(LOOK_EVERY), result));
        match waited {
            Ok(result) => return result.map_err(raise),
            Err(mpsc::RecvTimeoutError::Timeout) => check(py)?,
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(PyOSError::new_err("the call has panicked; its message is on stderr"));
            }
        }
    }
}
