//! The calls that a group made before.

use drumline_schedule::step::Rank;

use super::message::Description;
use crate::error::Cause;

/// The last calls of a group, to explain messages that come too late. Each call is kept in a place that
/// follows from its number.
#[derive(Debug)]
pub struct History([Description; History::CALLS]);

impl Default for History {
    fn default() -> History {
        History([Description::NONE; History::CALLS])
    }
}

impl History {
    const CALLS: usize = 64;

    pub(crate) fn push(&mut self, description: Description) {
        self.0[History::place(description.sequence())] = description;
    }

    fn place(sequence: u64) -> usize {
        (sequence % History::CALLS as u64) as usize
    }

    /// `peer` is still in the call `theirs`, which this rank has completed without it: an error if this rank
    /// made a different call.
    pub fn compare(&self, peer: Rank, theirs: Description) -> Result<(), Cause> {
        match self.find(theirs.sequence()) {
            Some(ours) if ours != theirs => Err(Cause::mismatch(peer, theirs, Some(ours))),
            _ => Ok(()),
        }
    }

    /// Why `peer` sent a message of `theirs`, a call that this rank has completed without it.
    pub fn explain(&self, peer: Rank, theirs: Description) -> Cause {
        Cause::mismatch(peer, theirs, self.find(theirs.sequence()))
    }

    /// The call with that number, if this rank still keeps it.
    pub fn find(&self, sequence: u64) -> Option<Description> {
        let kept = self.0[History::place(sequence)];
        (kept != Description::NONE && kept.sequence() == sequence).then_some(kept)
    }
}
