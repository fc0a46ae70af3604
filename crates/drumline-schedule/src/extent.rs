//! How long buffers are, and where their blocks begin.
//!
//! A schedule names places symbolically, so one schedule serves every length. This module turns its
//! names into elements: [`Collective::blocks`] says what each buffer is made of, [`Counts`] how
//! many elements the blocks of one call have, and [`Schedule::resolve`] puts the two together.

use std::ops::Range;
use std::sync::Arc;

use crate::algorithm::Collective;
use crate::schedule::Schedule;
use crate::step::{Buffer, Loc, Rank, Span};

/// What a buffer of a rank is made of. See [`Collective::blocks`].
///
/// ```
/// use drumline_schedule::{Blocks, Collective, step::Buffer};
///
/// let of = |rank| Collective::Gather.blocks(Buffer::Data, rank, 2);
/// assert_eq!([of(2), of(0)], [Blocks::All, Blocks::None]); // only the root gets anything
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Blocks {
    /// Nothing: it has no elements.
    None,
    /// One block, that of the rank itself. Spans cut it into as many equal parts as they like.
    One,
    /// A block for every rank, in their order. Spans of whole blocks are cut `of` the number of
    /// ranks.
    All,
}

impl Collective {
    /// What `buffer` of `rank` is made of. A block is what one rank contributes or gets.
    ///
    /// | | `Data` | `Input` | `Slot` |
    /// |---|---|---|---|
    /// | all_reduce, reduce, broadcast, scan, exclusive_scan | one | | one |
    /// | all_gather | all | one | one |
    /// | reduce_scatter | one | all | all |
    /// | gather | all at the root | one | one |
    /// | scatter | one | all at the root | all |
    /// | all_to_all | all | all | all |
    /// | barrier | | | |
    ///
    /// Scratch is counted in the rank's own block.
    ///
    /// ```
    /// use drumline_schedule::{Blocks, Collective, step::Buffer};
    ///
    /// let of = |buffer| Collective::ReduceScatter.blocks(buffer, 1, 0);
    /// assert_eq!([of(Buffer::Input), of(Buffer::Data)], [Blocks::All, Blocks::One]);
    /// ```
    pub fn blocks(self, buffer: Buffer, rank: Rank, root: Rank) -> Blocks {
        let at_root = if rank == root { Blocks::All } else { Blocks::None };
        match (self, buffer) {
            (Collective::Barrier, _) => Blocks::None,
            (_, Buffer::Scratch(_)) => Blocks::One,
            (Collective::Gather, Buffer::Data) | (Collective::Scatter, Buffer::Input) => at_root,
            (Collective::AllGather, Buffer::Data)
            | (Collective::ReduceScatter, Buffer::Input | Buffer::Slot)
            | (Collective::Scatter, Buffer::Slot)
            | (Collective::AllToAll, _) => Blocks::All,
            (Collective::AllGather | Collective::Gather, Buffer::Input | Buffer::Slot) => {
                Blocks::One
            }
            (_, Buffer::Input) => Blocks::None,
            (_, Buffer::Data | Buffer::Slot) => Blocks::One,
        }
    }
}

/// Where the blocks of a buffer begin and end, when they are not equally long.
///
/// ```
/// use drumline_schedule::{Borders, step::Span};
///
/// let borders = Borders::new(&[2, 0, 5]).ok_or("too long")?;
/// assert_eq!(borders.resolve(Span::block(2, 3)), 2..7);
/// assert_eq!(borders.resolve(Span::WHOLE), 0..7);
/// # Ok::<_, &str>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Borders(Arc<[usize]>);

