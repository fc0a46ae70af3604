//! Barriers: all ranks meet, and no data moves.

use std::time::Duration;

use drumline_schedule::Collective;

use super::{Ask, ProcessGroup};
use crate::{Begun, Error, Result};

impl ProcessGroup {
    /// Returns when every rank has called it.
    ///
    /// # Errors
    ///
    /// As for [`ProcessGroup::all_reduce`].
    pub fn barrier(&self) -> Result<()> {
        self.run::<u8>(Ask::of::<u8>(Collective::Barrier), &mut [], &[])
    }

    /// [`ProcessGroup::barrier`] in the background.
    ///
    /// # Errors
    ///
    /// None: there is no argument. The [`Work`](crate::Work) has the errors of [`ProcessGroup::barrier`].
    pub fn barrier_async(&self) -> Begun<Vec<u8>> {
        self.submit::<u8, _, _>(Ask::of::<u8>(Collective::Barrier), Vec::new(), [])
    }

    /// A [`barrier`](ProcessGroup::barrier) with a time limit of its own. When the time is over, it names
    /// every missing rank, on every rank.
    ///
    /// Every rank hears from every other rank, so each of them can tell which ranks are missing. Where ranks
    /// share no memory, this takes more messages than a plain barrier.
    ///
    /// # Errors
    ///
    /// [`Collective`](crate::ErrorKind::Collective) with all missing ranks when the time limit has passed. Then the
    /// group is poisoned, as after any other failure. A rank that comes late gets this error from its call, or, if it
    /// comes at the last moment, from its next call. A rank that has died is named at once.
    /// [`Argument`](crate::ErrorKind::Argument) for a time limit of zero.
    pub fn monitored_barrier(&self, timeout: Duration) -> Result<()> {
        if timeout.is_zero() {
            return Err(Error::argument(
                "monitored_barrier",
                "no rank can answer in no time: pass a longer time limit",
            ));
        }
        let ask = Ask::of::<u8>(Collective::MonitoredBarrier).within(timeout);
        self.run::<u8>(ask, &mut [], &[])
    }
}
