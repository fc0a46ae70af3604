//! How long the calls of one handle wait.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use super::interface::DEFAULT_TIMEOUT;

/// The time-out of a handle, which several threads may use. A clone begins with the same time and goes its own
/// way.
#[derive(Debug)]
pub(super) struct Timeout(Mutex<Duration>);

impl Timeout {
    pub(super) fn get(&self) -> Duration {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set(&self, timeout: Duration) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = timeout;
    }
}

impl Default for Timeout {
    fn default() -> Timeout {
        Timeout(Mutex::new(DEFAULT_TIMEOUT))
    }
}

impl Clone for Timeout {
    fn clone(&self) -> Timeout {
        Timeout(Mutex::new(self.get()))
    }
}
