//! Messages from rank to rank.

use crate::member::posting::{MessageOrder, Side};
use drumline_conformance::{Case, Kind};
use drumline_schedule::Topology;

/// Messages that some ranks send to one rank, which may be one of them.
#[derive(Clone, Debug)]
pub(crate) struct Messages {
    pub(crate) group: usize,
    pub(crate) from: Vec<usize>,
    pub(crate) to: usize,
    pub(crate) tag: u64,
    /// Whether the receiver names no sender and takes messages in the order in which they arrive.
    pub(crate) any: bool,
    /// A broadcast. Each sender sends the bytes that it would broadcast as the root.
    pub(crate) case: Case,
    /// Index of the planned call before which all ranks post these messages.
    pub(crate) before: usize,
}

impl Messages {
    /// The send or receive that `rank` posts.
    pub(crate) fn order(&self, rank: usize, side: Side) -> MessageOrder {
        let sent = self.sent_by(rank);
        let bytes = match side {
            Side::SendTo(_) => sent,
            Side::ReceiveFrom(_) | Side::ReceiveFromAny => vec![0xa5; sent.len()],
        };
        MessageOrder { side, tag: self.tag, dtype: self.case.dtype, bytes }
    }

    /// The bytes that a rank sends.
    pub(crate) fn sent_by(&self, rank: usize) -> Vec<u8> {
        let case = Case { kind: Kind::Broadcast(rank), ..self.case };
        case.expected(rank, &Topology::flat(rank + 1))
    }
}
