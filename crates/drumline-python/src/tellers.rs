//! Threads that run callbacks of Python's.
//!
//! A callback may wait for an operation whose own callbacks must then run: so whenever all threads
//! are taken, there is one more. They are kept for the next callbacks.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{SendError, Sender, channel},
    },
    thread,
};

type Job = Box<dyn FnOnce() + Send>;

static IDLE: Mutex<Vec<Sender<Job>>> = Mutex::new(Vec::new());

fn idle() -> MutexGuard<'static, Vec<Sender<Job>>> {
    IDLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `job` on a thread that does nothing else.
pub(crate) fn run(job: impl FnOnce() + Send + 'static) {
    let mut job: Job = Box::new(job);
    let free = idle().pop();
    if let Some(thread) = free {
        match thread.send(job) {
            Ok(()) => return,
            Err(SendError(not_taken)) => job = not_taken,
        }
    }
    let first = Arc::new(Mutex::new(Some(job)));
    let take = {
        let first = first.clone();
        move || first.lock().unwrap_or_else(PoisonError::into_inner).take()
    };
    let (sender, jobs) = channel::<Job>();
    let theirs = take.clone();
    let started = thread::Builder::new().name("drumline-python".to_owned()).spawn(move || {
        if let Some(job) = theirs() {
            job();
        }
        loop {
            idle().push(sender.clone());
            match jobs.recv() {
                Ok(job) => job(),
                Err(_) => return,
            }
        }
    });
    // Without a thread, here: late or stuck is better than never.
    if started.is_err()
        && let Some(job) = take()
    {
        job();
    }
}
