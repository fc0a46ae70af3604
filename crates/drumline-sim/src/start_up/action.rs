//! What a client of the store does next, and the format of replies.

use std::{collections::BTreeSet, fmt};

use drumline_engine::transport::Channel;
use drumline_schedule::step::Rank;
use drumline_store::store::tcp::protocol::{Request, WAIT_CANCELED};

use crate::time::Nanos;

/// What a process does next.
#[derive(Clone, Debug)]
pub(super) enum Action {
    /// Sends requests in one piece and reads the replies to all of them.
    Ask {
        requests: Bytes,
        replies: Vec<ReplyFormat>,
        patience: Nanos,
        /// Whether the store may never answer.
        may_be_in_vain: bool,
    },
    /// Waits for keys, and then gets what the client wants.
    Wait {
        keys: Vec<Bytes>,
        wants: Want,
        patience: Nanos,
    },
    /// Adds `adds`. With `looks`, asks again until the sum is `all`. If it is not in time, that is an error with `must`.
    Join {
        key: Bytes,
        adds: i64,
        all: i64,
        looks: bool,
        must: bool,
        patience: Nanos,
    },
    /// Looks at the signs of other ranks.
    Look(BTreeSet<String>),
    Pause(Nanos),
    /// Calls a rank of the same host.
    Dial {
        from: Rank,
        to: Rank,
        channel: Channel,
        patience: Nanos,
    },
    /// Accepts calls of other ranks until this time.
    Accept {
        rank: Rank,
        until: Nanos,
    },
    /// Sends arbitrary bytes, and closes the connection after a while.
    Shout {
        bytes: Bytes,
        linger: Nanos,
    },
    /// Sends the beginning of a request, and dies.
    Die {
        bytes: Bytes,
    },
}

/// What a client wants once its keys are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Want {
    Nothing,
    Values,
    /// An item of the queue under the first key.
    Item,
}

/// Bytes that are printed as text.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Bytes(pub(super) Vec<u8>);

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.escape_ascii())
    }
}

/// The format of a reply, which says how long the reply is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReplyFormat {
    Bytes(usize),
    /// This number of values.
    Values(usize),
    /// A number, and a value unless the number is 0.
    Item,
    /// A number, and this number of keys.
    Keys,
    /// Either the end of a wait and this number of values, or a cancellation.
    Awaited(usize),
    /// A cancellation, perhaps behind the end of a wait and this number of values.
    Cancelled(usize),
}

impl ReplyFormat {
    /// The format of the reply to a request; `None` if there is no reply.
    pub(super) fn of(request: &Request<'_>) -> Option<ReplyFormat> {
        Some(match request {
            Request::Validate(_)
            | Request::Set(..)
            | Request::Append(..)
            | Request::MultiSet(_)
            | Request::QueuePush(..) => return None,
            Request::Check(_) => ReplyFormat::Bytes(1),
            Request::Wait(_) | Request::Barrier(..) => ReplyFormat::Awaited(0),
            Request::Fetch(keys) => ReplyFormat::Awaited(keys.len()),
            Request::Take(_) => ReplyFormat::Awaited(1),
            Request::Ping(_) => ReplyFormat::Bytes(4),
            Request::Add(..)
            | Request::GetNumKeys()
            | Request::DeleteKey(_)
            | Request::QueueLen(_) => ReplyFormat::Bytes(8),
            Request::CompareSet(..) | Request::Get(_) => ReplyFormat::Values(1),
            Request::MultiGet(keys) => ReplyFormat::Values(keys.len()),
            Request::QueuePop(_) => ReplyFormat::Item,
            Request::ListKeys() => ReplyFormat::Keys,
            Request::CancelWait() => ReplyFormat::Cancelled(0),
        })
    }

    /// The length of the reply at the start of `bytes`; `None` if it is not complete.
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
            ReplyFormat::Bytes(count) => count,
            ReplyFormat::Values(count) => values(0, count)?,
            ReplyFormat::Item if number(0)? == 0 => 8,
            ReplyFormat::Item => values(8, 1)?,
            ReplyFormat::Keys => values(8, number(0)?)?,
            ReplyFormat::Awaited(_) | ReplyFormat::Cancelled(_)
                if *bytes.first()? == WAIT_CANCELED =>
            {
                1
            }
            ReplyFormat::Awaited(count) => values(1, count)?,
            ReplyFormat::Cancelled(count) => values(1, count)? + 1,
        };
        (bytes.len() >= length).then_some(length)
    }
}

impl Action {
    /// Sends `requests` in one piece. A wait must be the last one, or the next one must cancel it.
    pub(super) fn ask(requests: &[Request<'_>], patience: Nanos) -> Action {
        let mut bytes = Vec::new();
        requests.iter().for_each(|request| request.encode(&mut bytes));
        let mut replies = Vec::new();
        for shape in requests.iter().filter_map(ReplyFormat::of) {
            match (shape, replies.last_mut()) {
                (ReplyFormat::Cancelled(_), Some(wait @ &mut ReplyFormat::Awaited(count))) => {
                    *wait = ReplyFormat::Cancelled(count);
                }
                (shape, _) => replies.push(shape),
            }
        }
        Action::Ask {
            may_be_in_vain: matches!(replies.last(), Some(ReplyFormat::Awaited(_))),
            replies,
            requests: Bytes(bytes),
            patience,
        }
    }
}
