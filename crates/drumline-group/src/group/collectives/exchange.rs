//! All-to-all: every rank has a block for every rank.

use drumline_schedule::Collective;

use super::{Ask, ProcessGroup};
use crate::{Begun, Element, Result};

impl ProcessGroup {
    /// Sends block `i` of each rank's `input` to rank `i`. `output` gets the blocks of all ranks, in order of rank.
    ///
    /// `input` and `output` have the same length on all ranks, and hold a block for each rank.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when the lengths differ or the ranks do not divide them;
    /// otherwise as for [`ProcessGroup::all_reduce`].
    pub fn all_to_all<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        self.run(Ask::of::<T>(Collective::AllToAll), output, input)
    }

    /// [`ProcessGroup::all_to_all`] in the background. Gives `output` back.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when the lengths do not fit.
    pub fn all_to_all_async<T, I, B>(&self, input: I, output: B) -> Begun<B>
    where
        T: Element,
        I: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        self.submit(Ask::of::<T>(Collective::AllToAll), output, input)
    }

    /// [`ProcessGroup::all_to_all`] of blocks of different lengths: this rank sends
    /// `send_counts[i]` elements to rank `i` and gets `recv_counts[i]` from it.
    ///
    /// If one rank sends a number of elements to another, that rank must expect the same number. No third
    /// rank needs to know it.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when counts and lengths do not fit on this rank.
    /// [`Collective`](crate::ErrorKind::Collective) names both ranks and both counts when two ranks disagree.
    pub fn all_to_all_v<T: Element>(
        &self,
        input: &[T],
        send_counts: &[usize],
        output: &mut [T],
        recv_counts: &[usize],
    ) -> Result<()> {
        let ask = Ask::of::<T>(Collective::AllToAll).exchanging(send_counts, recv_counts);
        self.run(ask, output, input)
    }

    /// [`ProcessGroup::all_to_all_v`] in the background. Gives `output` back.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when counts and lengths do not fit on this rank.
    pub fn all_to_all_v_async<T, I, B>(
        &self,
        input: I,
        send_counts: &[usize],
        output: B,
        recv_counts: &[usize],
    ) -> Begun<B>
    where
        T: Element,
        I: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let ask = Ask::of::<T>(Collective::AllToAll).exchanging(send_counts, recv_counts);
        self.submit(ask, output, input)
    }
}
