//! Messages from rank to rank, outside of collectives, over a stream of their own to every peer.
//!
//! ```text
//! sender                                 receiver
//! offer (number, tag, type, count) ────▶ kept until a receive with that tag is posted
//!               payload may be sent ◀──── grant (number)
//! payload, in chunks ──────────────────▶ straight into the receiver's buffer
//! ```
//!
//! A payload travels only when its place is known. So a message that nobody receives takes 40
//! bytes of the receiver's memory and holds up nothing: neither other messages, nor collectives.
//! Messages that are granted at the same time take turns, chunk by chunk.
//!
//! A receive from any rank waits beside all streams, at the [`Desk`]; the first offer with its tag
//! is granted. What a rank sends to itself is copied there.

mod by_tag;
mod desk;
mod exchange;
mod frame;
#[cfg(test)]
mod tests;

use std::{
    fmt,
    io::{IoSlice, Read as _, Write as _},
    time::{Duration, Instant},
};

use drumline_kernels::DType;
use drumline_schedule::step::Rank;

pub(super) use self::desk::Desk;
use self::{
    by_tag::ByTag,
    exchange::{Chunk, Exchange},
    frame::{Frame, OBJECT, Offer},
};
use super::{later::Later, link::outcome, streams::Duplex};
use crate::{Result, error::Cause, trace::Open, work::shielded};

/// The buffer of a message, and whoever waits for it.
pub(crate) trait Message: Send {
    fn bytes(&self) -> &[u8];
    fn bytes_mut(&mut self) -> &mut [u8];
    /// Makes a buffer of that length, for an object.
    fn make_room(&mut self, _bytes: usize) {}
    /// Also tells which rank the message went to or came from.
    fn complete(self: Box<Self>, result: Result<Rank>);
}

/// One side of a message: a send or a receive that is under way.
pub(crate) struct Point {
    pub(crate) call: PointCall,
    pub(crate) started: Instant,
    /// Whether the peer has been reported as late.
    pub(crate) warned: bool,
    /// The time limit, if it is not that of the group.
    pub(crate) timeout: Option<Duration>,
    /// When it is given up, if that is not the time limit after its start.
    pub(crate) give_up_at: Option<Instant>,
    /// Ends with the message.
    pub(crate) open: Option<Open>,
    /// Its place in the order of calls.
    number: u64,
    message: Box<dyn Message>,
}

/// What is called, without the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PointCall {
    pub(crate) direction: Direction,
    /// None for a receive from any rank that no message has met.
    pub(crate) peer: Option<Rank>,
    pub(crate) tag: u64,
    pub(crate) content: Content,
}

/// What a message holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    Elements {
        dtype: DType,
        count: usize,
    },
    /// So many bytes that describe an object; for a receive that no message has met, the most
    /// that it takes.
    Object {
        bytes: usize,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Send,
    Receive,
}

/// A send or receive that needs nothing more.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) point: Point,
    pub(crate) outcome: Outcome,
}

#[derive(Debug)]
pub(crate) enum Outcome {
    Done,
    /// Too many wait already. Nothing was sent.
    Refused(String),
    /// The two sides do not fit each other.
    Failed(Cause),
}

impl Point {
    pub(crate) fn new(call: PointCall, message: Box<dyn Message>) -> Point {
        let started = Instant::now();
        Point {
            call,
            started,
            warned: false,
            timeout: None,
            give_up_at: None,
            open: None,
            number: 0,
            message,
        }
    }

    /// Sets a time limit of its own.
    pub(crate) fn within(self, timeout: Option<Duration>) -> Point {
        Point { timeout, ..self }
    }

    /// What the message holds, as it travels; and what that is in bytes.
    pub(crate) fn parcel(&self) -> ([u8; Frame::BYTES], &[u8]) {
        (Frame::Offer(self.call.offer(0)).encode(), self.message.bytes())
    }

    /// Takes a whole message in that another rank has sent with that label.
    pub(crate) fn fill(
        &mut self,
        from: Rank,
        label: &[u8; Frame::BYTES],
        bytes: &[u8],
    ) -> Result<(), Cause> {
        let length = bytes.len() as u64;
        let offer = match Frame::decode(label) {
            Some(Frame::Offer(offer)) if offer.bytes == length => offer,
            _ => {
                let problem = format!("sent {length} bytes that are no message");
                return Err(Cause::Protocol { peer: from, problem });
            }
        };
        self.accept(from, &offer)?;
        self.message.bytes_mut().copy_from_slice(bytes);
        Ok(())
    }

    pub(crate) fn complete(self, result: Result<()>) {
        let peer = self.call.peer.unwrap_or_default();
        shielded(|| self.message.complete(result.map(|()| peer)));
    }

