//! The sends and receives that belong to no single peer: receives from any rank, and messages of this rank to
//! itself.

use super::{
    by_tag::{ByTag, pop_first},
    exchange::{WAITING_MAX, too_many},
    point::{Direction, Ended, Outcome, Point},
};

/// See the [module's documentation](self).
#[derive(Debug, Default)]
pub(crate) struct Desk {
    /// The number of sends and receives so far.
    posted: u64,
    /// Receives from any rank that no offer has met.
    pub(crate) any: ByTag<Point>,
    /// Sends of this rank to itself that no receive has met, and receives that no send has met.
    sends: ByTag<Point>,
    receives: ByTag<Point>,
}

impl Desk {
    /// Gives a send or receive its place in the order of calls.
    pub(crate) fn number(&mut self, point: &mut Point) {
        point.number = self.posted;
        self.posted += 1;
    }

    /// Whether a receive from any rank waits.
    pub(crate) fn awaits_any(&self) -> bool {
        self.any.len() > 0
    }

    /// Adds a message of this rank to itself, or a receive from any rank that no peer's offer has met.
    pub(crate) fn post(&mut self, point: Point, ended: &mut Vec<Ended>) {
        let tag = point.call.tag;
        let (met, queue) = match (point.call.direction, point.call.peer) {
            (Direction::Send, _) => {
                (pop_first(&mut self.receives, &mut self.any, tag), &mut self.sends)
            }
            (Direction::Receive, Some(_)) => (self.sends.pop(tag), &mut self.receives),
            (Direction::Receive, None) => (self.sends.pop(tag), &mut self.any),
        };
        match (met, point.call.direction) {
            (Some(receive), Direction::Send) => deliver(point, receive, ended),
            (Some(send), Direction::Receive) => deliver(send, point, ended),
            (None, _) if queue.len() >= WAITING_MAX => ended.push(too_many(point)),
            (None, _) => queue.push(tag, point),
        }
    }

    pub(crate) fn points_mut(&mut self) -> impl Iterator<Item = &mut Point> {
        let Desk { any, sends, receives, .. } = self;
        any.values_mut().chain(sends.values_mut()).chain(receives.values_mut())
    }

    /// Takes out all sends and receives.
    pub(crate) fn take_points(&mut self) -> impl Iterator<Item = Point> {
        let Desk { any, sends, receives, .. } = std::mem::take(self);
        any.into_values().chain(sends.into_values()).chain(receives.into_values())
    }
}

/// Copies a message of this rank to itself.
fn deliver(send: Point, mut receive: Point, ended: &mut Vec<Ended>) {
    let own = send.call.peer.unwrap_or_default();
    let outcome = receive.accept(own, &send.call.offer(0));
    if outcome.is_ok() {
        receive.message.bytes_mut().copy_from_slice(send.message.bytes());
    }
    for point in [receive, send] {
        let outcome = match &outcome {
            Ok(()) => Outcome::Done,
            Err(cause) => Outcome::Failed(cause.clone()),
        };
        ended.push(Ended { point, outcome });
    }
}
