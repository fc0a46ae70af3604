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

use rustix::process::{Pid, getpid};

type Job = Box<dyn FnOnce() + Send>;

/// Those that wait, and the process whose they are: a fork has no threads but the one that forked.
static IDLE: Mutex<(Option<Pid>, Vec<Sender<Job>>)> = Mutex::new((None, Vec::new()));

fn idle() -> MutexGuard<'static, (Option<Pid>, Vec<Sender<Job>>)> {
    let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
    let process = Some(getpid());
    if idle.0 != process {
        *idle = (process, Vec::new());
    }
    idle
}

/// Runs `job` on a thread that does nothing else.
pub(crate) fn run(job: impl FnOnce() + Send + 'static) {
    let mut job: Job = Box::new(job);
    let free = idle().1.pop();
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
            idle().1.push(sender.clone());
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
