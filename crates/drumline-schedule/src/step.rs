//! The verbs that every schedule is written in, and the places that they act on.
//!
//! # Shared memory
//!
//! Ranks on one host can act on each other's memory: a [`Loc`] may name a peer. Its
//! [`Buffer::Slot`] is open to peers always; one of the user's buffers only in algorithms that say so
//! ([`MemoryUse`](crate::MemoryUse)), an input to be read; its scratch never. [`Step::Post`] and
//! [`Step::Wait`] are what orders the accesses. Whoever runs schedules keeps these rules, and the
//! [checker](crate::check) supposes that it does:
//!
//! - Every rank posts equally often in an operation, [`Schedule::posts`](crate::Schedule::posts)
//!   times, so that ranks can count each other's posts from one operation to the next.
//! - **Entry.** Before the first step of an operation that posts, a rank waits until each peer on
//!   its host has posted at least once in the group's last operation that posted. Hence nobody is
//!   two such operations ahead.
//! - Each rank has two slots, which operations that post use in turn. By the rule of entry a rank
//!   that comes back to a slot finds that all peers have finished the operation which used it.
//!   A peer may write to a slot before its owner has called the operation.
//! - Two ranks that have their host to themselves may **exchange** slots instead: each has one, and
//!   from one operation that posts to the next they swap them. So a rank lays out what it brings
//!   where it has just read what its peer brought. Nobody but the reader touches what a rank has
//!   read of its peer's slot until the next operation.
//! - Where a peer must not touch a buffer before its owner has called, the owner posts first.
//! - Ranks that call different operations must find out. A description of the call travels beside
//!   the first post; it is not part of the schedule.
//!
//! An operation on more elements than a slot holds is run piece by piece, each piece a full run of
//! the schedule on a window of the data. Of a buffer with a block for every rank a window shows a
//! part of every block, so staged algorithms name such blocks one by one. Spans are symbolic: an
//! executor that wants the borders of blocks on cache lines may choose lengths of windows that make
//! them so.
//!
//! # Blocks of different lengths
//!
//! Algorithms that serve them ([`Algorithm::uneven`](crate::Algorithm::uneven)) name whole blocks
//! only, so their schedules are the same for all lengths.

use std::ops::Range;

use crate::tree::Node;

/// A rank of the group that runs the schedule: `0..world_size`.
pub type Rank = usize;

