//! Handles of threads that a forked process must not use.

use std::{
    mem,
    thread::{self, JoinHandle},
};

use rustix::process::{Pid, getpid};

/// A thread of this process.
///
/// A forked process inherits the handle but not the thread, and the next thread that it starts may get the memory of
/// the one that it lacks. Joining or dropping the inherited handle would join or detach that other thread. So a forked
/// process forgets it.
#[derive(Debug)]
pub struct OwnThread<T> {
    process: Pid,
    /// Empty once the thread is joined.
    handle: Option<JoinHandle<T>>,
}

impl<T> OwnThread<T> {
    /// The thread of `handle`. This process has started it.
    pub fn new(handle: JoinHandle<T>) -> Self {
        OwnThread { process: getpid(), handle: Some(handle) }
    }

    /// Whether the thread is one of this process. In a fork it is not.
    pub fn is_here(&self) -> bool {
        self.process == getpid()
    }

    /// Waits until the thread has ended. `None` in a fork.
    pub fn join(mut self) -> Option<thread::Result<T>> {
        let handle = if self.is_here() { self.handle.take() } else { None };
        handle.map(JoinHandle::join)
    }
}

impl<T> Drop for OwnThread<T> {
    /// The thread goes on.
    fn drop(&mut self) {
        if !self.is_here() {
            mem::forget(self.handle.take());
        }
    }
}
