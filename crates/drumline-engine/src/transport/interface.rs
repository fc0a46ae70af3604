//! What a lane asks of the transport of its group.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use drumline_schedule::step::Rank;

use super::{
    points::{Ended, Point},
    waits::Waits,
};
use crate::{
    error::{Cause, CollectiveError},
    executor::{Header, History, Machine, Memory, Stretch},
};

/// Carries the messages of one group, in order between any two ranks.
///
/// Nothing here blocks but [`Transport::wait`]. Payloads are read from and written to the
/// operation's memory when bytes actually move; a transport keeps no copy.
pub trait Transport: Send + std::fmt::Debug {
    /// An operation begins: reports what has arrived since the last one ended.
    fn begin(&mut self, machine: &mut Machine) -> Result<(), Cause>;

    /// Posts a message.
    fn send(&mut self, to: Rank, header: Header, src: Stretch);

    /// Names the place for the next message from `from` that has none yet.
    fn receive(&mut self, from: Rank, dst: Stretch);

    /// Moves what can be moved at time `now` and tells `machine`; whether anything moved.
    fn progress(
        &mut self,
        machine: &mut Machine,
        memory: &mut dyn Memory,
        now: Instant,
    ) -> Result<bool, Cause>;

    /// Tells all peers that the group is broken, and why. What was in flight is lost.
    fn abort(&mut self, failure: &CollectiveError);

    /// Tells all peers that this rank leaves in good order, without waiting for anyone.
    fn take_leave(&mut self);

    /// After [`Transport::take_leave`]: the peers that have not done so yet. When there are none,
    /// a message that was never taken is an error: its sender made another call.
    fn still_present(&mut self, history: &History) -> Result<Vec<Rank>, Cause>;

    /// Sleeps until something can be moved, at most until `until`; it is `now`. Waking early
    /// does no harm. When it is `until` already, only takes in what has happened.
    fn wait(&mut self, until: Instant, now: Instant);

    /// Prepares for a sleep that another will do.
    fn arm(&mut self);
}

/// A transport that also carries messages from rank to rank, outside of collectives.
pub trait Connections: Transport {
    /// A send or receive was called. What needs nothing more goes to `ended`.
    fn post(&mut self, point: Point, ended: &mut Vec<Ended>);

    /// Moves messages at time `now`; whether anything moved. `idle` says that no collective runs,
    /// so that nobody else looks after its streams.
    ///
    /// # Errors
    ///
    /// What ends all operations of the group.
    fn progress_points(
        &mut self,
        idle: bool,
        now: Instant,
        ended: &mut Vec<Ended>,
    ) -> Result<bool, Cause>;

    /// Looks at the sends and receives that are under way.
    fn for_each_point(&mut self, look: &mut dyn FnMut(&mut Point));

    /// Forgets the sends and receives that are under way: nothing will move any more.
    fn take_points(&mut self) -> Vec<Point>;

    /// Connects with these ranks, too, so as to hear whom they wait for.
    fn want(&mut self, ranks: &[Rank]);

    /// Tells all connected peers which ranks this rank waits for. A peer answers when its own thread is in
    /// a call. `now` is the time.
    fn tell(&mut self, waits: &Waits, now: Instant);

    /// Which ranks each peer waits for, by the last word that it sent. Leaves out a peer that has not
    /// answered for longer than `answer`.
    fn told(&mut self, now: Instant, answer: Duration) -> BTreeMap<Rank, Waits>;

    /// Whether a peer is known to have left the group in good order.
    fn has_left(&self, rank: Rank) -> bool;

    /// Whether a peer has not been told yet that this rank takes part no more: it is just being
    /// connected, or its stream takes nothing now.
    fn owes_word(&self) -> bool {
        false
    }

    /// When to [look](Transport::wait) although nothing is under way and nothing arrives.
    fn idle_deadline(&self) -> Option<Instant> {
        None
    }

    /// When there is something to say even if nothing arrives.
    fn next_deadline(&self, now: Instant) -> Option<Instant>;
}
