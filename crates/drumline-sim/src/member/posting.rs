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

/// A send or receive to be made.
#[derive(Clone, Debug)]
pub(crate) struct MessageOrder {
    /// What is to be done.
    pub(crate) side: Side,
    /// What a send and its receive have in common.
    pub(crate) tag: u64,
    /// With what.
    pub(crate) dtype: DType,
    /// What is sent, or as many bytes as are to come.
    pub(crate) bytes: Vec<u8>,
}

/// A side of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// It is sent to this rank.
    SendTo(Rank),
    /// It is received from this rank.
    ReceiveFrom(Rank),
    /// It is received from whichever rank sends first.
    ReceiveFromAny,
}

/// Where a message leaves what became of it: the other rank, and its bytes.
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
    /// Sends or receives beside everything else.
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
