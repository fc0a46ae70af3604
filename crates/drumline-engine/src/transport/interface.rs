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
    membership::SeenFailure,
};

/// Carries the messages of one group, in order between any two ranks.
///
/// No method but [`Transport::wait`] blocks. A transport keeps no copy of a payload: it reads from and writes
/// to the call's memory when bytes move.
pub trait Transport: Send + std::fmt::Debug {
    /// A call begins: reports what has arrived since the last call ended.
    fn begin(&mut self, machine: &mut Machine) -> Result<(), Cause>;

    /// Posts a message.
    fn send(&mut self, to: Rank, header: Header, src: Stretch);

    /// Gives the place for the next message from `from` that has no place yet.
    fn receive(&mut self, from: Rank, dst: Stretch);

    /// Moves what can be moved at time `now`, and tells `machine`. Returns whether anything moved.
    fn progress(
        &mut self,
        machine: &mut Machine,
        memory: &mut Memory<'_>,
        now: Instant,
    ) -> Result<bool, Cause>;

    /// Tells all peers that the group is broken, and why. What was in flight is lost.
    fn abort(&mut self, failure: &CollectiveError);

    /// Tells all peers that this rank leaves in good order, without waiting for anyone. `seen`: a failure that it has
    /// seen in another group, by which a peer that still needs this rank blames the rank at fault.
    fn take_leave(&mut self, seen: Option<SeenFailure>);

    /// The peers that have not left yet, after [`Transport::take_leave`]. When there are none, a message that
    /// was never taken is an error: its sender made a call that this rank did not make.
    fn still_present(&mut self, history: &History) -> Result<Vec<Rank>, Cause>;

    /// Sleeps until something can be moved, at most until `until`. `now` is the time. It may wake early. If
    /// `until` has come already, it only takes in what has happened.
    fn wait(&mut self, until: Instant, now: Instant);

    /// Prepares for a sleep outside of this transport.
    fn arm(&mut self);
}

/// A transport that also carries messages from rank to rank, outside of collectives.
pub trait Connections: Transport {
    /// Begins a send or receive. Adds those that are complete to `ended`.
    fn post(&mut self, point: Point, ended: &mut Vec<Ended>);

    /// Moves messages at time `now`. Returns whether anything moved. `idle`: no collective runs, so this
    /// method also reads ahead on the streams of collectives.
    ///
    /// # Errors
    ///
    /// The cause of a failure that ends all calls of the group.
    fn progress_points(
        &mut self,
        idle: bool,
        now: Instant,
        ended: &mut Vec<Ended>,
    ) -> Result<bool, Cause>;

    /// Calls `look` for each send and receive that is under way.
    fn for_each_point(&mut self, look: &mut dyn FnMut(&mut Point));

    /// Takes out the sends and receives that are under way. Their data will not move any more.
    fn take_points(&mut self) -> Vec<Point>;

    /// Connects to these ranks, too, to hear for which ranks they wait.
    fn want(&mut self, ranks: &[Rank]);

    /// Tells all connected peers which ranks this rank waits for. A peer answers when its own thread is in
    /// a call. `now` is the time.
    fn tell(&mut self, waits: &Waits, now: Instant);

    /// Which ranks each peer waits for, by the last word that it sent. Leaves out a peer that has not
    /// answered for longer than `answer`.
    fn told(&mut self, now: Instant, answer: Duration) -> BTreeMap<Rank, Waits>;

    /// Why a peer that has left the group in good order can take no part any more. `None`: it is not known to have left.
    fn left(&self, rank: Rank) -> Option<Cause>;

    /// Whether no connection to a peer is still to come.
    fn has_met_all(&mut self) -> bool;

    /// Why a peer that this rank hears itself can take no part any more.
    fn lost(&mut self, rank: Rank) -> Option<Cause>;

    /// Whether some peer does not know yet that this rank has failed or left: it is just being connected, or
    /// its stream takes no bytes now.
    fn has_unsent(&self) -> bool {
        false
    }

    /// When to call [`Transport::wait`] although no call is under way and nothing arrives.
    fn idle_deadline(&self) -> Option<Instant> {
        None
    }

    /// When the transport has something to report even if nothing arrives.
    fn next_deadline(&self, now: Instant) -> Option<Instant>;
}