impl Borders {
    /// Blocks of these lengths, one behind the other; `None` if no memory is as long.
    ///
    /// ```
    /// use drumline_schedule::Borders;
    ///
    /// assert_eq!(Borders::new(&[2, 0, 5]).map(|borders| borders.total()), Some(7));
    /// assert_eq!(Borders::new(&[usize::MAX, 1]), None);
    /// ```
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
    ///
    /// ```
    /// use drumline_schedule::Borders;
    ///
    /// let borders = Borders::new(&[2, 0, 5]).unwrap();
    /// assert_eq!(borders.blocks(), 3);
    /// ```
    pub fn blocks(&self) -> usize {
        self.0.len() - 1
    }

    /// Elements of all blocks together.
    ///
    /// ```
    /// use drumline_schedule::Borders;
    ///
    /// let borders = Borders::new(&[2, 0, 5]).unwrap();
    /// assert_eq!(borders.total(), 7);
    /// ```
    pub fn total(&self) -> usize {
        self.0[self.blocks()]
    }

    /// The elements of one block.
    ///
    /// ```
    /// use drumline_schedule::Borders;
    ///
    /// let borders = Borders::new(&[2, 0, 5]).unwrap();
    /// assert_eq!([0, 1, 2].map(|index| borders.block(index)), [0..2, 2..2, 2..7]);
    /// ```
    pub fn block(&self, index: usize) -> Range<usize> {
        self.0[index]..self.0[index + 1]
    }

    /// The elements that a span covers: whole blocks if it is cut into as many, else equal parts of
    /// the whole.
    ///
    /// ```
    /// use drumline_schedule::{Borders, step::Span};
    ///
    /// let borders = Borders::new(&[2, 0, 5]).unwrap();
    /// assert_eq!(borders.resolve(Span { first: 1, count: 2, of: 3 }), 2..7); // whole blocks
    /// assert_eq!(borders.resolve(Span::block(0, 7)), 0..1); // a seventh of all
    /// ```
    pub fn resolve(&self, span: Span) -> Range<usize> {
        match span.of == self.blocks() {
            true => self.0[span.first]..self.0[span.first + span.count],
            false => span.resolve(self.total()),
        }
    }
}

/// How many elements the blocks of one call have, as one rank knows it.
///
/// ```
/// use drumline_schedule::{Borders, Counts, step::Buffer};
///
/// // An uneven all-to-all: three elements to rank 1, four from there, nothing else.
/// let sent = Borders::new(&[0, 3]).unwrap();
/// let received = Borders::new(&[0, 4]).unwrap();
/// let counts = Counts::Own { sent, received };
/// assert_eq!(counts.block(Buffer::Input, 1), 3);
/// assert_eq!(counts.block(Buffer::Data, 1), 4);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Counts {
    /// Every block has so many.
    Even(usize),
    /// The block of each rank, known to all ranks.
    ByRank(Borders),
    /// What this rank sends to each rank, and gets from each: of an all-to-all, where no rank
    /// knows what others send each other.
    Own {
        /// The blocks of its [`Buffer::Input`].
        sent: Borders,
        /// The blocks of its [`Buffer::Data`].
        received: Borders,
    },
}

impl Counts {
    /// The elements of one block in `buffer`.
    ///
    /// ```
    /// use drumline_schedule::{Borders, Counts, step::Buffer};
    ///
    /// let counts = Counts::ByRank(Borders::new(&[2, 0, 5]).unwrap());
    /// assert_eq!(counts.block(Buffer::Data, 2), 5);
    /// assert_eq!(Counts::Even(7).block(Buffer::Data, 2), 7);
    /// ```
    pub fn block(&self, buffer: Buffer, index: Rank) -> usize {
        match (self, buffer) {
            (Counts::Even(elements), _) => *elements,
            (Counts::ByRank(borders), _) => borders.block(index).len(),
            (Counts::Own { sent, .. }, Buffer::Input) => sent.block(index).len(),
            (Counts::Own { received, .. }, Buffer::Data) => received.block(index).len(),
            // Uneven all-to-all has no algorithm that uses these.
            (Counts::Own { .. }, Buffer::Scratch(_) | Buffer::Slot) => 0,
        }
    }

