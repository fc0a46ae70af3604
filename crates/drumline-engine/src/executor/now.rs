//! The time of one turn, read from the clock when it is first needed.

use std::{cell::Cell, time::Instant};

/// The time of one turn of a lane.
///
/// Reading the clock takes as long as a short collective. So the driver of the lane hands in its clock,
/// and the lane reads it only where it needs the time, once a turn.
///
/// A call of 64 KiB or more reads the clock at its beginning. Of shorter calls, one in 64 does, and its time counts
/// for all. The others read the clock only after they have spun without success. Their deadlines count from that
/// moment, some 30 µs late.
#[derive(Debug)]
pub struct Now(Source);

#[derive(Debug)]
enum Source {
    Clock { clock: fn() -> Instant, read: Cell<Option<Instant>> },
    Fixed(Instant),
}

impl Now {
    /// The time of a clock that has not been read.
    pub const fn lazy(clock: fn() -> Instant) -> Now {
        Now(Source::Clock { clock, read: Cell::new(None) })
    }

    /// The time of a clock that is read at once.
    pub fn read(clock: fn() -> Instant) -> Now {
        Now(Source::Clock { clock, read: Cell::new(Some(clock())) })
    }

    /// A fixed time, for a driver whose time does not pass by itself.
    pub const fn at(time: Instant) -> Now {
        Now(Source::Fixed(time))
    }

    /// The time of this turn.
    pub fn get(&self) -> Instant {
        self.known().unwrap_or_else(|| self.look())
    }

    /// The time of this turn, if the clock has been read.
    pub fn known(&self) -> Option<Instant> {
        match &self.0 {
            Source::Clock { read, .. } => read.get(),
            Source::Fixed(time) => Some(*time),
        }
    }

    /// The present time, which may be later than that of the turn. Reads the clock again.
    pub(crate) fn fresh(&self) -> Instant {
        match &self.0 {
            Source::Clock { clock, .. } => clock(),
            Source::Fixed(time) => *time,
        }
    }

    #[cold]
    fn look(&self) -> Instant {
        let time = self.fresh();
        if let Source::Clock { read, .. } = &self.0 {
            read.set(Some(time));
        }
        time
    }
}
