//! How a thread waits for NCCL.

use std::thread::{sleep, yield_now};
use std::time::Duration;

/// Rations the questions of a thread that waits: at first it yields in between, then it sleeps.
#[derive(Debug, Default)]
pub(crate) struct Patience {
    asked: u32,
}

/// So often it asks at once.
const YIELDS: u32 = 200;
/// So long it sleeps from then on, each time.
const SLEEP: Duration = Duration::from_micros(50);

impl Patience {
    /// To be called after each question that was answered with no.
    pub(crate) fn pause(&mut self) {
        if self.asked < YIELDS {
            self.asked += 1;
            yield_now();
        } else {
            sleep(SLEEP);
        }
    }
}
