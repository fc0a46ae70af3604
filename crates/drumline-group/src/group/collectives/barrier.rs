//! Barriers: all ranks meet, and no data moves.

use std::time::Duration;

use drumline_schedule::Collective;

use super::{ProcessGroup, call};
use crate::{Begun, Error, Result};

impl ProcessGroup {
    /// Returns when every rank has called it.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use drumline::ProcessGroup;
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// // ... what every rank has to do first ...
    /// group.barrier().unwrap();
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`ProcessGroup::all_reduce`].
    pub fn barrier(&self) -> Result<()> {
        self.run::<u8>(call::<u8>(Collective::Barrier, 0), None, &mut [], &[])
    }

    /// [`ProcessGroup::barrier`] in the background.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// let everybody_is_here = group.barrier_async()?;
    /// // ... compute something else ...
    /// everybody_is_here.wait()?;
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// None: there is no argument. The [`Work`](crate::Work) has the errors of [`ProcessGroup::barrier`].
    pub fn barrier_async(&self) -> Begun<Vec<u8>> {
        self.submit(Ok(call::<u8>(Collective::Barrier, 0)), None, Vec::new(), Vec::new())
    }

    /// A [`barrier`](ProcessGroup::barrier) with a time limit of its own. When the time is over, it names
    /// every missing rank, on every rank.
    ///
    /// Every rank hears from every other rank, so each of them can tell which ranks are missing. Where ranks
    /// share no memory, this takes more messages than a plain barrier.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// use std::time::Duration;
    ///
    /// use drumline::ProcessGroup;
    ///
    /// let groups = ProcessGroup::local_world(3)?;
    /// std::thread::scope(|threads| {
    ///     for group in &groups[..2] {
    ///         threads.spawn(move || {
    ///             // Rank 2 does not come.
    ///             let error = group.monitored_barrier(Duration::from_millis(50)).unwrap_err();
    ///             assert!(error.to_string().contains("rank 2"), "{error}");
    ///         });
    ///     }
    /// });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Collective`] with all missing ranks when the time limit has passed. Then the group is
    /// poisoned, as after any other failure. A rank that comes late gets this error from its call, or, if it
    /// comes at the last moment, from its next call. A rank that has died is named at once.
    /// [`Error::InvalidArgument`] for a time limit of zero.
    pub fn monitored_barrier(&self, timeout: Duration) -> Result<()> {
        if timeout.is_zero() {
            return Err(Error::InvalidArgument {
                operation: "monitored_barrier",
                problem: "no rank can answer in no time: pass a longer time limit".to_owned(),
            });
        }
        let call = call::<u8>(Collective::MonitoredBarrier, 0).within(timeout);
        self.run::<u8>(call, None, &mut [], &[])
    }
}
