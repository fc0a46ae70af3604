//! Messages from rank to rank, for simulators.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use drumline_schedule::step::Rank;

use super::{Connection, Member};
use drumline_engine::{
    DType, Result,
    transport::{Content, Direction, Message, Point, PointCall},
};

/// The arguments of a send or receive.
#[derive(Clone, Debug)]
pub(crate) struct MessageOrder {
    pub(crate) side: Side,
    /// The tag, by which a send and its receive find each other.
    pub(crate) tag: u64,
    pub(crate) dtype: DType,
    /// The bytes to send, or for a receive as many bytes as are expected.
    pub(crate) bytes: Vec<u8>,
}

/// One side of a message: its send or its receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// Sends to this rank.
    SendTo(Rank),
    /// Receives from this rank.
    ReceiveFrom(Rank),
    /// Receives from the rank whose message comes first.
    ReceiveFromAny,
}

/// Where a message that has ended leaves the other rank and its bytes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Posted(Arc<Mutex<Option<EndOfMessage>>>);

type EndOfMessage = (Result<Rank>, Vec<u8>);

impl Posted {
    /// The result, once there is one.
    pub(crate) fn take(&self) -> Option<EndOfMessage> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl<S: Connection> Member<S> {
    /// Posts a send or receive, which goes on beside calls and other messages.
    pub(crate) fn post(&mut self, order: MessageOrder, now: Instant) -> Posted {
        let MessageOrder { side, tag, dtype, bytes } = order;
        let (direction, peer) = match side {
            Side::SendTo(rank) => (Direction::Send, Some(rank)),
            Side::ReceiveFrom(rank) => (Direction::Receive, Some(rank)),
            Side::ReceiveFromAny => (Direction::Receive, None),
        };
        let posted = Posted::default();
        let content = Content::Elements { dtype, count: bytes.len() / dtype.size() };
        let message = Box::new(InBytes { bytes, posted: posted.clone() });
        let point = Point::new(PointCall { direction, peer, tag, content }, message, now);
        self.lane.post(point);
        posted
    }
}

struct InBytes {
    bytes: Vec<u8>,
    posted: Posted,
}

impl Message for InBytes {
    fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    fn complete(self: Box<Self>, result: Result<Rank>) {
        let InBytes { bytes, posted } = *self;
        *posted.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((result, bytes));
    }
}
