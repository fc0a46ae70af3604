//! Pairs sends with receives, between this rank and one peer.

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
};

use drumline_schedule::step::Rank;

use super::{
    by_tag::{ByTag, pop_first},
    frame::{Frame, Offer},
    point::{Direction, Ended, Outcome, Point},
};
use crate::error::Cause;

/// The most sends to one peer that may wait, and the most receives. A peer that offers more breaks the
/// protocol. So messages that no rank receives cost at most about 16 MiB for each peer.
pub(crate) const WAITING_MAX: usize = 65_536;

/// The number of bytes of one message that travel before the next message has its turn.
pub(crate) const CHUNK_BYTES: usize = 256 * 1024;

/// The sends and receives of this rank, and what the peer has offered and granted. It knows no stream: frames
/// go in and come out.
#[derive(Debug)]
pub(crate) struct Exchange {
    peer: Rank,
    /// Sends by number, from the offer until the last byte is written.
    sends: BTreeMap<u64, Moving>,
    next_send: u64,
    /// The numbers of the sends that the peer has granted. The first one is sent next.
    granted: VecDeque<u64>,
    /// Receives that no offer has met, by tag, oldest first.
    receives: ByTag<Point>,
    /// Offers that no receive has met.
    offers: ByTag<Offer>,
    next_offer: u64,
    /// Receives that this rank has granted, by the number of the peer's send.
    filling: BTreeMap<u64, Moving>,
    /// Offers and grants that are not written yet.
    frames: VecDeque<Frame>,
}

/// A message whose payload is on its way.
#[derive(Debug)]
struct Moving {
    point: Point,
    /// Whether the payload may travel.
    granted: bool,
    /// The number of payload bytes that were announced, and the number that have moved.
    announced: usize,
    moved: usize,
}

/// A part of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    id: u64,
    range: Range<usize>,
}

impl Moving {
    fn new(point: Point, granted: bool) -> Moving {
        Moving { point, granted, announced: 0, moved: 0 }
    }

    fn total(&self) -> usize {
        self.point.call.bytes() as usize
    }
}

impl Exchange {
    pub(crate) fn new(peer: Rank) -> Exchange {
        Exchange {
            peer,
            sends: BTreeMap::new(),
            next_send: 0,
            granted: VecDeque::new(),
            receives: ByTag::default(),
            offers: ByTag::default(),
            next_offer: 0,
            filling: BTreeMap::new(),
            frames: VecDeque::new(),
        }
    }

    /// Begins a send or receive.
    pub(crate) fn post(&mut self, point: Point, ended: &mut Vec<Ended>) {
        let call = point.call;
        let waiting = match call.direction {
            Direction::Send => self.sends.len(),
            Direction::Receive => self.receives.len() + self.filling.len(),
        };
        if waiting >= WAITING_MAX {
            return ended.push(too_many(point));
        }
        match call.direction {
            Direction::Send => {
                let id = self.next_send;
                self.next_send += 1;
                self.frames.push_back(Frame::Offer(call.offer(id)));
                self.sends.insert(id, Moving::new(point, false));
            }
            Direction::Receive => match self.offers.pop(call.tag) {
                Some(offer) => self.meet(offer, point, ended),
                None => self.receives.push(call.tag, point),
            },
        }
    }

    /// Whether the peer offers a message with that tag that no receive has met.
    pub(crate) fn offers(&self, tag: u64) -> bool {
        self.offers.first(tag).is_some()
    }

    fn meet(&mut self, offer: Offer, mut point: Point, ended: &mut Vec<Ended>) {
        if let Err(cause) = point.accept(self.peer, &offer) {
            return ended.push(Ended { point, outcome: Outcome::Failed(cause) });
        }
        self.filling.insert(offer.id, Moving::new(point, true));
        self.frames.push_back(Frame::Grant { id: offer.id });
    }

    /// Takes in an offer or a grant of the peer. `any` are the receives from any rank: an offer may be for
    /// one of them.
    pub(crate) fn on_frame(
        &mut self,
        frame: Frame,
        any: &mut ByTag<Point>,
        ended: &mut Vec<Ended>,
    ) -> Result<(), Cause> {
        match frame {
            Frame::Offer(offer) => {
                if offer.id != self.next_offer {
                    return Err(self.protocol("offered messages out of order"));
                }
                self.next_offer += 1;
                match pop_first(&mut self.receives, any, offer.tag) {
                    Some(point) => self.meet(offer, point, ended),
                    None if self.offers.len() >= WAITING_MAX => {
                        return Err(self.protocol("offered more messages than it may"));
                    }
                    None => self.offers.push(offer.tag, offer),
                }
            }
            Frame::Grant { id } => {
                let send = self.sends.get_mut(&id).filter(|send| !send.granted);
                let Some(send) = send else {
                    return Err(self.protocol("asked for a message that was not offered"));
                };
                send.granted = true;
                self.granted.push_back(id);
            }
            Frame::Payload { .. } => unreachable!("payloads are told apart by whoever reads them"),
        }
        Ok(())
    }

