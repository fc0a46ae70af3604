//! A call or message in the background, as Python sees it.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use drumline::{Begun, Error, Result, WorkError};
use pyo3::prelude::*;

use crate::{
    callbacks::Promise,
    config::patience,
    error::raise,
    memory::Buffer,
    signals::{self, LOOK_EVERY, on_main_thread},
};

/// What a [`drumline::Work`] returns at its end.
pub(crate) trait Returned: Send + 'static {
    /// Copies the elements to their places. Returns the sender, after a receive from any rank.
    fn settle(self) -> Option<usize>;
}

impl Returned for Buffer {
    fn settle(mut self) -> Option<usize> {
        self.deal_out();
        None
    }
}

impl Returned for (Buffer, usize) {
    fn settle(mut self) -> Option<usize> {
        self.0.deal_out();
        Some(self.1)
    }
}

/// The result of a barrier.
impl Returned for Vec<u8> {
    fn settle(self) -> Option<usize> {
        None
    }
}

/// A call or message in the background.
///
/// `wait` blocks until its end; `then` calls a function at its end.
#[pyclass(frozen, module = "drumline._core")]
pub(crate) struct Work(Arc<Shared>);

struct Shared {
    guarded: Mutex<Guarded>,
    changed: Condvar,
}

struct Guarded {
    progress: Progress,
    /// Functions to call at the end.
    callbacks: Vec<Py<PyAny>>,
}

enum Progress {
    /// Running, and no thread waits for the end.
    UnderWay(Box<dyn Pending>),
    /// Running. A waiting thread has taken the [`Pending`], or the end with its callbacks has.
    Taken,
    Ended(Outcome),
}

/// The sender, after a receive from any rank.
type Outcome = Result<Option<usize>>;

/// A [`drumline::Work`] of any type.
trait Pending: Send {
    fn is_completed(&self) -> bool;
    /// Why this thread cannot wait for the end.
    fn hindrance(&self) -> Option<Error>;
    fn wait_timeout(self: Box<Self>, limit: Duration) -> Result<Outcome, Box<dyn Pending>>;
    fn on_complete(self: Box<Self>, tell: Box<dyn FnOnce(Outcome) + Send>) -> Result<()>;
}

fn outcome<B: Returned>(result: Result<B, WorkError<B>>) -> Outcome {
    Ok(result?.settle())
}

impl<B: Returned> Pending for drumline::Work<B> {
    fn is_completed(&self) -> bool {
        drumline::Work::is_completed(self)
    }

    fn hindrance(&self) -> Option<Error> {
        drumline::driving::hindrance(self)
    }

    fn wait_timeout(self: Box<Self>, limit: Duration) -> Result<Outcome, Box<dyn Pending>> {
        match drumline::Work::wait_timeout(*self, limit) {
            Ok(result) => Ok(outcome(result)),
            Err(goes_on) => Err(Box::new(goes_on)),
        }
    }

    fn on_complete(self: Box<Self>, tell: Box<dyn FnOnce(Outcome) + Send>) -> Result<()> {
        drumline::Work::on_complete(*self, |result| tell(outcome(result)))
    }
}

impl Work {
    /// Raises if the call cannot begin.
    pub(crate) fn of<B: Returned>(begun: Begun<B>) -> PyResult<Work> {
        let work = begun.map_err(|refused| raise(refused.error))?;
        let progress = Progress::UnderWay(Box::new(work));
        let guarded = Mutex::new(Guarded { progress, callbacks: Vec::new() });
        Ok(Work(Arc::new(Shared { guarded, changed: Condvar::new() })))
    }
}

