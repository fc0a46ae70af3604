//! The end of a group: all ranks say goodbye.

use std::{sync::atomic::Ordering, time::Instant};

use super::{
    patience::lead,
    state::{Closing, Lane, State},
};
use crate::{Cause, Result, transport::Lack};

impl Lane {
    /// Says goodbye to the peers. Then call [`Lane::closed`] until it returns true.
    pub fn close(&mut self) -> Result<()> {
        self.check_open(|| "destroy")?;
        self.transport.take_leave(self.member.seen());
        Ok(())
    }

    /// The lane will be dropped without a goodbye.
    pub fn forsake(&mut self) {
        self.without_goodbye = true;
    }

    /// Whether all ranks have left, after [`Lane::close`] at `started`.
    pub fn closed(&mut self, started: Instant, now: Instant) -> Result<bool> {
        if let State::Failed(by) = &self.state {
            // Another thread has broken it off.
            return Err(by.poisoned("destroy"));
        }
        let lead = lead(self.settings.timeout, &self.settings);
        let give_up_at = started + self.settings.timeout;
        let new = Closing { give_up_at, lead, has_looked: false };
        let closing = self.closing.get_or_insert(new);
        if now >= closing.give_up_at && !closing.has_looked {
            closing.give_up_at = now + lead;
        }
        closing.has_looked |= now + lead >= closing.give_up_at;
        let expired = now >= closing.give_up_at;
        let cause = match self.transport.still_present(self.machine.history()) {
            Ok(present) if present.is_empty() => {
                let (flags, history) = self.machine.flags_mut();
                let left_over =
                    self.host.as_ref().map_or(Ok(()), |host| host.left_over(flags, history));
                match left_over {
                    Ok(()) => {
                        self.state = State::Left;
                        return Ok(true);
                    }
                    Err(cause) => cause,
                }
            }
            Ok(_) if self.aborted.load(Ordering::SeqCst) => Cause::Aborted,
            Ok(waiting_for) if expired => {
                self.trace(Cause::Timeout { waiting_for }, Lack::Call, now)
            }
            Ok(_) => return Ok(false),
            Err(cause) => cause,
        };
        let elapsed = now.saturating_duration_since(started);
        Err(self.fail("destroy".to_owned(), self.sequence, elapsed, cause))
    }
}
