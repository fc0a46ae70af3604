//! An operation in the background, as Python sees it.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use drumline::{Element, Error, Result};
use pyo3::prelude::*;

use crate::{
    error::raise,
    memory::Buffer,
    signals::{LOOK_EVERY, on_main_thread},
    tellers::Promise,
};

/// What an operation gives back, to be brought to its place.
pub(crate) trait Ended: Send + 'static {
    /// Also tells which rank has sent it, where that was open.
    fn settle(self) -> Option<usize>;
}

impl<T: Element> Ended for Buffer<T> {
    fn settle(mut self) -> Option<usize> {
        self.deal_out();
        None
    }
}

impl<T: Element> Ended for Vec<Buffer<T>> {
    fn settle(self) -> Option<usize> {
        None
    }
}

impl<T: Element> Ended for (Buffer<T>, usize) {
    fn settle(mut self) -> Option<usize> {
        self.0.deal_out();
        Some(self.1)
    }
}

/// Of a barrier.
impl Ended for Vec<u8> {
    fn settle(self) -> Option<usize> {
        None
    }
}

/// An operation that is under way.
///
/// `wait` returns when it has ended; `then` calls a function when it has.
#[pyclass(frozen, module = "drumline._core")]
pub(crate) struct Work(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    progress: Progress,
    /// Whom to tell.
    callbacks: Vec<Py<PyAny>>,
}

enum Progress {
    /// Nobody waits for it.
    UnderWay(Box<dyn Pending>),
    /// Somebody waits for it, or is told of its end.
    Taken,
    Ended(Outcome),
}

/// The rank of which a message came, where that was open.
type Outcome = Result<Option<usize>>;

/// A [`drumline::Work`] of any type.
trait Pending: Send {
    fn is_completed(&self) -> bool;
    fn wait_timeout(self: Box<Self>, limit: Duration) -> Result<Outcome, Box<dyn Pending>>;
    fn on_complete(self: Box<Self>, tell: Box<dyn FnOnce(Outcome) + Send>) -> Result<()>;
}

impl<B: Ended> Pending for drumline::Work<B> {
    fn is_completed(&self) -> bool {
        drumline::Work::is_completed(self)
    }

    fn wait_timeout(self: Box<Self>, limit: Duration) -> Result<Outcome, Box<dyn Pending>> {
        match drumline::Work::wait_timeout(*self, limit) {
            Ok(result) => Ok(result.map(Ended::settle)),
            Err(goes_on) => Err(Box::new(goes_on)),
        }
    }

    fn on_complete(self: Box<Self>, tell: Box<dyn FnOnce(Outcome) + Send>) -> Result<()> {
        drumline::Work::on_complete(*self, |result| tell(result.map(Ended::settle)))
    }
}

impl Work {
    pub(crate) fn of<B: Ended>(work: drumline::Work<B>) -> Work {
        let progress = Progress::UnderWay(Box::new(work));
        let state = Mutex::new(State { progress, callbacks: Vec::new() });
        Work(Arc::new(Shared { state, changed: Condvar::new() }))
    }
}

