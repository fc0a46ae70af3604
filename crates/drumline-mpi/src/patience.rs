//! How a thread waits for MPI.

use std::hint::spin_loop;
use std::thread::{sleep, yield_now};
use std::time::{Duration, Instant};

/// Rations the questions of a thread that waits for MPI: at first it asks at once, then it yields the core to other
/// ranks, and at last it sleeps in between.
///
/// MPI moves data only while it is asked, so a thread must not sleep soon. And where ranks outnumber cores, a thread that
/// never yields keeps the others from answering.
#[derive(Debug, Default)]
pub struct Patience {
    asked: u32,
    yields_since: Option<Instant>,
}

/// So often the thread asks at once.
const SPINS: u32 = 200;
/// So long it then yields.
const YIELDS: Duration = Duration::from_millis(1);
/// So long it sleeps from then on, each time.
const SLEEP: Duration = Duration::from_micros(50);

impl Patience {
    /// Patience for a wait that begins.
    pub fn new() -> Patience {
        Patience::default()
    }

    /// To be called after each question that was answered with no.
    pub fn pause(&mut self) {
        if self.asked < SPINS {
            self.asked += 1;
            return spin_loop();
        }
        let since = *self.yields_since.get_or_insert_with(Instant::now);
        if since.elapsed() < YIELDS {
            yield_now();
        } else {
            sleep(SLEEP);
        }
    }

    /// To be called when something has moved.
    pub fn reset(&mut self) {
        *self = Patience::default();
    }
}
