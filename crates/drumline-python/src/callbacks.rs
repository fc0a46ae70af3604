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
    time::Duration,
};

use pyo3::prelude::*;
use rustix::process::{Pid, getpid};

use crate::config::duration;

type Callback = Box<dyn FnOnce() + Send>;

struct Threads {
    /// The process of the threads. A fork has only the thread that forked.
    process: Option<Pid>,
    idle: Vec<Sender<Callback>>,
    /// The number of [`Promise`]s that are not kept yet.
    promises: usize,
}

static THREADS: Mutex<Threads> =
    Mutex::new(Threads { process: None, idle: Vec::new(), promises: 0 });
static ALL_KEPT: Condvar = Condvar::new();

fn threads() -> MutexGuard<'static, Threads> {
    let mut threads = THREADS.lock().unwrap_or_else(PoisonError::into_inner);
    let process = Some(getpid());
    if threads.process != process {
        *threads = Threads { process, idle: Vec::new(), promises: 0 };
    }
    threads
}

/// A promise that callbacks will run. It is dropped after they have run.
pub(crate) struct Promise(());

impl Promise {
    pub(crate) fn new() -> Promise {
        threads().promises += 1;
        Promise(())
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
        let mut threads = threads();
        // A promise made before a fork is not counted in the child.
        threads.promises = threads.promises.saturating_sub(1);
        if threads.promises == 0 {
            ALL_KEPT.notify_all();
        }
    }
}

/// Waits until all callbacks have run, at most `limit` seconds. Returns whether they have.
#[pyfunction]
pub(crate) fn wait_for_callbacks(py: Python<'_>, limit: f64) -> PyResult<bool> {
    let limit: Duration = duration("limit", limit)?;
    Ok(py.detach(|| {
        let waited = ALL_KEPT.wait_timeout_while(threads(), limit, |it| it.promises > 0);
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
    // Without a thread, on this one: a callback that is late is better than one that never runs.
    match started {
        Ok(_) => drop(sender.send(callback)),
        Err(_) => callback(),
    }
}