    /// The peer is about to send `bytes` more bytes of a message. Returns the same number as a length in
    /// memory.
    pub(crate) fn on_payload(&mut self, id: u64, bytes: u64) -> Result<usize, Cause> {
        let Some(receive) = self.filling.get_mut(&id) else {
            return Err(self.protocol("sent a message that was not asked for"));
        };
        let left = receive.total() - receive.announced;
        match usize::try_from(bytes) {
            Ok(bytes) if bytes <= left && (bytes > 0 || left == 0) => {
                receive.announced += bytes;
                Ok(bytes)
            }
            _ => Err(self.protocol("sent a message that is longer than its offer")),
        }
    }

    /// The place for the next bytes of a chunk that lacks `left` bytes.
    pub(crate) fn place(&mut self, id: u64, left: usize) -> &mut [u8] {
        let Some(receive) = self.filling.get_mut(&id) else { return &mut [] };
        &mut receive.point.message.bytes_mut()[receive.moved..receive.moved + left]
    }

    pub(crate) fn on_received(&mut self, id: u64, bytes: usize) {
        if let Some(receive) = self.filling.get_mut(&id) {
            receive.moved += bytes;
        }
    }

    /// A whole chunk is in its place.
    pub(crate) fn on_chunk(&mut self, id: u64, ended: &mut Vec<Ended>) {
        if self.filling.get(&id).is_some_and(|receive| receive.moved == receive.total()) {
            finish(self.filling.remove(&id), ended);
        }
    }

    pub(crate) fn has_output(&self) -> bool {
        !self.frames.is_empty() || !self.granted.is_empty()
    }

    /// The next bytes to write. Offers and grants overtake payloads. Payloads take turns.
    pub(crate) fn next_output(&mut self) -> Option<(Frame, Option<Chunk>)> {
        if let Some(frame) = self.frames.pop_front() {
            return Some((frame, None));
        }
        let id = self.granted.pop_front()?;
        let send = self.sends.get_mut(&id)?;
        let end = send.total().min(send.announced + CHUNK_BYTES);
        let range = send.announced..end;
        send.announced = end;
        let bytes = range.len() as u64;
        Some((Frame::Payload { id, bytes }, Some(Chunk { id, range })))
    }

    pub(crate) fn payload(&self, chunk: &Chunk) -> &[u8] {
        let Some(send) = self.sends.get(&chunk.id) else { return &[] };
        &send.point.message.bytes()[chunk.range.clone()]
    }

    /// A whole chunk was written.
    pub(crate) fn on_written(&mut self, chunk: Chunk, ended: &mut Vec<Ended>) {
        let Some(send) = self.sends.get_mut(&chunk.id) else { return };
        send.moved = chunk.range.end;
        if send.moved < send.total() {
            self.granted.push_back(chunk.id);
            return;
        }
        finish(self.sends.remove(&chunk.id), ended);
    }

    pub(crate) fn is_pending(&self) -> bool {
        !self.sends.is_empty() || self.receives.len() > 0 || !self.filling.is_empty()
    }

    pub(crate) fn points_mut(&mut self) -> impl Iterator<Item = &mut Point> {
        let moving = self.sends.values_mut().chain(self.filling.values_mut());
        moving.map(|moving| &mut moving.point).chain(self.receives.values_mut())
    }

    /// Takes out all sends and receives.
    pub(crate) fn take_points(&mut self) -> Vec<Point> {
        let Exchange { sends, receives, filling, .. } =
            std::mem::replace(self, Exchange::new(self.peer));
        let moving = sends.into_values().chain(filling.into_values()).map(|moving| moving.point);
        moving.chain(receives.into_values()).collect()
    }

    fn protocol(&self, problem: &str) -> Cause {
        Cause::Protocol { peer: self.peer, problem: problem.to_owned() }
    }
}

/// The end of a send or receive that exceeds [`WAITING_MAX`].
pub(crate) fn too_many(point: Point) -> Ended {
    let whom = match point.call.peer {
        Some(peer) => format!("for rank {peer}"),
        None => "for any rank".to_owned(),
    };
    let problem = format!(
        "{WAITING_MAX} calls of this kind wait {whom} already, more than that is not supported; \
         wait for some of them first"
    );
    Ended { point, outcome: Outcome::Refused(problem) }
}

fn finish(moving: Option<Moving>, ended: &mut Vec<Ended>) {
    ended.extend(moving.map(|Moving { point, .. }| Ended { point, outcome: Outcome::Done }));
}
