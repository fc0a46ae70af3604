//! Collectives that collect the blocks of all ranks: all_gather and gather.

use drumline_schedule::{Collective, step::Rank};

use super::{Ask, ProcessGroup};
use crate::{Begun, Element, Result};

impl ProcessGroup {
    /// Collects the `input` of every rank in `output`, in order of rank.
    ///
    /// All ranks pass the same number of elements; `output` holds `world_size` times as many.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when the lengths do not fit;
    /// otherwise as for [`ProcessGroup::all_reduce`].
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        self.run(Ask::of::<T>(Collective::AllGather), output, input)
    }

    /// [`ProcessGroup::all_gather`] in the background. Gives `output` back.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when the lengths do not fit.
    pub fn all_gather_async<T, I, B>(&self, input: I, output: B) -> Begun<B>
    where
        T: Element,
        I: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        self.submit(Ask::of::<T>(Collective::AllGather), output, input)
    }

    /// [`ProcessGroup::all_gather`] of blocks of different lengths: rank `i` brings `counts[i]`
    /// elements. All ranks pass the same `counts`.
    ///
    /// # Errors
    ///
    /// As for [`ProcessGroup::all_gather`].
    pub fn all_gather_v<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
    ) -> Result<()> {
        self.run(Ask::of::<T>(Collective::AllGather).in_blocks(counts), output, input)
    }

    /// [`ProcessGroup::all_gather_v`] in the background. Gives `output` back.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when the lengths do not fit.
    pub fn all_gather_v_async<T, I, B>(&self, input: I, output: B, counts: &[usize]) -> Begun<B>
    where
        T: Element,
        I: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        self.submit(Ask::of::<T>(Collective::AllGather).in_blocks(counts), output, input)
    }

    /// Collects the `input` of every rank in `output` at rank `root`, in order of rank.
    ///
    /// All ranks pass the same number of elements. At the root, `output` holds `world_size` times as many; on other
    /// ranks it is empty. On those, success means that their elements have been taken, not that they have arrived.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when the lengths do not fit or there is no
    /// rank `root`; otherwise as for [`ProcessGroup::all_reduce`]. A rank that needs no answer from others
    /// learns of a mismatch in its next call or in [`destroy`](ProcessGroup::destroy).
    pub fn gather<T: Element>(&self, input: &[T], output: &mut [T], root: Rank) -> Result<()> {
        self.run(Ask::of::<T>(Collective::Gather).at(root), output, input)
    }

    /// [`ProcessGroup::gather`] in the background. Gives `output` back.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when the lengths do not fit or there is no
    /// rank `root`.
    pub fn gather_async<T, I, B>(&self, input: I, output: B, root: Rank) -> Begun<B>
    where
        T: Element,
        I: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        self.submit(Ask::of::<T>(Collective::Gather).at(root), output, input)
    }

    /// [`ProcessGroup::gather`] of blocks of different lengths: rank `i` brings `counts[i]`
    /// elements. All ranks pass the same `counts`.
    ///
    /// # Errors
    ///
    /// As for [`ProcessGroup::gather`].
    pub fn gather_v<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
        root: Rank,
    ) -> Result<()> {
        self.run(Ask::of::<T>(Collective::Gather).in_blocks(counts).at(root), output, input)
    }

    /// [`ProcessGroup::gather_v`] in the background. Gives `output` back.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when the lengths do not fit or there is no
    /// rank `root`.
    pub fn gather_v_async<T, I, B>(
        &self,
        input: I,
        output: B,
        counts: &[usize],
        root: Rank,
    ) -> Begun<B>
    where
        T: Element,
        I: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        self.submit(Ask::of::<T>(Collective::Gather).in_blocks(counts).at(root), output, input)
    }
}