#[pymethods]
impl Work {
    /// Waits for the end, at most `timeout` seconds. Returns whether the end has come; raises the error of
    /// a failure.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let limit = timeout.map(|seconds| patience("timeout", seconds)).transpose()?;
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        let look_every = if on_main_thread() { LOOK_EVERY } else { FOR_LONG };
        loop {
            let until = Instant::now() + look_every;
            let until = deadline.map_or(until, |deadline| deadline.min(until));
            if let Some(outcome) = py.detach(|| self.0.wait_until(until)) {
                return outcome.map(|_| true).map_err(raise);
            }
            signals::check(py)?;
            if deadline.is_none()
                && let Some(error) = py.detach(|| self.0.hindrance())
            {
                return Err(raise(error));
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(false);
            }
        }
    }

    /// Whether the end has come, with or without an error.
    fn is_completed(&self) -> bool {
        match &self.0.lock().progress {
            Progress::UnderWay(pending) => pending.is_completed(),
            Progress::Taken => false,
            Progress::Ended(_) => true,
        }
    }

    /// The error, after a failure.
    fn error(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        let outcome = self.ended()?;
        outcome.err().map(|error| raise(error).into_value(py).into_any())
    }

    /// The sender, after a receive from any rank.
    fn source(&self) -> Option<usize> {
        self.ended()?.ok()?
    }

    /// Calls `callback` at the end, with the exception or None: on a thread for callbacks, or at once if
    /// the end has come already.
    fn then(&self, py: Python<'_>, callback: Py<PyAny>) -> PyResult<()> {
        let mut guarded = self.0.lock();
        match std::mem::replace(&mut guarded.progress, Progress::Taken) {
            Progress::Ended(outcome) => {
                guarded.progress = Progress::Ended(outcome.clone());
                drop(guarded);
                tell(py, vec![callback], &outcome);
                Ok(())
            }
            Progress::Taken => {
                guarded.callbacks.push(callback);
                Ok(())
            }
            Progress::UnderWay(pending) => {
                guarded.callbacks.push(callback);
                drop(guarded);
                // The thread for callbacks may need the interpreter's lock before this returns.
                py.detach(|| self.0.tell_at_the_end(pending));
                Ok(())
            }
        }
    }
}

impl Work {
    /// The outcome, if the end has come.
    fn ended(&self) -> Option<Outcome> {
        if !self.is_completed() {
            return None;
        }
        self.0.wait_until(Instant::now())
    }
}

/// The time between two looks at a condition that only another thread changes.
const FOR_LONG: Duration = Duration::from_secs(24 * 3600);

impl Shared {
    /// Waits for the end, without the interpreter's lock. `None` if `until` comes first.
    fn wait_until(self: &Arc<Self>, until: Instant) -> Option<Outcome> {
        let mut guarded = self.lock();
        loop {
            match std::mem::replace(&mut guarded.progress, Progress::Taken) {
                Progress::Ended(outcome) => {
                    guarded.progress = Progress::Ended(outcome.clone());
                    return Some(outcome);
                }
                Progress::UnderWay(pending) => {
                    drop(guarded);
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
                    let waited = self.changed.wait_timeout(guarded, left);
                    guarded = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        }
    }

    fn hindrance(&self) -> Option<Error> {
        match &self.lock().progress {
            Progress::UnderWay(pending) => pending.hindrance(),
            Progress::Taken | Progress::Ended(_) => None,
        }
    }

    /// Ends this thread's wait before the end. Other threads may wait next; callbacks may have been added.
    fn give_back(self: &Arc<Self>, pending: Box<dyn Pending>) {
        let mut guarded = self.lock();
        if guarded.callbacks.is_empty() {
            guarded.progress = Progress::UnderWay(pending);
            drop(guarded);
            return self.changed.notify_all();
        }
        drop(guarded);
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
        let mut guarded = self.lock();
        let callbacks = std::mem::take(&mut guarded.callbacks);
        guarded.progress = Progress::Ended(outcome.clone());
        drop(guarded);
        self.changed.notify_all();
        if !callbacks.is_empty() {
            // After the end of the interpreter there is nothing to call.
            Python::try_attach(|py| tell(py, callbacks, &outcome));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Guarded> {
        self.guarded.lock().unwrap_or_else(PoisonError::into_inner)
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