#[pymethods]
impl Work {
    /// Waits for the end, at most for so many seconds. Whether it has ended; raises its error.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let limit = timeout.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        let look_every = if on_main_thread() { LOOK_EVERY } else { FOR_LONG };
        loop {
            let until = Instant::now() + look_every;
            let until = deadline.map_or(until, |deadline| deadline.min(until));
            if let Some(outcome) = py.detach(|| self.0.wait_until(until)) {
                return outcome.map(|_| true).map_err(raise);
            }
            py.check_signals()?;
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(false);
            }
        }
    }

    /// Whether the operation has ended, well or not.
    fn is_completed(&self) -> bool {
        match &self.0.lock().progress {
            Progress::UnderWay(pending) => pending.is_completed(),
            Progress::Taken => false,
            Progress::Ended(_) => true,
        }
    }

    /// The error of an operation that has ended with one.
    fn error(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        let outcome = self.ended()?;
        outcome.err().map(|error| raise(error).into_value(py).into_any())
    }

    /// The rank that has sent what a receive from any rank has got.
    fn source(&self) -> Option<usize> {
        self.ended()?.ok()?
    }

    /// Calls `callback` with the exception, or None, when the operation has ended: on a thread for
    /// callbacks, or at once.
    fn then(&self, py: Python<'_>, callback: Py<PyAny>) -> PyResult<()> {
        let mut state = self.0.lock();
        match std::mem::replace(&mut state.progress, Progress::Taken) {
            Progress::Ended(outcome) => {
                state.progress = Progress::Ended(outcome.clone());
                drop(state);
                tell(py, vec![callback], &outcome);
                Ok(())
            }
            Progress::Taken => {
                state.callbacks.push(callback);
                Ok(())
            }
            Progress::UnderWay(pending) => {
                state.callbacks.push(callback);
                drop(state);
                // If it has ended, the thread of callbacks may want the interpreter already.
                py.detach(|| self.0.tell_at_the_end(pending));
                Ok(())
            }
        }
    }
}

impl Work {
    /// How it has ended, if it has.
    fn ended(&self) -> Option<Outcome> {
        if !self.is_completed() {
            return None;
        }
        self.0.wait_until(Instant::now())
    }
}

/// As good as for ever.
const FOR_LONG: Duration = Duration::from_secs(24 * 3600);

impl Shared {
    /// Waits until the operation has ended, without the interpreter's lock.
    fn wait_until(self: &Arc<Self>, until: Instant) -> Option<Outcome> {
        let mut state = self.lock();
        loop {
            match std::mem::replace(&mut state.progress, Progress::Taken) {
                Progress::Ended(outcome) => {
                    state.progress = Progress::Ended(outcome.clone());
                    return Some(outcome);
                }
                Progress::UnderWay(pending) => {
                    drop(state);
                    match pending.wait_timeout(until.saturating_duration_since(Instant::now())) {
                        Ok(outcome) => {
                            self.end(outcome.clone());
                            return Some(outcome);
                        }
                        Err(goes_on) => {
                            self.give_back(goes_on);
                            return None;
                        }
                    }
                }
                Progress::Taken => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return None;
                    }
                    let waited = self.changed.wait_timeout(state, left);
                    state = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        }
    }

    /// Nobody waits for it any more; others may want to, and some may want to be told.
    fn give_back(self: &Arc<Self>, pending: Box<dyn Pending>) {
        let mut state = self.lock();
        if state.callbacks.is_empty() {
            state.progress = Progress::UnderWay(pending);
            drop(state);
            return self.changed.notify_all();
        }
        drop(state);
        self.tell_at_the_end(pending);
    }

    fn tell_at_the_end(self: &Arc<Self>, pending: Box<dyn Pending>) {
        let (shared, promise) = (self.clone(), Promise::new());
        let tell = move |outcome| promise.keep(move || shared.end(outcome));
        if let Err(error) = pending.on_complete(Box::new(tell)) {
            self.end(Err(error));
        }
    }

    fn end(&self, outcome: Outcome) {
        let mut state = self.lock();
        let callbacks = std::mem::take(&mut state.callbacks);
        state.progress = Progress::Ended(outcome.clone());
        drop(state);
        self.changed.notify_all();
        if !callbacks.is_empty() {
            // At the end of the interpreter there is nobody left to tell.
            Python::try_attach(|py| tell(py, callbacks, &outcome));
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn tell(py: Python<'_>, callbacks: Vec<Py<PyAny>>, outcome: &Outcome) {
    let error = outcome.as_ref().err().map(|error: &Error| raise(error.clone()).into_value(py));
    for callback in callbacks {
        if let Err(raised) = callback.call1(py, (error.as_ref().map(|it| it.clone_ref(py)),)) {
            raised.write_unraisable(py, Some(callback.bind(py)));
        }
    }
}
