//! What a group has called before.

use std::collections::VecDeque;

use drumline_schedule::step::Rank;

use super::message::Description;
use crate::error::Cause;

/// The last calls of a group, to explain messages that come too late.
#[derive(Debug, Default)]
pub(crate) struct History(VecDeque<Description>);

impl History {
    const CALLS_MAX: usize = 64;

    pub(crate) fn push(&mut self, description: Description) {
        if self.0.len() == History::CALLS_MAX {
            self.0.pop_front();
        }
        self.0.push_back(description);
    }

    /// `peer` is still in `theirs`, a call that this rank has completed without it.
    pub(crate) fn compare(&self, peer: Rank, theirs: Description) -> Result<(), Cause> {
        match self.find(theirs.sequence()) {
            Some(ours) if ours != theirs => Err(Cause::mismatch(peer, theirs, Some(ours))),
            _ => Ok(()),
        }
    }

    /// Why `peer` sent a message of `theirs`, a call that this rank has completed without it.
    pub(crate) fn explain(&self, peer: Rank, theirs: Description) -> Cause {
        Cause::mismatch(peer, theirs, self.find(theirs.sequence()))
    }

    /// The call of that number, if it is not too long ago.
    pub(crate) fn find(&self, sequence: u64) -> Option<Description> {
        self.0.iter().find(|ours| ours.sequence() == sequence).copied()
    }
}
