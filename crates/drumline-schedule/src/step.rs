//! The verbs in which every schedule is written, and the places on which they act.
//!
//! # Shared memory
//!
//! Ranks on one host can access each other's memory: a [`Loc`] may name a neighbour. Every algorithm in
//! shared memory may access the neighbour's [`Buffer::Slot`]. Some also access one of the user's buffers
//! ([`MemoryUse`](crate::MemoryUse)); an input is read only. No algorithm accesses a neighbour's scratch.
//! [`Step::Post`] and [`Step::Wait`] order the accesses. An executor keeps these rules, and the checker
//! relies on them:
//!
//! - Every rank posts equally often in a call, [`Schedule::posts`](crate::Schedule::posts) times, so that
//!   ranks can count each other's posts from one call to the next.
//! - **Entry.** Before the first step of a call that posts, a rank waits until each neighbour has posted at
//!   least once in the group's last call that posted. Hence no rank is two such calls ahead.
//! - Each rank has two slots. Calls that post use them in turn. By the rule of entry, when a rank comes back
//!   to a slot, all neighbours have finished the call that used it. A neighbour may write to a slot before
//!   its owner has entered the call.
//! - Two ranks that are alone on their host may **exchange** slots instead: each has one slot, and they swap
//!   slots from one call that posts to the next. So a rank writes its contribution where it has just read the
//!   neighbour's contribution. Until the next call only the reader accesses what it has read there.
//! - Where a neighbour must not access a buffer before its owner has called, the owner posts first.
//! - Ranks that make different calls must find out. A description of the call travels beside the first post;
//!   it is not part of the schedule.
//!
//! Where a block has more elements than fit into a slot, the executor runs the schedule once for each window
//! of the data. In a buffer with a block for every rank, a window is a part of every block, so staged
//! algorithms name such blocks one by one. Spans are symbolic: an executor may choose lengths of windows that
//! put the borders of blocks on cache lines.
//!
//! # Blocks of different lengths
//!
//! Algorithms that serve them ([`Algorithm::uneven`](crate::Algorithm::uneven)) name whole blocks only, so
//! their schedules are the same for all lengths.

use std::ops::Range;

use crate::tree::Node;

pub use crate::tree::Rank;

/// Blocks `first..first + count` of a buffer that is cut into `of` equal blocks.
///
/// A span is symbolic: one span serves buffers of every length. Block `i` of a buffer of `n` elements is
/// `n * i / of .. n * (i + 1) / of`, so the lengths of blocks differ by at most one, and may be 0. A buffer
/// that has a block for every rank may be cut at other [borders](crate::Borders).
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

    /// No elements: the content of a message that only synchronises.
    pub const EMPTY: Span = Span { first: 0, count: 0, of: 1 };

    /// Block `index` of `of`.
    pub const fn block(index: usize, of: usize) -> Span {
        Span { first: index, count: 1, of }
    }

    /// The elements of a buffer of `len` elements that this span covers.
    pub fn resolve(self, len: usize) -> Range<usize> {
        if self == Span::WHOLE {
            return 0..len; // fast: no division
        }
        let border = |block: usize| match len.checked_mul(block) {
            Some(blocks) => blocks / self.of,
            // For buffers near the address space's size.
            None => (len as u128 * block as u128 / self.of as u128) as usize,
        };
        border(self.first)..border(self.first + self.count)
    }

    /// This span of a block instead of the whole buffer.
    pub(crate) const fn within(self, block: Span) -> Span {
        Span { first: block.first * self.of + self.first, of: block.of * self.of, ..self }
    }

    /// Whether there is a length at which the two spans of one buffer share an element.
    pub fn overlaps(self, other: Span) -> bool {
        // Compares fractions of the buffer. Borders are these fractions, rounded down, so spans that are
        // disjoint here are disjoint at every length.
        let begins_before_end_of = |a: Span, b: Span| {
            a.first as u128 * (b.of as u128) < (b.first as u128 + b.count as u128) * a.of as u128
        };
        self.count > 0
            && other.count > 0
            && begins_before_end_of(self, other)
            && begins_before_end_of(other, self)
    }
}

/// A buffer of a rank. [`Collective::blocks`](crate::Collective::blocks) says how long each is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Buffer {
    /// The buffer that the collective works on in place, and that gets the result.
    Data,
    /// This rank's contribution where it does not already lie in [`Buffer::Data`], read only.
    Input,
    /// Working memory, by number. A span counts in parts of the rank's own block (the one that it
    /// contributes, or gets), and may lie beyond it: block 2 of 1 begins at twice that length. In a reduce_scatter it
    /// says whose block lies there. Only the spans that the schedule names are backed by memory.
    Scratch(usize),
    /// Working memory for sums that are not finished, by number. Its elements have the width of sums; those of
    /// all other buffers have the width of the call's elements. Spans are as in [`Buffer::Scratch`]. Algorithms do
    /// not name it. [`Algorithm::narrow_schedule`](crate::Algorithm::narrow_schedule) does.
    Sum(usize),
    /// The staging slot of this call, in the memory that the ranks of a host share.
    Slot,
}

