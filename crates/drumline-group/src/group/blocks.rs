//! Collectives on blocks of different lengths.

use drumline_engine::operator::Operator;
use drumline_schedule::{Collective, step::Rank};

pub use super::ask::Lengths;
use super::{ProcessGroup, ask::Ask};
use crate::{Begun, Element, Result};

/// The calls of a group on blocks of these lengths: see [`ProcessGroup::in_blocks`].
#[derive(Clone, Copy, Debug)]
pub struct InBlocks<'a> {
    group: &'a ProcessGroup,
    lengths: Lengths<'a>,
}

impl ProcessGroup {
    /// Calls on blocks of different lengths: rank `i` has a block of `lengths[i]` elements. All ranks pass the same lengths.
    ///
    /// In an all-to-all, this rank sends as many elements to rank `i`, and gets as many from it. If it gets others than
    /// it sends, it passes a pair: the lengths that it sends, and those that it gets. If one rank sends a number of elements
    /// to another, that rank must expect the same number. No third rank needs to know it.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// let group = drumline::ProcessGroup::alone();
    /// let (mut all, mut back) = ([0; 2], [0; 2]);
    /// group.in_blocks(&[2]).all_gather(&[1, 2], &mut all)?;
    /// group.in_blocks((&[2], &[2])).all_to_all(&all, &mut back)?;
    /// assert_eq!(back, [1, 2]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    pub fn in_blocks<'a>(&'a self, lengths: impl Into<Lengths<'a>>) -> InBlocks<'a> {
        InBlocks { group: self, lengths: lengths.into() }
    }
}

/// Errors are those of the calls of the same names on a [`ProcessGroup`], and
/// [`Argument`](crate::ErrorKind::Argument) for lengths that do not fit the buffers or the group.
impl<'a> InBlocks<'a> {
    fn ask<T: Element>(self, collective: Collective) -> Ask<'a> {
        Ask::of::<T>(collective).in_blocks(self.lengths)
    }

    /// [`ProcessGroup::all_gather`] of these blocks.
    pub fn all_gather<T: Element>(self, input: &[T], output: &mut [T]) -> Result<()> {
        self.group.run(self.ask::<T>(Collective::AllGather), output, input)
    }

    /// [`ProcessGroup::all_gather_async`] of these blocks.
    pub fn all_gather_async<T, I, B>(self, input: I, output: B) -> Begun<B>
    where
        T: Element,
        I: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        self.group.submit(self.ask::<T>(Collective::AllGather), output, input)
    }

    /// [`ProcessGroup::gather`] of these blocks.
    pub fn gather<T: Element>(self, input: &[T], output: &mut [T], root: Rank) -> Result<()> {
        self.group.run(self.ask::<T>(Collective::Gather).at(root), output, input)
    }

    /// [`ProcessGroup::gather_async`] of these blocks.
    pub fn gather_async<T, I, B>(self, input: I, output: B, root: Rank) -> Begun<B>
    where
        T: Element,
        I: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        self.group.submit(self.ask::<T>(Collective::Gather).at(root), output, input)
    }

    /// [`ProcessGroup::scatter`] of these blocks.
    pub fn scatter<T: Element>(self, input: &[T], output: &mut [T], root: Rank) -> Result<()> {
        self.group.run(self.ask::<T>(Collective::Scatter).at(root), output, input)
    }

    /// [`ProcessGroup::scatter_async`] of these blocks.
    pub fn scatter_async<T, I, B>(self, input: I, output: B, root: Rank) -> Begun<B>
    where
        T: Element,
        I: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        self.group.submit(self.ask::<T>(Collective::Scatter).at(root), output, input)
    }

    /// [`ProcessGroup::reduce_scatter`] into these blocks.
    pub fn reduce_scatter<T: Element>(
        self,
        input: &[T],
        output: &mut [T],
        op: impl Into<Operator<T>>,
    ) -> Result<()> {
        let ask = self.ask::<T>(Collective::ReduceScatter).of_type_by(op);
        self.group.run(ask, output, input)
    }

    /// [`ProcessGroup::reduce_scatter_async`] into these blocks.
    pub fn reduce_scatter_async<T, I, B>(
        self,
        input: I,
        output: B,
        op: impl Into<Operator<T>>,
    ) -> Begun<B>
    where
        T: Element,
        I: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        self.group.submit(self.ask::<T>(Collective::ReduceScatter).of_type_by(op), output, input)
    }

    /// [`ProcessGroup::all_to_all`] of these blocks.
    pub fn all_to_all<T: Element>(self, input: &[T], output: &mut [T]) -> Result<()> {
        self.group.run(self.ask::<T>(Collective::AllToAll), output, input)
    }

    /// [`ProcessGroup::all_to_all_async`] of these blocks.
    pub fn all_to_all_async<T, I, B>(self, input: I, output: B) -> Begun<B>
    where
        T: Element,
        I: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        self.group.submit(self.ask::<T>(Collective::AllToAll), output, input)
    }
}
