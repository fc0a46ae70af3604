//! Threads that run callbacks of Python's.
//!
//! A callback may wait for an operation whose own callbacks must then run: so whenever all threads
//! are taken, there is one more. They are kept for the next callbacks.
//!
//! A thread that wants the interpreter when that has ended is ended with it, wherever it stands, and
//! in the midst of C++ that ends the whole process. So the interpreter's end waits for callbacks.

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

type Job = Box<dyn FnOnce() + Send>;

struct Tellers {
    /// Whose threads they are: a fork has none but the one that forked.
    process: Option<Pid>,
    idle: Vec<Sender<Job>>,
    /// How many [`Promise`]s there are.
    promises: usize,
}

static TELLERS: Mutex<Tellers> =
    Mutex::new(Tellers { process: None, idle: Vec::new(), promises: 0 });
static ALL_TOLD: Condvar = Condvar::new();

fn tellers() -> MutexGuard<'static, Tellers> {
    let mut tellers = TELLERS.lock().unwrap_or_else(PoisonError::into_inner);
    let process = Some(getpid());
    if tellers.process != process {
        *tellers = Tellers { process, idle: Vec::new(), promises: 0 };
    }
    tellers
}

/// That somebody will be told of an end. Dropped when they have been.
pub(crate) struct Promise(());

impl Promise {
    pub(crate) fn new() -> Promise {
        tellers().promises += 1;
        Promise(())
    }

    /// Runs `job` on a thread that does nothing else.
    pub(crate) fn keep(self, job: impl FnOnce() + Send + 'static) {
        run(Box::new(move || {
            job();
            drop(self);
        }));
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        let mut tellers = tellers();
        // One of the process that this one was forked from is not counted here.
        tellers.promises = tellers.promises.saturating_sub(1);
        if tellers.promises == 0 {
            ALL_TOLD.notify_all();
        }
    }
}

/// Waits until all who are to be told have been, at most for so many seconds. Whether they have.
#[pyfunction]
pub(crate) fn wait_for_callbacks(py: Python<'_>, limit: f64) -> PyResult<bool> {
    let limit: Duration = duration("limit", limit)?;
    Ok(py.detach(|| {
        let waited = ALL_TOLD.wait_timeout_while(tellers(), limit, |it| it.promises > 0);
        waited.unwrap_or_else(PoisonError::into_inner).0.promises == 0
    }))
}

fn run(mut job: Job) {
    let free = tellers().idle.pop();
    if let Some(thread) = free {
        match thread.send(job) {
            Ok(()) => return,
            Err(SendError(not_taken)) => job = not_taken,
        }
    }
    let (sender, jobs) = channel::<Job>();
    let again = sender.clone();
    let started = thread::Builder::new().name("drumline-python".to_owned()).spawn(move || {
        while let Ok(job) = jobs.recv() {
            job();
            tellers().idle.push(again.clone());
        }
    });
    // Without a thread, here: late or stuck is better than never.
    match started {
        Ok(_) => drop(sender.send(job)),
        Err(_) => job(),
    }
}