/// A span of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Loc {
    /// Whose memory: `None` is the rank's own, `Some` that of a peer on the same host.
    pub peer: Option<Rank>,
    /// Which buffer.
    pub buffer: Buffer,
    /// Which part of it.
    pub span: Span,
}

impl Loc {
    /// A span of [`Buffer::Data`].
    pub const fn data(span: Span) -> Loc {
        Loc { peer: None, buffer: Buffer::Data, span }
    }

    /// A span of [`Buffer::Input`].
    pub const fn input(span: Span) -> Loc {
        Loc { peer: None, buffer: Buffer::Input, span }
    }

    /// A span of scratch number `slot`.
    pub const fn scratch(slot: usize, span: Span) -> Loc {
        Loc { peer: None, buffer: Buffer::Scratch(slot), span }
    }

    /// A span of the place number `slot` for sums.
    pub const fn sum(slot: usize, span: Span) -> Loc {
        Loc { peer: None, buffer: Buffer::Sum(slot), span }
    }

    /// A span of [`Buffer::Slot`].
    pub const fn slot(span: Span) -> Loc {
        Loc { peer: None, buffer: Buffer::Slot, span }
    }

    /// The same place in the memory of `peer`, a neighbour.
    pub const fn of(self, peer: Rank) -> Loc {
        Loc { peer: Some(peer), ..self }
    }

    /// Whether the two lie in the same buffer of the same rank.
    pub fn shares_buffer(self, other: Loc) -> bool {
        self.peer == other.peer && self.buffer == other.buffer
    }

    /// Whether elements there have the width of sums, in a call whose elements are narrower.
    pub fn is_wide(self) -> bool {
        matches!(self.buffer, Buffer::Sum(_))
    }

    /// Whether there is a length at which the two share an element.
    pub fn overlaps(self, other: Loc) -> bool {
        self.shares_buffer(other) && self.span.overlaps(other.span)
    }
}

/// On which side of a combination the incoming value is. Lower ranks are on the left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// `incoming + dst`
    Left,
    /// `dst + incoming`
    Right,
}

/// One step of a schedule. Steps take effect in order; only a `Send` continues in the background.
///
/// A combining step with `finish` completes the sum of all ranks: the executor then applies the last part of
/// the operator to the result (the division of an average).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Send a message. Never blocks; the transport may read `src` until a [`Step::Flush`] covers it.
    Send {
        /// Receiver.
        to: Rank,
        /// The elements that are sent.
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
    /// Combine `src` into `dst`. Both are the rank's own, and lie in different buffers.
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
    /// Combine many inputs in one pass, in the order of the canonical tree, and store the result
    /// in every destination.
    ReduceTree {
        /// Where the result goes: at least one place, each in a different buffer. They may lie in a
        /// neighbour's memory.
        dsts: Vec<Loc>,
        /// The inputs by ascending rank, each with the node of the tree whose sum it is. Together they tile
        /// one node. An input is one of `dsts`, or lies in another buffer. It may lie in a neighbour's
        /// memory. Where a schedule sums in stages, the leaves of the tree are the seats of a host, or the
        /// hosts.
        srcs: Vec<(Node, Loc)>,
        /// Whether this completes the sum.
        finish: bool,
    },
    /// Copy between two different buffers. Either may lie in a neighbour's memory.
    Copy {
        /// Where to.
        dst: Loc,
        /// Where from.
        src: Loc,
    },
    /// Wait until the first `upto` messages of this schedule to `to` have left their source.
    /// Algorithms do not write this step. A pass inserts it before memory is overwritten, and at the end.
    Flush {
        /// Receiver of those messages.
        to: Rank,
        /// The number of messages, from the start of the schedule.
        upto: usize,
    },
    /// Make everything that this rank has done visible to its neighbours, and tell them: the rank's count of
    /// posts goes up by one.
    Post,
    /// Wait until `peer`, a neighbour, has posted `upto` times in this call.
    Wait {
        /// Whose posts are counted.
        peer: Rank,
        /// The number of posts, from the start of the schedule.
        upto: usize,
    },
}