    /// Prepares a receive for what rank `from` offers, if that is what it expects.
    fn accept(&mut self, from: Rank, offer: &Offer) -> Result<(), Cause> {
        let fits = match self.call.content {
            Content::Elements { .. } => {
                let expected = self.call.offer(offer.id);
                (offer.dtype, offer.count, offer.bytes)
                    == (expected.dtype, expected.count, expected.bytes)
            }
            Content::Object { bytes: most } => offer.dtype == OBJECT && offer.bytes <= most as u64,
        };
        if !fits {
            let (theirs, ours) = (offer.to_string(), self.call.to_string());
            return Err(Cause::Mismatch { peer: from, theirs, ours });
        }
        self.call.peer = Some(from);
        if let Content::Object { bytes } = &mut self.call.content {
            *bytes = offer.bytes as usize;
            self.message.make_room(*bytes);
        }
        Ok(())
    }
}

impl PointCall {
    pub(crate) fn name(&self) -> &'static str {
        match (self.direction, self.content) {
            (Direction::Send, Content::Elements { .. }) => "send",
            (Direction::Receive, Content::Elements { .. }) => "recv",
            (Direction::Send, Content::Object { .. }) => "send_object",
            (Direction::Receive, Content::Object { .. }) => "recv_object",
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        match self.content {
            Content::Elements { dtype, count } => count as u64 * dtype.size() as u64,
            Content::Object { bytes } => bytes as u64,
        }
    }

    /// What a send of this kind offers, as its message number `id`.
    fn offer(&self, id: u64) -> Offer {
        let (dtype, count) = match self.content {
            Content::Elements { dtype, count } => (dtype as u8, count as u64),
            Content::Object { bytes } => (OBJECT, bytes as u64),
        };
        Offer { id, tag: self.tag, dtype, count, bytes: self.bytes() }
    }
}

/// `send(to 1, tag 7) of 4 f32`
impl fmt::Display for PointCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PointCall { direction, peer, tag, content } = self;
        let towards = match direction {
            Direction::Send => "to",
            Direction::Receive => "from",
        };
        write!(f, "{}({towards} ", self.name())?;
        match peer {
            Some(peer) => write!(f, "{peer}")?,
            None => f.write_str("any")?,
        }
        write!(f, ", tag {tag}) of ")?;
        match (content, direction) {
            (Content::Elements { dtype, count }, _) => write!(f, "{count} {dtype}"),
            (Content::Object { bytes }, Direction::Send) => write!(f, "{bytes} bytes"),
            (Content::Object { bytes }, Direction::Receive) => write!(f, "at most {bytes} bytes"),
        }
    }
}

impl fmt::Debug for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Point").field(&self.call).finish()
    }
}

/// The messages to and from one peer, over a non-blocking stream.
#[derive(Debug)]
pub(super) struct PointLink<S> {
    peer: Rank,
    stream: Later<S>,
    exchange: Exchange,
    incoming: Incoming,
    outgoing: Option<Outgoing>,
    /// Why the stream carries no more, once that is so; see [`DataLink`](super::link::DataLink).
    broken: Option<String>,
    /// Whether there may be something to read.
    ready: bool,
}

#[derive(Debug)]
enum Incoming {
    /// `have` bytes of a frame are there.
    Frame { bytes: [u8; Frame::BYTES], have: usize },
    /// `left` bytes of a chunk of that message are missing.
    Payload { id: u64, left: usize },
}

/// What is being written.
#[derive(Debug)]
struct Outgoing {
    frame: [u8; Frame::BYTES],
    /// What follows the frame.
    payload: Option<Chunk>,
    /// Bytes written, of frame and payload together.
    written: usize,
}

const NOTHING: Incoming = Incoming::Frame { bytes: [0; Frame::BYTES], have: 0 };

/// Bytes that one turn moves in each direction, so that a stream of messages does not keep its
/// rank from everything else.
const TURN_BYTES: usize = 1 << 20;

impl<S: Duplex> PointLink<S> {
    /// What is posted waits for its stream.
    pub(super) fn new(peer: Rank) -> PointLink<S> {
        PointLink {
            peer,
            stream: Later::NOT_YET,
            exchange: Exchange::new(peer),
            incoming: NOTHING,
            outgoing: None,
            broken: None,
            ready: true,
        }
    }

    pub(super) fn connect(&mut self, stream: S) {
        self.stream.set(stream);
        self.ready = true;
    }

    pub(super) fn stream(&self) -> Option<&S> {
        self.stream.get()
    }

    pub(super) fn post(&mut self, point: Point, ended: &mut Vec<Ended>) {
        self.exchange.post(point, ended);
        // What it needs may be there already; looking costs no more than asking.
        self.ready = true;
    }

