//! The messages to and from one peer, as bytes of a stream.

use std::io::{IoSlice, Read as _, Write as _};

use drumline_schedule::step::Rank;

use super::{
    by_tag::ByTag,
    exchange::{Chunk, Exchange},
    frame::Frame,
    point::{Ended, Point},
};
use crate::{
    error::Cause,
    transport::{
        broken::{Broken, outcome},
        duplex::Duplex,
        later::Later,
    },
};

/// The messages to and from one peer, over a non-blocking stream.
#[derive(Debug)]
pub(crate) struct PointLink<S> {
    peer: Rank,
    stream: Later<S>,
    exchange: Exchange,
    incoming: Incoming,
    outgoing: Option<Outgoing>,
    /// Why the stream carries no more, once that is so; see [`DataLink`](crate::transport::data_link::DataLink).
    broken: Option<Broken>,
    /// Whether there may be something to read.
    ready: bool,
}

#[derive(Debug)]
enum Incoming {
    /// `have` bytes of a frame have been read.
    Frame { bytes: [u8; Frame::BYTES], have: usize },
    /// A chunk of message `id` lacks `left` bytes.
    Payload { id: u64, left: usize },
}

/// A frame, and the chunk behind it, that are being written.
#[derive(Debug)]
struct Outgoing {
    frame: [u8; Frame::BYTES],
    /// The chunk behind the frame.
    payload: Option<Chunk>,
    /// Bytes written, of frame and payload together.
    written: usize,
}

const NOTHING: Incoming = Incoming::Frame { bytes: [0; Frame::BYTES], have: 0 };

/// The number of bytes that one turn moves in each direction, so that many messages do not keep a rank from
/// its other work.
const TURN_BYTES: usize = 1 << 20;

impl<S: Duplex> PointLink<S> {
    /// A link whose stream is not there yet. Sends and receives wait for it.
    pub(crate) fn new(peer: Rank) -> PointLink<S> {
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

    pub(crate) fn connect(&mut self, stream: S) {
        self.stream.set(stream);
        self.ready = true;
    }

    pub(crate) fn stream(&self) -> Option<&S> {
        self.stream.get()
    }

    pub(crate) fn post(&mut self, point: Point, ended: &mut Vec<Ended>) {
        self.exchange.post(point, ended);
        // The offer that it needs may be there already. Reading costs no more than asking.
        self.ready = true;
    }

    /// The stream can be read, or can be written again.
    pub(crate) fn on_readable(&mut self) {
        self.ready = true;
        // The next read or write finds the failure.
        let _ = self.stream.flush_held();
    }

    /// Whether the peer offers a message with that tag that no receive has met.
    pub(crate) fn offers(&self, tag: u64) -> bool {
        self.exchange.offers(tag)
    }

    /// Tells the peer that this rank will send no more.
    pub(crate) fn end(&mut self) {
        if let Err(error) = self.stream.end() {
            tracing::debug!(peer = self.peer, %error, "stream of messages was closed already");
        }
    }

    pub(crate) fn broken(&self) -> Option<&Broken> {
        self.broken.as_ref()
    }

    /// Whether sends or receives wait for the peer.
    pub(crate) fn is_pending(&self) -> bool {
        self.exchange.is_pending()
    }

    pub(crate) fn wants_to_write(&self) -> bool {
        self.broken.is_none() && (self.outgoing.is_some() || self.exchange.has_output())
    }

    /// Whether this rank wants to read. It does not while no send or receive waits for this peer or (`any`)
    /// for any rank: offers stay in the stream.
    pub(crate) fn wants_to_read(&self, any: bool) -> bool {
        self.broken.is_none() && (self.is_pending() || any)
    }

    pub(crate) fn points_mut(&mut self) -> impl Iterator<Item = &mut Point> {
        self.exchange.points_mut()
    }

    pub(crate) fn take_points(&mut self) -> Vec<Point> {
        self.outgoing = None;
        self.exchange.take_points()
    }

    /// Moves what can be moved. Returns whether anything moved. `any` are the receives from any rank.
    pub(crate) fn progress(
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
