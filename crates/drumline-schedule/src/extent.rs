//! The lengths of buffers, and the borders of their blocks.
//!
//! A schedule names places symbolically, so one schedule serves every length. [`Collective::blocks`] says
//! which blocks each buffer has, and [`Counts`] how many elements the blocks of one call have.
//! [`Schedule::resolve`](crate::Schedule::resolve) combines the two.

use std::ops::Range;
use std::sync::Arc;

use crate::collective::Collective;
use crate::step::{Buffer, Rank, Span};

/// The blocks of a rank's buffer. See [`Collective::blocks`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Blocks {
    /// None: the buffer has no elements.
    None,
    /// One block, the rank's own. Spans cut it into any number of equal parts.
    One,
    /// A block for every rank, in the order of ranks. A span of whole blocks has the number of ranks as its
    /// `of`.
    All,
}

impl Collective {
    /// The blocks of `buffer` of `rank`. A block is what one rank contributes or gets.
    ///
    /// | | `Data` | `Input` | `Slot` |
    /// |---|---|---|---|
    /// | all_reduce, reduce, reduce_slices, broadcast | one | | one |
    /// | all_gather | all | one | all |
    /// | reduce_scatter | one | all | all |
    /// | gather | all at the root | one | one |
    /// | scatter | one | all at the root | all |
    /// | all_to_all | all | all | all |
    /// | barrier, monitored_barrier | | | |
    ///
    /// Spans of scratch count in parts of the rank's own block. In a reduce_scatter scratch has room for one block, and
    /// its span says whose.
    pub fn blocks(self, buffer: Buffer, rank: Rank, root: Rank) -> Blocks {
        let at_root = if rank == root { Blocks::All } else { Blocks::None };
        match (self, buffer) {
            _ if self.is_barrier() => Blocks::None,
            (Collective::ReduceScatter, Buffer::Scratch(_) | Buffer::Sum(_)) => Blocks::All,
            (_, Buffer::Scratch(_) | Buffer::Sum(_)) => Blocks::One,
            (Collective::Gather, Buffer::Data) | (Collective::Scatter, Buffer::Input) => at_root,
            (Collective::AllGather, Buffer::Data)
            | (Collective::AllGather | Collective::ReduceScatter, Buffer::Slot)
            | (Collective::ReduceScatter, Buffer::Input)
            | (Collective::Scatter, Buffer::Slot)
            | (Collective::AllToAll, _) => Blocks::All,
            (Collective::AllGather, Buffer::Input)
            | (Collective::Gather, Buffer::Input | Buffer::Slot) => Blocks::One,
            (_, Buffer::Input) => Blocks::None,
            (_, Buffer::Data | Buffer::Slot) => Blocks::One,
        }
    }
}

/// The borders of blocks of different lengths.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Borders(Arc<[usize]>);

impl Borders {
    /// The borders of consecutive blocks of these lengths; `None` if the sum overflows.
    pub fn new(counts: &[usize]) -> Option<Borders> {
        let mut borders = Vec::with_capacity(counts.len() + 1);
        let mut end: usize = 0;
        borders.push(end);
        for count in counts {
            end = end.checked_add(*count)?;
            borders.push(end);
        }
        Some(Borders(borders.into()))
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.0.len() - 1
    }

    /// Elements of all blocks together.
    pub fn total(&self) -> usize {
        self.0[self.blocks()]
    }

    /// The elements of one block.
    pub fn block(&self, index: usize) -> Range<usize> {
        self.0[index]..self.0[index + 1]
    }

    /// The elements that a span covers: whole blocks if its `of` is the number of blocks, else equal parts of
    /// the buffer.
    pub fn resolve(&self, span: Span) -> Range<usize> {
        match span.of == self.blocks() {
            true => self.0[span.first]..self.0[span.first + span.count],
            false => span.resolve(self.total()),
        }
    }
}

/// The lengths of the blocks of one call, as far as one rank knows them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Counts {
    /// Every block has this length.
    Even(usize),
    /// The blocks of all ranks, known to all ranks.
    ByRank(Borders),
    /// The blocks that this rank sends to and gets from each rank, in an all-to-all. There no rank knows what
    /// other ranks send each other.
    Own {
        /// The blocks of its [`Buffer::Input`].
        sent: Borders,
        /// The blocks of its [`Buffer::Data`].
        received: Borders,
    },
}

impl Counts {
    /// The elements of one block in `buffer`.
    pub fn block(&self, buffer: Buffer, index: Rank) -> usize {
        match (self, buffer) {
            (Counts::Even(elements), _) => *elements,
            (Counts::ByRank(borders), _) => borders.block(index).len(),
            (Counts::Own { sent, .. }, Buffer::Input) => sent.block(index).len(),
            (Counts::Own { received, .. }, Buffer::Data) => received.block(index).len(),
            // No algorithm of an uneven all-to-all uses these.
            (Counts::Own { .. }, Buffer::Scratch(_) | Buffer::Sum(_) | Buffer::Slot) => 0,
        }
    }

    /// The elements that `rank`, the owner of these counts, contributes or gets.
    pub fn of(&self, rank: Rank) -> usize {
        match self {
            Counts::Even(elements) => *elements,
            Counts::ByRank(borders) => borders.block(rank).len(),
            Counts::Own { sent, .. } => sent.total(),
        }
    }

    /// The elements of the longest block.
    pub fn longest(&self) -> usize {
        let longest = |borders: &Borders| {
            (0..borders.blocks()).map(|index| borders.block(index).len()).max().unwrap_or(0)
        };
        match self {
            Counts::Even(elements) => *elements,
            Counts::ByRank(borders) => longest(borders),
            Counts::Own { sent, received } => longest(sent).max(longest(received)),
        }
    }

    /// The elements that `span` covers in a `buffer` with a block for each of `world_size` ranks.
    pub fn resolve_in_all(&self, span: Span, buffer: Buffer, world_size: usize) -> Range<usize> {
        match (self, buffer) {
            (Counts::Even(elements), _) => span.resolve(world_size * elements),
            (Counts::ByRank(borders), _) => borders.resolve(span),
            (Counts::Own { sent, .. }, Buffer::Input) => sent.resolve(span),
            (Counts::Own { received, .. }, Buffer::Data) => received.resolve(span),
            (Counts::Own { .. }, Buffer::Scratch(_) | Buffer::Sum(_) | Buffer::Slot) => 0..0,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn equal_counts_are_even(count in 0_usize..50, blocks in 2_usize..9) {
            let borders = Borders::new(&vec![count; blocks]).unwrap();
            for first in 0..blocks {
                for span in [
                    Span::block(first, blocks),
                    Span { first: 0, count: first, of: blocks },
                    Span::WHOLE,
                    Span::EMPTY,
                ] {
                    prop_assert_eq!(borders.resolve(span), span.resolve(blocks * count));
                }
            }
        }

        #[test]
        fn uneven_blocks_tile_the_buffer(counts in prop::collection::vec(0_usize..9, 1..9)) {
            let borders = Borders::new(&counts).unwrap();
            let mut end = 0;
            for (index, &count) in counts.iter().enumerate() {
                let block = borders.resolve(Span::block(index, counts.len()));
                prop_assert_eq!(&block, &(end..end + count));
                end = block.end;
            }
            prop_assert_eq!(end, borders.total());
        }
    }

    #[test]
    fn lengths_that_no_memory_has_are_refused() {
        assert_eq!(Borders::new(&[usize::MAX, 1]), None);
        assert_eq!(Borders::new(&[]).unwrap().total(), 0);
    }
}
