//! Threads that run callbacks of Python code.
//!
//! A callback may wait for a call whose own callbacks must run first. So when all threads are busy,
//! another one is started. Threads are kept for later callbacks.
//!
//! Python ends a thread that asks for the interpreter's lock after the interpreter has ended. If that
//! thread is inside C++ code, the whole process crashes. So the interpreter's end waits for callbacks.

use std::{
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        mpsc::{SendError, Sender, channel},
    },
    thread,
};

use drumline::{PerProcess, deadline};
use pyo3::prelude::*;
use rustix::process::{Pid, getpid};

use crate::config::patience;

type Callback = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Callbacks {
    threads: Mutex<Threads>,
    all_kept: Condvar,
}

#[derive(Default)]
struct Threads {
    idle: Vec<Sender<Callback>>,
    /// The number of [`Promise`]s that are not kept yet.
    promises: usize,
}

static CALLBACKS: PerProcess<Callbacks> = PerProcess::new();

fn callbacks() -> &'static Callbacks {
    CALLBACKS.get(Callbacks::default)
}

fn threads() -> MutexGuard<'static, Threads> {
    callbacks().threads.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A promise of this process to run callbacks. It is dropped after they have run.
pub(crate) struct Promise(Pid);

impl Promise {
    pub(crate) fn new() -> Promise {
        threads().promises += 1;
        Promise(getpid())
    }

    /// Runs `callback` on a thread for callbacks.
    pub(crate) fn keep(self, callback: impl FnOnce() + Send + 'static) {
        run(Box::new(move || {
            callback();
            drop(self);
        }));
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        if self.0 != getpid() {
            return; // the parent has made it, and keeps it
        }
        let mut threads = threads();
        threads.promises -= 1;
        if threads.promises == 0 {
            callbacks().all_kept.notify_all();
        }
    }
}

/// Waits until all callbacks have run, at most `limit` seconds. Returns whether they have.
#[pyfunction]
pub(crate) fn wait_for_callbacks(py: Python<'_>, limit: f64) -> PyResult<bool> {
    let limit = deadline::bounded(patience("limit", limit)?);
    Ok(py.detach(|| {
        let all_kept = &callbacks().all_kept;
        let waited = all_kept.wait_timeout_while(threads(), limit, |it| it.promises > 0);
        waited.unwrap_or_else(PoisonError::into_inner).0.promises == 0
    }))
}

fn run(mut callback: Callback) {
    let free = threads().idle.pop();
    if let Some(thread) = free {
        match thread.send(callback) {
            Ok(()) => return,
            Err(SendError(not_taken)) => callback = not_taken,
        }
    }
    let (sender, callbacks) = channel::<Callback>();
    let again = sender.clone();
    let started = thread::Builder::new().name("drumline-python".to_owned()).spawn(move || {
        while let Ok(callback) = callbacks.recv() {
            callback();
            threads().idle.push(again.clone());
        }
    });
    // If no thread could be started, this thread runs the callback: late is better than never.
    match started {
        Ok(_) => drop(sender.send(callback)),
        Err(_) => callback(),
    }
}