    /// What `rank`, whose counts these are, brings, or gets.
    ///
    /// ```
    /// use drumline_schedule::{Borders, Counts};
    ///
    /// let counts = Counts::ByRank(Borders::new(&[2, 0, 5]).unwrap());
    /// assert_eq!((counts.of(2), Counts::Even(7).of(2)), (5, 7));
    /// ```
    pub fn of(&self, rank: Rank) -> usize {
        match self {
            Counts::Even(elements) => *elements,
            Counts::ByRank(borders) => borders.block(rank).len(),
            Counts::Own { sent, .. } => sent.total(),
        }
    }

    /// The elements of the longest block.
    ///
    /// ```
    /// use drumline_schedule::{Borders, Counts};
    ///
    /// let counts = Counts::ByRank(Borders::new(&[2, 0, 5]).unwrap());
    /// assert_eq!((counts.longest(), Counts::Even(7).longest()), (5, 7));
    /// ```
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
    ///
    /// ```
    /// use drumline_schedule::{Borders, Counts, step::{Buffer, Span}};
    ///
    /// let uneven = Counts::ByRank(Borders::new(&[2, 0, 5]).unwrap());
    /// let place = |counts: &Counts| counts.resolve_in_all(Span::block(2, 3), Buffer::Data, 3);
    /// assert_eq!([place(&uneven), place(&Counts::Even(7))], [2..7, 14..21]);
    /// ```
    pub fn resolve_in_all(&self, span: Span, buffer: Buffer, world_size: usize) -> Range<usize> {
        match (self, buffer) {
            (Counts::Even(elements), _) => span.resolve(world_size * elements),
            (Counts::ByRank(borders), _) => borders.resolve(span),
            (Counts::Own { sent, .. }, Buffer::Input) => sent.resolve(span),
            (Counts::Own { received, .. }, Buffer::Data) => received.resolve(span),
            (Counts::Own { .. }, Buffer::Scratch(_) | Buffer::Slot) => 0..0,
        }
    }
}

impl Schedule {
    /// What the buffer that `loc` names is made of.
    ///
    /// ```
    /// use drumline_schedule::{Algorithm, Blocks, Collective, Topology, step::{Loc, Span}};
    ///
    /// let row = Algorithm::find(Collective::AllGather, "bruck")?;
    /// let schedule = row.schedule(&Topology::flat(3), 1, 0)?;
    /// assert_eq!(schedule.blocks(Loc::data(Span::WHOLE)), Blocks::All);
    /// assert_eq!(schedule.blocks(Loc::input(Span::WHOLE)), Blocks::One);
    /// # Ok::<_, drumline_schedule::Error>(())
    /// ```
    pub fn blocks(&self, loc: Loc) -> Blocks {
        self.collective.blocks(loc.buffer, loc.peer.unwrap_or(self.rank), self.root)
    }

    /// The elements of its buffer that `loc` covers.
    ///
    /// ```
    /// use drumline_schedule::{Algorithm, Collective, Counts, Topology, step::{Loc, Span}};
    ///
    /// let row = Algorithm::find(Collective::AllGather, "bruck")?;
    /// let schedule = row.schedule(&Topology::flat(3), 1, 0)?;
    /// let place = |loc| schedule.resolve(loc, &Counts::Even(10));
    /// assert_eq!(place(Loc::data(Span::block(2, 3))), 20..30); // of all three
    /// assert_eq!(place(Loc::input(Span::WHOLE)), 0..10); // its own
    /// # Ok::<_, drumline_schedule::Error>(())
    /// ```
    pub fn resolve(&self, loc: Loc, counts: &Counts) -> Range<usize> {
        let owner = loc.peer.unwrap_or(self.rank);
        match self.blocks(loc) {
            Blocks::None => 0..0,
            Blocks::One => loc.span.resolve(counts.block(loc.buffer, owner)),
            Blocks::All => counts.resolve_in_all(loc.span, loc.buffer, self.world_size),
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
