//! What time it is, if anybody wants to know.

use std::{cell::Cell, time::Instant};

/// The time of one turn. To look at the clock takes as long as a short operation, so it is looked
/// at when the time is first asked for, and not again.
#[derive(Debug)]
pub struct Now(Cell<Option<Instant>>);

impl Now {
    /// The clock has not been looked at.
    pub const fn unread() -> Now {
        Now(Cell::new(None))
    }

    /// It is that time.
    pub const fn at(time: Instant) -> Now {
        Now(Cell::new(Some(time)))
    }

    pub fn get(&self) -> Instant {
        self.known().unwrap_or_else(|| {
            let now = Instant::now();
            self.0.set(Some(now));
            now
        })
    }

    /// The time, if the clock has been looked at.
    pub fn known(&self) -> Option<Instant> {
        self.0.get()
    }
}
