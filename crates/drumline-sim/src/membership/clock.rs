//! The clock of a host. It begins somewhere, and is a little too fast or too slow.

use std::time::Duration;

use fastrand::Rng;

use crate::time::{Nanos, SECOND};

#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    offset: Nanos,
    /// Nanoseconds too many in each million.
    drift: i64,
}

impl Clock {
    pub(super) fn draw(rng: &mut Rng) -> Clock {
        Clock { offset: rng.u64(0..1_000_000) * SECOND, drift: rng.i64(-20_000..=20_000) }
    }

    pub(super) fn shows(&self, now: Nanos) -> Duration {
        let million = 1_000_000_i128;
        let passed = i128::from(now) * (million + i128::from(self.drift)) / million;
        Duration::from_nanos(self.offset + passed as Nanos)
    }

    /// The first moment at which the clock shows this.
    pub(super) fn moment(&self, shown: Duration) -> Nanos {
        let million = 1_000_000_i128;
        let passed = shown.as_nanos() as i128 - i128::from(self.offset);
        let scale = million + i128::from(self.drift);
        let mut now = (passed.max(0) * million / scale) as Nanos;
        while self.shows(now) < shown {
            now += 1;
        }
        now
    }
}