/// Blocks `first..first + count` of a buffer that is cut into `of` equal blocks.
///
/// A span is symbolic: the same one serves buffers of every length. Block `i` of a buffer of
/// `n` elements is `n * i / of .. n * (i + 1) / of`, so blocks differ by at most one element
/// and may be empty. A buffer that has a block for every rank may be cut at other
/// [borders](crate::Borders).
///
/// ```
/// use drumline_schedule::step::Span;
///
/// let third = Span::block(2, 3);
/// assert_eq!([9, 10, 1].map(|len| third.resolve(len)), [6..9, 6..10, 0..1]);
/// ```
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

    /// No elements: what a message that only tells the time carries.
    pub const EMPTY: Span = Span { first: 0, count: 0, of: 1 };

    /// Block `index` of `of`.
    ///
    /// ```
    /// use drumline_schedule::step::Span;
    ///
    /// assert_eq!(Span::block(2, 5), Span { first: 2, count: 1, of: 5 });
    /// ```
    pub const fn block(index: usize, of: usize) -> Span {
        Span { first: index, count: 1, of }
    }

    /// The elements of a buffer of `len` elements that this span covers.
    ///
    /// ```
    /// use drumline_schedule::step::Span;
    ///
    /// assert_eq!(Span::WHOLE.resolve(10), 0..10);
    /// assert_eq!(Span { first: 1, count: 2, of: 4 }.resolve(10), 2..7);
    /// ```
    pub fn resolve(self, len: usize) -> Range<usize> {
        if self == Span::WHOLE {
            return 0..len; // without a division, for what must be quick
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
    ///
    /// ```
    /// use drumline_schedule::step::Span;
    ///
    /// assert!(Span::block(0, 2).overlaps(Span::block(1, 3)));
    /// assert!(!Span::block(0, 2).overlaps(Span::block(1, 2)));
    /// assert!(!Span::EMPTY.overlaps(Span::WHOLE));
    /// ```
    pub fn overlaps(self, other: Span) -> bool {
        // As fractions of the buffer; borders are rounded down from these, so spans that are
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
///
/// ```
/// use drumline_schedule::step::{Buffer, Loc, Span};
///
/// let loc = Loc::scratch(1, Span::WHOLE);
/// assert_eq!(loc.buffer, Buffer::Scratch(1));
/// assert!(!loc.shares_buffer(Loc::scratch(0, Span::WHOLE)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Buffer {
    /// What the operation works on in place and leaves its result in.
    Data,
    /// This rank's contribution where it does not already lie in [`Buffer::Data`], read only.
    Input,
    /// Working memory. A span of a slot is counted in parts of the rank's own block (what it
    /// contributes, or gets), and may lie beyond it: block 2 of 1 begins at twice that length. Only
    /// the spans that the schedule names are backed by memory.
    Scratch(usize),
    /// This operation's staging slot in the memory that the ranks of a host share.
    Slot,
}

/// A span of a buffer.
///
/// ```
/// use drumline_schedule::step::{Buffer, Loc, Span};
///
/// // The second half of what rank 3 lays out for its neighbours.
/// let loc = Loc::slot(Span::block(1, 2)).of(3);
/// assert_eq!((loc.peer, loc.buffer), (Some(3), Buffer::Slot));
/// ```
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
    ///
    /// ```
    /// use drumline_schedule::step::{Buffer, Loc, Span};
    ///
    /// let loc = Loc::data(Span::WHOLE);
    /// assert_eq!((loc.peer, loc.buffer), (None, Buffer::Data));
    /// ```
    pub const fn data(span: Span) -> Loc {
        Loc { peer: None, buffer: Buffer::Data, span }
    }

    /// A span of [`Buffer::Input`].
    ///
    /// ```
    /// use drumline_schedule::step::{Buffer, Loc, Span};
    ///
    /// let loc = Loc::input(Span::WHOLE);
    /// assert_eq!((loc.peer, loc.buffer), (None, Buffer::Input));
    /// ```
    pub const fn input(span: Span) -> Loc {
        Loc { peer: None, buffer: Buffer::Input, span }
    }

    /// A span of scratch slot `slot`.
    ///
    /// ```
    /// use drumline_schedule::step::{Buffer, Loc, Span};
    ///
    /// assert_eq!(Loc::scratch(2, Span::WHOLE).buffer, Buffer::Scratch(2));
    /// ```
    pub const fn scratch(slot: usize, span: Span) -> Loc {
        Loc { peer: None, buffer: Buffer::Scratch(slot), span }
    }

    /// A span of [`Buffer::Slot`].
    ///
    /// ```
    /// use drumline_schedule::step::{Buffer, Loc, Span};
    ///
    /// let loc = Loc::slot(Span::WHOLE);
    /// assert_eq!((loc.peer, loc.buffer), (None, Buffer::Slot));
    /// ```
    pub const fn slot(span: Span) -> Loc {
        Loc { peer: None, buffer: Buffer::Slot, span }
    }

    /// The same place in the memory of `peer`, which shares the host.
    ///
    /// ```
    /// use drumline_schedule::step::{Loc, Span};
    ///
    /// let (mine, yours) = (Loc::slot(Span::WHOLE), Loc::slot(Span::WHOLE).of(1));
    /// assert!(yours.peer == Some(1) && !mine.overlaps(yours));
    /// ```
    pub const fn of(self, peer: Rank) -> Loc {
        Loc { peer: Some(peer), ..self }
    }

    /// Whether the two lie in the same buffer of the same rank.
    ///
    /// ```
    /// use drumline_schedule::step::{Loc, Span};
    ///
    /// let [first, second] = [0, 1].map(|half| Loc::data(Span::block(half, 2)));
    /// assert!(first.shares_buffer(second) && !first.overlaps(second));
    /// assert!(!first.shares_buffer(first.of(1)));
    /// ```
    pub fn shares_buffer(self, other: Loc) -> bool {
        self.peer == other.peer && self.buffer == other.buffer
    }

    /// Whether there is a length at which the two share an element.
    ///
    /// ```
    /// use drumline_schedule::step::{Loc, Span};
    ///
    /// let half = Loc::data(Span::block(0, 2));
    /// assert!(half.overlaps(Loc::data(Span::WHOLE)));
    /// assert!(!half.overlaps(Loc::input(Span::WHOLE)));
    /// ```
    pub fn overlaps(self, other: Loc) -> bool {
        self.shares_buffer(other) && self.span.overlaps(other.span)
    }
}

/// Which operand of a combination the incoming value is. Lower ranks stand on the left.
///
/// ```
/// use drumline_schedule::step::{Loc, Side, Span, Step};
///
/// /// What rank 1 does with a message of rank `from`: lower ranks stand on the left.
/// fn add(from: usize) -> Step {
///     let side = if from < 1 { Side::Left } else { Side::Right };
///     Step::RecvReduce { from, dst: Loc::data(Span::WHOLE), side, finish: true }
/// }
/// assert_eq!(add(0).to_string(), "recv+   data = finish((message of rank 0) + data)");
/// ```
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
///
/// ```
/// use drumline_schedule::step::{Loc, Span, Step};
///
/// let (data, input) = (Loc::data(Span::block(1, 3)), Loc::input(Span::WHOLE));
/// let steps = [Step::Copy { dst: data, src: input }, Step::Send { to: 2, src: data }];
/// assert_eq!(steps.map(|step| step.to_string().split(' ').next().map(str::to_owned)),
///     [Some("copy".to_owned()), Some("send".to_owned())]);
/// ```
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
    /// Combine many inputs in one pass, in the order of the canonical tree, and store the result
    /// in every destination.
    ReduceTree {
        /// Where the result goes: at least one place, each in a buffer of its own. They may be a
        /// peer's memory.
        dsts: Vec<Loc>,
        /// The inputs by ascending rank, each with the node of the tree that it is the sum
        /// of. Together they tile one node. An input is one of `dsts` or lies in another buffer.
        /// They may be a peer's memory. Where a schedule sums in stages, the leaves of the tree are
        /// the ranks of a host by their seats, or the hosts.
        srcs: Vec<(Node, Loc)>,
        /// Whether this completes the sum.
        finish: bool,
    },
    /// Copy between two different buffers. Either side may be a peer's memory.
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
    /// Make everything that this rank did so far visible to the peers on its host, and say so: its
    /// count of posts goes up by one.
    Post,
    /// Wait until `peer`, on the same host, has posted `upto` times in this operation.
    Wait {
        /// Whose posts are counted.
        peer: Rank,
        /// How many of them, counted from the start of the schedule.
        upto: usize,
    },
}

impl Step {
    /// The places that this step writes.
    ///
    /// ```
    /// use drumline_schedule::step::{Loc, Span, Step};
    ///
    /// let (data, input) = (Loc::data(Span::WHOLE), Loc::input(Span::WHOLE));
    /// let copy = Step::Copy { dst: data, src: input };
    /// assert!(copy.writes().eq([data]) && Step::Post.writes().next().is_none());
    /// ```
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

    /// The places that this step reads, a combination's own `dst` left out.
    ///
    /// ```
    /// use drumline_schedule::step::{Loc, Span, Step};
    ///
    /// let (data, input) = (Loc::data(Span::WHOLE), Loc::input(Span::WHOLE));
    /// let copy = Step::Copy { dst: data, src: input };
    /// assert!(copy.reads().eq([input]));
    /// ```
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
    pub(crate) fn moved(self, rank: impl Fn(Rank) -> Rank, loc: impl Fn(Loc) -> Loc) -> Step {
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
    ///
    /// ```
    /// use drumline_schedule::step::{Loc, Span, Step};
    ///
    /// let send = Step::Send { to: 2, src: Loc::data(Span::WHOLE) };
    /// assert_eq!((send.peer(), Step::Post.peer()), (Some(2), None));
    /// ```
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
