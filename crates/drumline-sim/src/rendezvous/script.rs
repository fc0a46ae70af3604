//! What a client of the store does: its calls, one after another, and how replies are told apart.

use std::fmt;

use drumline_store::store::tcp::protocol::{Request, WAIT_CANCELED};

use crate::network::{Nanos, Quality};

/// The program of one process.
#[derive(Debug)]
pub(super) struct Script {
    pub(super) name: String,
    pub(super) quality: Quality,
    pub(super) starts_at: Nanos,
    pub(super) ops: Vec<Op>,
    /// Whether it asks the store for extensions, and uses them.
    pub(super) knows_extensions: bool,
    /// Whether it goes on after a call that has failed.
    pub(super) persists: bool,
}

/// What a process does next.
#[derive(Clone, Debug)]
pub(super) enum Op {
    /// Sends requests in one piece and reads the replies to all of them.
    Ask {
        requests: Bytes,
        replies: Vec<Shape>,
        /// The bytes of all replies, where they are known.
        expected: Option<Bytes>,
        patience: Nanos,
        /// Whether nobody may ever answer.
        may_be_in_vain: bool,
    },
    /// Waits for keys, and gets what it wants.
    Wait {
        keys: Vec<Bytes>,
        wants: Want,
        /// The bytes of what it gets, where they are known.
        expected: Option<Bytes>,
        patience: Nanos,
    },
    /// Adds 1, then looks until the number is there.
    Join {
        key: Bytes,
        all: i64,
        looks: bool,
        patience: Nanos,
    },
    Pause(Nanos),
    /// Sends this, whatever it is, and hangs up after a while.
    Shout {
        bytes: Bytes,
        linger: Nanos,
    },
    /// Sends this, which is the beginning of a request, and dies.
    Die {
        bytes: Bytes,
    },
}

/// What a client waits for keys for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Want {
    Nothing,
    Values,
    /// An item of the queue under the first.
    Item,
}

/// Bytes that people can read.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Bytes(pub(super) Vec<u8>);

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.escape_ascii())
    }
}

/// How long a reply is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    Bytes(usize),
    /// A number of values.
    Values(usize),
    /// A number, and a value unless it is 0.
    Item,
    /// A number of keys, and the keys.
    Keys,
    /// The end of a wait and this number of values; or that it is cancelled.
    Awaited(usize),
    /// The end of a wait and this number of values, perhaps; and that it is cancelled.
    Cancelled(usize),
}

impl Shape {
    /// How the reply to a request looks, if it has one.
    pub(super) fn of(request: &Request<'_>) -> Option<Shape> {
        Some(match request {
            Request::Validate(_)
            | Request::Set(..)
            | Request::Append(..)
            | Request::MultiSet(_)
            | Request::QueuePush(..) => return None,
            Request::Check(_) => Shape::Bytes(1),
            Request::Wait(_) | Request::Barrier(..) => Shape::Awaited(0),
            Request::Fetch(keys) => Shape::Awaited(keys.len()),
            Request::Take(_) => Shape::Awaited(1),
            Request::Ping(_) => Shape::Bytes(4),
            Request::Add(..)
            | Request::GetNumKeys()
            | Request::DeleteKey(_)
            | Request::QueueLen(_) => Shape::Bytes(8),
            Request::CompareSet(..) | Request::Get(_) => Shape::Values(1),
            Request::MultiGet(keys) => Shape::Values(keys.len()),
            Request::QueuePop(_) => Shape::Item,
            Request::ListKeys() => Shape::Keys,
            Request::CancelWait() => Shape::Cancelled(0),
        })
    }

    /// The length of such a reply at the beginning of `bytes`; `None` if it is not complete.
    pub(super) fn length(self, bytes: &[u8]) -> Option<usize> {
        let number = |at: usize| {
            let bytes = bytes.get(at..at + 8)?.try_into().ok()?;
            usize::try_from(u64::from_le_bytes(bytes)).ok()
        };
        let values = |mut at: usize, count: usize| {
            for _ in 0..count {
                at = at.checked_add(8)?.checked_add(number(at)?)?;
            }
            Some(at)
        };
        let length = match self {
            Shape::Bytes(count) => count,
            Shape::Values(count) => values(0, count)?,
            Shape::Item if number(0)? == 0 => 8,
            Shape::Item => values(8, 1)?,
            Shape::Keys => values(8, number(0)?)?,
            Shape::Awaited(_) | Shape::Cancelled(_) if *bytes.first()? == WAIT_CANCELED => 1,
            Shape::Awaited(count) => values(1, count)?,
            Shape::Cancelled(count) => values(1, count)? + 1,
        };
        (bytes.len() >= length).then_some(length)
    }
}

impl Op {
    /// Asks `requests` in one piece. A wait must be the last, or cancelled by the next.
    pub(super) fn ask(requests: &[Request<'_>], patience: Nanos) -> Op {
        let mut bytes = Vec::new();
        requests.iter().for_each(|request| request.encode(&mut bytes));
        let mut replies = Vec::new();
        for shape in requests.iter().filter_map(Shape::of) {
            match (shape, replies.last_mut()) {
                (Shape::Cancelled(_), Some(wait @ &mut Shape::Awaited(count))) => {
                    *wait = Shape::Cancelled(count);
                }
                (shape, _) => replies.push(shape),
            }
        }
        Op::Ask {
            may_be_in_vain: matches!(replies.last(), Some(Shape::Awaited(_))),
            replies,
            requests: Bytes(bytes),
            expected: None,
            patience,
        }
    }

    /// The same with the replies that it must get.
    pub(super) fn expecting(mut self, replies: &[u8]) -> Op {
        if let Op::Ask { expected, .. } = &mut self {
            *expected = Some(Bytes(replies.to_vec()));
        }
        self
    }
}
