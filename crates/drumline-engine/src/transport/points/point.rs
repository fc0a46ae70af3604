//! A send or receive that is under way.

use std::{
    fmt,
    time::{Duration, Instant},
};

use drumline_kernels::DType;
use drumline_schedule::step::Rank;

use super::frame::{Frame, OBJECT, Offer};
use crate::{Result, error::Cause, panics::shielded, recorder::Open};

/// The buffer of a message, and the caller that waits for it.
pub trait Message: Send {
    /// The bytes that a send reads.
    fn bytes(&self) -> &[u8];
    /// The bytes that a receive writes.
    fn bytes_mut(&mut self) -> &mut [u8];
    /// Makes a buffer of that length, for an object.
    fn make_room(&mut self, _bytes: usize) {}
    /// Gives the result to the caller: the rank to which the message went or from which it came.
    fn complete(self: Box<Self>, result: Result<Rank>);
}

/// One side of a message: a send or a receive that is under way.
pub struct Point {
    /// The function and its arguments, without the buffer.
    pub call: PointCall,
    /// When it was called.
    pub started: Instant,
    /// Whether the peer has been reported as late.
    pub warned: bool,
    /// The time limit, if it is not that of the group.
    pub timeout: Option<Duration>,
    /// When the message fails with a time-out, if not after the time limit.
    pub give_up_at: Option<Instant>,
    /// The record of the message. It ends when it is dropped.
    pub open: Option<Open>,
    /// Its place in the order of calls.
    pub(super) number: u64,
    pub(super) message: Box<dyn Message>,
}

/// A send or receive as it was called, without the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PointCall {
    /// Whether this rank sends or receives.
    pub direction: Direction,
    /// The other rank. `None` for a receive from any rank that has met no message.
    pub peer: Option<Rank>,
    /// The number that a send and its receive share.
    pub tag: u64,
    /// What the message holds.
    pub content: Content,
}

/// What a message holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Elements of one type.
    Elements {
        /// Their type.
        dtype: DType,
        /// How many.
        count: usize,
    },
    /// The description of an object. A receive that has met no message has a limit here in place of the
    /// length.
    Object {
        /// The length of the description in bytes.
        bytes: usize,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
/// The side of a message.
pub enum Direction {
    /// This rank sends.
    Send,
    /// This rank receives.
    Receive,
}

/// A send or receive that has ended.
#[derive(Debug)]
pub struct Ended {
    pub(crate) point: Point,
    pub(crate) outcome: Outcome,
}

#[derive(Debug)]
/// How a send or receive has ended.
pub enum Outcome {
    /// The message has arrived at this rank, or has left it.
    Done,
    /// Too many sends or receives wait already. Nothing was sent.
    Refused(String),
    /// The send and the receive do not fit each other, or the connection failed.
    Failed(Cause),
}

impl Point {
    /// A send or receive that this rank called at `started`.
    pub fn new(call: PointCall, message: Box<dyn Message>, started: Instant) -> Point {
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

    /// The same with a time limit of its own.
    pub fn within(self, timeout: Option<Duration>) -> Point {
        Point { timeout, ..self }
    }

    /// The message as a label and its bytes, to carry it by other means.
    pub fn parcel(&self) -> ([u8; Frame::BYTES], &[u8]) {
        (Frame::Offer(self.call.offer(0)).encode(), self.message.bytes())
    }

    /// Fills a receive with a whole message of another rank that came by other means, with its label.
    pub fn fill(
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

    /// Tells the caller the result.
    pub fn complete(self, result: Result<()>) {
        let peer = self.call.peer.unwrap_or_default();
        shielded(|| self.message.complete(result.map(|()| peer)));
    }

    /// Prepares a receive for the offer of rank `from`. Fails if the offer does not fit.
    pub(super) fn accept(&mut self, from: Rank, offer: &Offer) -> Result<(), Cause> {
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
    /// The name of the function.
    pub fn name(&self) -> &'static str {
        match (self.direction, self.content) {
            (Direction::Send, Content::Elements { .. }) => "send",
            (Direction::Receive, Content::Elements { .. }) => "recv",
            (Direction::Send, Content::Object { .. }) => "send_object",
            (Direction::Receive, Content::Object { .. }) => "recv_object",
        }
    }

    /// The length of the message, as far as this rank knows it.
    pub fn bytes(&self) -> u64 {
        match self.content {
            Content::Elements { dtype, count } => count as u64 * dtype.size() as u64,
            Content::Object { bytes } => bytes as u64,
        }
    }

    /// The offer of this send, with the message number `id`.
    pub(super) fn offer(&self, id: u64) -> Offer {
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