    /// There is something to read.
    pub(super) fn on_readable(&mut self) {
        self.ready = true;
    }

    /// Whether the peer offers a message with that tag that no receive has met.
    pub(super) fn offers(&self, tag: u64) -> bool {
        self.exchange.offers(tag)
    }

    /// No more will be sent.
    pub(super) fn end(&mut self) {
        if let Err(error) = self.stream.end() {
            tracing::debug!(peer = self.peer, %error, "stream of messages was closed already");
        }
    }

    pub(super) fn broken(&self) -> Option<&str> {
        self.broken.as_deref()
    }

    /// Whether sends or receives wait for the peer.
    pub(super) fn is_pending(&self) -> bool {
        self.exchange.is_pending()
    }

    pub(super) fn wants_to_write(&self) -> bool {
        self.broken.is_none() && (self.outgoing.is_some() || self.exchange.has_output())
    }

    /// Nothing is read while nothing waits, for this peer or for any: offers stay in the stream.
    pub(super) fn wants_to_read(&self, any: bool) -> bool {
        self.broken.is_none() && (self.is_pending() || any)
    }

    pub(super) fn points_mut(&mut self) -> impl Iterator<Item = &mut Point> {
        self.exchange.points_mut()
    }

    pub(super) fn take_points(&mut self) -> Vec<Point> {
        self.outgoing = None;
        self.exchange.take_points()
    }

    /// Moves what can be moved; whether anything was. `any` are the receives from any rank.
    pub(super) fn progress(
        &mut self,
        any: &mut ByTag<Point>,
        ended: &mut Vec<Ended>,
    ) -> Result<bool, Cause> {
        let written = self.write(ended);
        Ok(self.read(any, ended)? || written)
    }

    fn write(&mut self, ended: &mut Vec<Ended>) -> bool {
        let mut moved = 0;
        while self.broken.is_none() && moved < TURN_BYTES {
            let Some(outgoing) = &self.outgoing else {
                let Some((frame, payload)) = self.exchange.next_output() else { break };
                self.outgoing = Some(Outgoing { frame: frame.encode(), payload, written: 0 });
                continue;
            };
            let payload = match &outgoing.payload {
                Some(chunk) => self.exchange.payload(chunk),
                None => &[],
            };
            let total = Frame::BYTES + payload.len();
            let result = if outgoing.written < Frame::BYTES {
                let frame = IoSlice::new(&outgoing.frame[outgoing.written..]);
                self.stream.write_vectored(&[frame, IoSlice::new(payload)])
            } else {
                self.stream.write(&payload[outgoing.written - Frame::BYTES..])
            };
            let Some(bytes) = outcome(result, &mut self.broken) else { break };
            moved += bytes;
            if let Some(outgoing) = &mut self.outgoing {
                outgoing.written += bytes;
                if outgoing.written == total
                    && let Some(Outgoing { payload: Some(chunk), .. }) = self.outgoing.take()
                {
                    self.exchange.on_written(chunk, ended);
                }
            }
        }
        moved > 0
    }

    fn read(&mut self, any: &mut ByTag<Point>, ended: &mut Vec<Ended>) -> Result<bool, Cause> {
        let mut moved = 0;
        while self.ready && self.wants_to_read(any.len() > 0) && moved < TURN_BYTES {
            let result = match &mut self.incoming {
                Incoming::Frame { bytes, have } if *have == Frame::BYTES => {
                    let Some(frame) = Frame::decode(bytes) else {
                        let problem = "sent something that is no message".to_owned();
                        return Err(Cause::Protocol { peer: self.peer, problem });
                    };
                    self.incoming = match frame {
                        Frame::Payload { id, bytes } => {
                            let left = self.exchange.on_payload(id, bytes)?;
                            Incoming::Payload { id, left }
                        }
                        other => {
                            self.exchange.on_frame(other, any, ended)?;
                            NOTHING
                        }
                    };
                    continue;
                }
                Incoming::Payload { id, left: 0 } => {
                    self.exchange.on_chunk(*id, ended);
                    self.incoming = NOTHING;
                    continue;
                }
                Incoming::Frame { bytes, have } => self.stream.read(&mut bytes[*have..]),
                Incoming::Payload { id, left } => self.stream.read(self.exchange.place(*id, *left)),
            };
            let Some(bytes) = outcome(result, &mut self.broken) else {
                self.ready = false;
                break;
            };
            moved += bytes;
            match &mut self.incoming {
                Incoming::Frame { have, .. } => *have += bytes,
                Incoming::Payload { id, left } => {
                    *left -= bytes;
                    self.exchange.on_received(*id, bytes);
                }
            }
        }
        Ok(moved > 0)
    }
}
