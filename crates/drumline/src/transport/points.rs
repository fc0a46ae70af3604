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

mod exchange;
mod frame;
#[cfg(test)]
mod tests;

use std::{fmt, io::IoSlice, time::Instant};

use drumline_kernels::DType;
use drumline_schedule::step::Rank;

use self::{
    exchange::{Chunk, Exchange},
    frame::Frame,
};
use super::{link::outcome, streams::Duplex};
use crate::{Result, error::Cause, trace::Open, work::shielded};

/// The buffer of a message, and whoever waits for it.
pub(crate) trait Message: Send {
    fn bytes(&self) -> &[u8];
    fn bytes_mut(&mut self) -> &mut [u8];
    fn complete(self: Box<Self>, result: Result<()>);
}

/// One side of a message: a send or a receive that is under way.
pub(crate) struct Point {
    pub(crate) call: PointCall,
    pub(crate) started: Instant,
    /// Whether the peer has been reported as late.
    pub(crate) warned: bool,
    /// Ends with the message.
    pub(crate) open: Option<Open>,
    message: Box<dyn Message>,
}

/// What is called, without the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PointCall {
    pub(crate) direction: Direction,
    pub(crate) peer: Rank,
    pub(crate) tag: u64,
    pub(crate) dtype: DType,
    pub(crate) count: usize,
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
        Point { call, started: Instant::now(), warned: false, open: None, message }
    }

    pub(crate) fn complete(self, result: Result<()>) {
        shielded(|| self.message.complete(result));
    }
}

impl PointCall {
    pub(crate) fn name(&self) -> &'static str {
        match self.direction {
            Direction::Send => "send",
            Direction::Receive => "recv",
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.count as u64 * self.dtype.size() as u64
    }
}

/// `send(to 1, tag 7) of 4 f32`
impl fmt::Display for PointCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PointCall { direction, peer, tag, dtype, count } = self;
        let towards = match direction {
            Direction::Send => "to",
            Direction::Receive => "from",
        };
        write!(f, "{}({towards} {peer}, tag {tag}) of {count} {dtype}", self.name())
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
    stream: S,
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
    pub(super) fn new(peer: Rank, stream: S) -> PointLink<S> {
        PointLink {
            peer,
            stream,
            exchange: Exchange::new(peer),
            incoming: NOTHING,
            outgoing: None,
            broken: None,
            ready: true,
        }
    }

    pub(super) fn stream(&self) -> &S {
        &self.stream
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

    /// Nothing is read while nothing waits: offers stay in the stream.
    pub(super) fn wants_to_read(&self) -> bool {
        self.broken.is_none() && self.is_pending()
    }

    pub(super) fn points_mut(&mut self) -> impl Iterator<Item = &mut Point> {
        self.exchange.points_mut()
    }

    pub(super) fn take_points(&mut self) -> Vec<Point> {
        self.outgoing = None;
        self.exchange.take_points()
    }

    /// Moves what can be moved; whether anything was.
    pub(super) fn progress(&mut self, ended: &mut Vec<Ended>) -> Result<bool, Cause> {
        let written = self.write(ended);
        Ok(self.read(ended)? || written)
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

    fn read(&mut self, ended: &mut Vec<Ended>) -> Result<bool, Cause> {
        let mut moved = 0;
        while self.ready && self.broken.is_none() && self.is_pending() && moved < TURN_BYTES {
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
                            self.exchange.on_frame(other, ended)?;
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
