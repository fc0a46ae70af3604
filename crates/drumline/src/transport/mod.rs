//! What carries a group's messages.

pub(crate) mod mesh;
pub(crate) mod tcp;
mod wire;

use std::time::Instant;

use drumline_schedule::step::{Loc, Rank};

use crate::{
    error::{Cause, CollectiveError},
    executor::{Header, History, Machine, Memory},
};

/// Carries the messages of one group, in order between any two ranks.
///
/// Nothing here blocks but [`Transport::wait`]. Payloads are read from and written to the
/// operation's memory when bytes actually move; a transport keeps no copy.
pub(crate) trait Transport: Send + std::fmt::Debug {
    /// An operation begins: reports what has arrived since the last one ended.
    fn begin(&mut self, machine: &mut Machine<'_>) -> Result<(), Cause>;

    /// Posts a message.
    fn send(&mut self, to: Rank, header: Header, src: Loc);

    /// Names the place for the next message from `from` that has none yet.
    fn receive(&mut self, from: Rank, dst: Loc);

    /// Moves what can be moved now and tells `machine`; whether anything moved.
    fn progress(
        &mut self,
        machine: &mut Machine<'_>,
        memory: &mut dyn Memory,
    ) -> Result<bool, Cause>;

    /// Sleeps until something can be moved, at most until `deadline`.
    fn wait(&mut self, deadline: Instant);

    /// Tells all peers that the group is broken, and why. What was in flight is lost.
    fn abort(&mut self, failure: &CollectiveError);

    /// Tells all peers that this rank leaves in good order, without waiting for anyone.
    fn take_leave(&mut self);

    /// Takes leave and waits, at most until `deadline`, until all peers have done so too. A
    /// message that was never taken is an error: its sender made another call.
    fn close(&mut self, deadline: Instant, history: &History) -> Result<(), Cause>;
}