impl Step {
    /// The places that this step writes.
    pub fn writes(&self) -> impl Iterator<Item = Loc> {
        let (one, many) = match self {
            Step::Recv { dst, .. }
            | Step::RecvReduce { dst, .. }
            | Step::Reduce { dst, .. }
            | Step::Copy { dst, .. } => (Some(*dst), &[][..]),
            Step::ReduceTree { dsts, .. } => (None, &dsts[..]),
            Step::Send { .. } | Step::Flush { .. } | Step::Post | Step::Wait { .. } => {
                (None, &[][..])
            }
        };
        one.into_iter().chain(many.iter().copied())
    }

    /// The places that this step reads, other than the `dst` of a combination.
    pub fn reads(&self) -> impl Iterator<Item = Loc> {
        let (one, many) = match self {
            Step::Send { src, .. } | Step::Reduce { src, .. } | Step::Copy { src, .. } => {
                (Some(*src), &[][..])
            }
            Step::ReduceTree { srcs, .. } => (None, &srcs[..]),
            Step::Recv { .. }
            | Step::RecvReduce { .. }
            | Step::Flush { .. }
            | Step::Post
            | Step::Wait { .. } => (None, &[][..]),
        };
        one.into_iter().chain(many.iter().map(|&(_, loc)| loc))
    }

    /// The same step for other ranks and other places.
    pub fn moved(self, rank: impl Fn(Rank) -> Rank, loc: impl Fn(Loc) -> Loc) -> Step {
        match self {
            Step::Send { to, src } => Step::Send { to: rank(to), src: loc(src) },
            Step::Recv { from, dst } => Step::Recv { from: rank(from), dst: loc(dst) },
            Step::RecvReduce { from, dst, side, finish } => {
                Step::RecvReduce { from: rank(from), dst: loc(dst), side, finish }
            }
            Step::Reduce { dst, src, side, finish } => {
                Step::Reduce { dst: loc(dst), src: loc(src), side, finish }
            }
            Step::ReduceTree { dsts, srcs, finish } => Step::ReduceTree {
                dsts: dsts.into_iter().map(&loc).collect(),
                srcs: srcs.into_iter().map(|(node, src)| (node, loc(src))).collect(),
                finish,
            },
            Step::Copy { dst, src } => Step::Copy { dst: loc(dst), src: loc(src) },
            Step::Flush { to, upto } => Step::Flush { to: rank(to), upto },
            Step::Post => Step::Post,
            Step::Wait { peer, upto } => Step::Wait { peer: rank(peer), upto },
        }
    }

    /// The rank at the other end of a message or of a wait.
    pub fn peer(&self) -> Option<Rank> {
        match self {
            Step::Send { to, .. } | Step::Flush { to, .. } => Some(*to),
            Step::Recv { from, .. } | Step::RecvReduce { from, .. } => Some(*from),
            Step::Wait { peer, .. } => Some(*peer),
            Step::Reduce { .. } | Step::ReduceTree { .. } | Step::Copy { .. } | Step::Post => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn span() -> impl Strategy<Value = Span> {
        (1usize..40)
            .prop_flat_map(|of| (0..=of, Just(of)))
            .prop_flat_map(|(first, of)| (Just(first), 0..=of - first, Just(of)))
            .prop_map(|(first, count, of)| Span { first, count, of })
    }

    fn share_an_element(a: Span, b: Span, len: usize) -> bool {
        let (a, b) = (a.resolve(len), b.resolve(len));
        a.start.max(b.start) < a.end.min(b.end)
    }

    proptest! {
        #[test]
        fn blocks_tile_the_buffer_evenly(len in 0usize..5_000, of in 1usize..300) {
            let mut end = 0;
            for index in 0..of {
                let block = Span::block(index, of).resolve(len);
                prop_assert_eq!(block.start, end);
                prop_assert!((len / of..=len.div_ceil(of)).contains(&block.len()));
                end = block.end;
            }
            prop_assert_eq!(end, len);
        }

        #[test]
        fn a_span_is_its_blocks(span in span(), len in 0usize..5_000) {
            let range = span.resolve(len);
            let blocks = (span.first..span.first + span.count)
                .flat_map(|index| Span::block(index, span.of).resolve(len));
            prop_assert_eq!(blocks.collect::<Vec<_>>(), range.collect::<Vec<_>>());
        }

        #[test]
        fn overlaps_means_at_some_length(a in span(), b in span(), len in 0usize..5_000) {
            if a.overlaps(b) {
                // Every border of both is exact here.
                prop_assert!(share_an_element(a, b, a.of * b.of));
            } else {
                prop_assert!(!share_an_element(a, b, len));
            }
        }
    }

    #[test]
    fn spans_of_huge_buffers_do_not_overflow() {
        assert_eq!(Span::block(2, 3).resolve(usize::MAX).end, usize::MAX);
        assert_eq!(Span::EMPTY.resolve(usize::MAX).len(), 0);
    }
}
