//! The verbs that every schedule is written in, and the places that they act on.

use std::ops::Range;

use crate::tree::Node;

/// A rank of the group that runs the schedule: `0..world_size`.
pub type Rank = usize;

/// Blocks `first..first + count` of a buffer that is cut into `of` equal blocks.
///
/// A span is symbolic: the same one serves buffers of every length. Block `i` of a buffer of
/// `n` elements is `n * i / of .. n * (i + 1) / of`, so blocks differ by at most one element
/// and may be empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Span {
    /// Index of the first block.
    pub first: usize,
    /// Number of blocks.
    pub count: usize,
    /// Number of blocks in the whole buffer, at least 1.
    pub of: usize,
}

impl Span {
    /// The whole buffer.
    pub const WHOLE: Span = Span { first: 0, count: 1, of: 1 };

    /// Block `index` of `of`.
    pub const fn block(index: usize, of: usize) -> Span {
        Span { first: index, count: 1, of }
    }

    /// The elements of a buffer of `len` elements that this span covers.
    pub fn resolve(self, len: usize) -> Range<usize> {
        // u128: len * first may exceed usize for buffers near the address space's size.
        let border = |block: usize| (len as u128 * block as u128 / self.of as u128) as usize;
        border(self.first)..border(self.first + self.count)
    }
}

/// A buffer of the rank that runs the schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Buffer {
    /// What the operation works on in place and leaves its result in.
    Data,
    /// This rank's contribution where it does not already lie in [`Buffer::Data`]
    /// (all-gather): `1/world_size` of the length of `Data`, read only.
    Input,
    /// Working memory. A slot has the length of `Data`, but only the spans that the schedule
    /// names are backed by memory.
    Scratch(usize),
}

/// A span of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Loc {
    /// Which buffer.
    pub buffer: Buffer,
    /// Which part of it.
    pub span: Span,
}

impl Loc {
    /// A span of [`Buffer::Data`].
    pub const fn data(span: Span) -> Loc {
        Loc { buffer: Buffer::Data, span }
    }

    /// A span of scratch slot `slot`.
    pub const fn scratch(slot: usize, span: Span) -> Loc {
        Loc { buffer: Buffer::Scratch(slot), span }
    }
}

/// Which operand of a combination the incoming value is. Lower ranks stand on the left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// `incoming + dst`
    Left,
    /// `dst + incoming`
    Right,
}

/// One step of a schedule. Steps take effect in order; only `Send` goes on in the background.
///
/// A combining verb with `finish` set completes the sum of all ranks: the operator's last
/// touch (the division of an average) is applied to its result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Post a message. Never blocks; `src` may be read until a [`Step::Flush`] covers it.
    Send {
        /// Receiver.
        to: Rank,
        /// What is sent.
        src: Loc,
    },
    /// Wait for the next message from `from` and store it.
    Recv {
        /// Sender.
        from: Rank,
        /// Where the message goes.
        dst: Loc,
    },
    /// Wait for the next message from `from` and combine it into `dst`.
    RecvReduce {
        /// Sender.
        from: Rank,
        /// The other operand, and the result.
        dst: Loc,
        /// Which operand the message is.
        side: Side,
        /// Whether this completes the sum.
        finish: bool,
    },
    /// Combine `src` into `dst`; both are local and lie in different buffers.
    Reduce {
        /// The other operand, and the result.
        dst: Loc,
        /// The incoming operand.
        src: Loc,
        /// Which operand `src` is.
        side: Side,
        /// Whether this completes the sum.
        finish: bool,
    },
    /// Combine many inputs in one pass, in the order of the canonical tree.
    ReduceTree {
        /// The result.
        dst: Loc,
        /// The inputs by ascending rank, each with the node of the tree that it is the sum
        /// of. Together they tile one node. An input is `dst` itself or lies in another buffer.
        srcs: Vec<(Node, Loc)>,
        /// Whether this completes the sum.
        finish: bool,
    },
    /// Copy between local buffers.
    Copy {
        /// Where to.
        dst: Loc,
        /// Where from.
        src: Loc,
    },
    /// Wait until the first `upto` messages of this schedule to `to` have left their source.
    /// Algorithms do not write this verb; a pass inserts it where memory is about to be
    /// overwritten, and at the end.
    Flush {
        /// Receiver of those messages.
        to: Rank,
        /// How many, counted from the start of the schedule.
        upto: usize,
    },
}
