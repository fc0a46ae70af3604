//! Collectives that distribute the data of one rank: broadcast and scatter.

use drumline_schedule::{Collective, step::Rank};

use super::{Ask, ProcessGroup};
use crate::{Begun, Element, Result};

impl ProcessGroup {
    /// Copies the `data` of rank `root` to every rank.
    ///
    /// All ranks pass the same number of elements. On the root, success means that the data has
    /// been sent, not that it has arrived.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when there is no rank `root`; otherwise as
    /// for [`ProcessGroup::all_reduce`].
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: Rank) -> Result<()> {
        self.run(Ask::of::<T>(Collective::Broadcast).at(root), data, &[])
    }

    /// [`ProcessGroup::broadcast`] in the background.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when there is no rank `root`.
    pub fn broadcast_async<T, B>(&self, buffer: B, root: Rank) -> Begun<B>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        self.submit(Ask::of::<T>(Collective::Broadcast).at(root), buffer, [])
    }

    /// Sends block `i` of rank `root`'s `input` to rank `i`, into `output`.
    ///
    /// All ranks pass outputs of the same length. At the root, `input` holds `world_size` times as many elements; on
    /// other ranks it is empty. On the root, success means that the blocks have been sent, not that they have arrived.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when the lengths do not fit or there is no
    /// rank `root`; otherwise as for [`ProcessGroup::all_reduce`]. The root needs no answer from others: it
    /// learns of a mismatch in its next call or in [`destroy`](ProcessGroup::destroy).
    pub fn scatter<T: Element>(&self, input: &[T], output: &mut [T], root: Rank) -> Result<()> {
        self.run(Ask::of::<T>(Collective::Scatter).at(root), output, input)
    }

    /// [`ProcessGroup::scatter`] in the background. Gives `output` back.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when the lengths do not fit or there is no
    /// rank `root`.
    pub fn scatter_async<T, I, B>(&self, input: I, output: B, root: Rank) -> Begun<B>
    where
        T: Element,
        I: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        self.submit(Ask::of::<T>(Collective::Scatter).at(root), output, input)
    }

    /// [`ProcessGroup::scatter`] of blocks of different lengths: rank `i` gets `counts[i]`
    /// elements. All ranks pass the same `counts`.
    ///
    /// # Errors
    ///
    /// As for [`ProcessGroup::scatter`].
    pub fn scatter_v<T: Element>(
        &self,
        input: &[T],
        counts: &[usize],
        output: &mut [T],
        root: Rank,
    ) -> Result<()> {
        self.run(Ask::of::<T>(Collective::Scatter).in_blocks(counts).at(root), output, input)
    }

    /// [`ProcessGroup::scatter_v`] in the background. Gives `output` back.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when the lengths do not fit or there is no
    /// rank `root`.
    pub fn scatter_v_async<T, I, B>(
        &self,
        input: I,
        counts: &[usize],
        output: B,
        root: Rank,
    ) -> Begun<B>
    where
        T: Element,
        I: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        self.submit(Ask::of::<T>(Collective::Scatter).in_blocks(counts).at(root), output, input)
    }
}
