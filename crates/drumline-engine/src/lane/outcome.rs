//! One outcome for all: a rank whose part of a call is done looks whether another rank has given the call up.

use std::time::{Duration, Instant};

use drumline_schedule::{Collective, step::Rank};

use super::state::Lane;
use crate::{
    error::{Cause, Reason},
    executor::{Now, Progress},
    operation::Operation,
};

/// The least time between two looks at the peers of calls over links. A look is a system call, and some short calls
/// would make no other.
const LOOK_EVERY: Duration = Duration::from_millis(1);

impl Lane {
    /// The part of this rank in the running collective is done. Fails if a peer has given the call up: so a rank that
    /// comes late does not succeed alone.
    #[inline]
    pub(super) fn may_succeed(
        &mut self,
        operation: &Operation<'_>,
        now: &Now,
    ) -> Result<Progress, Box<Cause>> {
        let call = self.sequence - 1;
        let neighbour = self.host.as_ref().and_then(|host| host.failed(call));
        if neighbour.is_none() && !self.machine.uses_messages() {
            return Ok(Progress::Done);
        }
        // A guard has an end of its own: a peer may leave as soon as it has heard all.
        match operation.stands_for_another() {
            false => self.hear_failures(neighbour, now.fresh()),
            true => Ok(Progress::Done),
        }
    }

    #[inline(never)]
    fn hear_failures(
        &mut self,
        neighbour: Option<Rank>,
        now: Instant,
    ) -> Result<Progress, Box<Cause>> {
        let has_looked = self.peers_looked_at.is_some_and(|at| now < at + LOOK_EVERY);
        if has_looked && neighbour.is_none() {
            return Ok(Progress::Done);
        }
        self.peers_looked_at = Some(now);
        self.look(now);
        if let Some(rank) = neighbour.filter(|rank| self.transport.left(*rank).is_none()) {
            // It says why at once. If it dies before, its connection ends.
            return match self.transport.lost(rank) {
                Some(cause) => Err(Box::new(cause)),
                None if now >= self.machine.deadline(now) => {
                    Err(Box::new(Cause::Timeout { waiting_for: vec![rank] }))
                }
                None => Ok(Progress::Stuck),
            };
        }
        let others = (0..self.member.world_size).filter(|rank| *rank != self.member.rank);
        let mut told = others.filter_map(|rank| self.transport.lost(rank));
        // A peer that has ended, or has failed for another reason, may have completed this call before.
        match told.find(|cause| cause.reason() == Reason::Timeout) {
            Some(cause) => Err(Box::new(cause)),
            None => Ok(Progress::Done),
        }
    }

    /// Gives the running collective up. Returns whether other ranks may complete it all the same.
    ///
    /// In shared memory none can while a post is missing that all of them need: the rank that owes it sees then that
    /// this rank has failed. Over links, a rank may have all that it needs before it hears of the failure.
    pub(super) fn give_up(&self, collective: Collective) -> bool {
        let Some(host) = &self.host else { return true };
        host.fail(self.sequence - 1);
        let goes_on_alone = matches!(collective, Collective::Reduce | Collective::Gather);
        self.machine.uses_messages() || goes_on_alone || !host.is_owed(&self.machine)
    }
}
