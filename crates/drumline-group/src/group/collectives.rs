//! The collectives on slices of elements, blocking and asynchronous. All of them [ask](Ask) for a call on bytes.

use std::time::Duration;

use drumline_engine::operator::Operator;
use drumline_schedule::{Collective, step::Rank};

use super::{ProcessGroup, ask::Ask};
use crate::{Begun, Element, Error, Result};

impl ProcessGroup {
    /// Reduces `data` over all ranks, in place. Afterwards `data` is the same on every rank.
    ///
    /// All ranks pass the same number of elements. The result has the same bits with every algorithm, because
    /// all algorithms add in the same order (payloads of NaN apart). Sums of 16-bit floats are kept in `f32`
    /// and rounded once.
    ///
    /// # Errors
    ///
    /// [`Collective`](crate::ErrorKind::Collective) says which rank did what;
    /// [`Poisoned`](crate::ErrorKind::Poisoned) after a failure.
    pub fn all_reduce<T: Element>(&self, data: &mut [T], op: impl Into<Operator<T>>) -> Result<()> {
        self.run(Ask::of::<T>(Collective::AllReduce).of_type_by(op), data, &[])
    }

    /// [`ProcessGroup::all_reduce`] in the background.
    ///
    /// The buffer may be anything that can be used as a slice: a `Vec<T>`, a `Box<[T]>`, a
    /// [`RegisteredBuffer<T>`](crate::RegisteredBuffer).
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when the elements do not have the operator.
    pub fn all_reduce_async<T, B>(&self, buffer: B, op: impl Into<Operator<T>>) -> Begun<B>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        self.submit(Ask::of::<T>(Collective::AllReduce).of_type_by(op), buffer, [])
    }

    /// Reduces the `data` of all ranks to rank `root`, in place. On other ranks `data` does not change.
    ///
    /// All ranks pass the same number of elements. On ranks other than the root, success means that their
    /// elements have been taken, not that the sum is complete.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when there is no rank `root`; otherwise as
    /// for [`ProcessGroup::all_reduce`]. A rank that needs no answer from others learns of a mismatch in its
    /// next call or in [`destroy`](ProcessGroup::destroy).
    pub fn reduce<T: Element>(
        &self,
        data: &mut [T],
        op: impl Into<Operator<T>>,
        root: Rank,
    ) -> Result<()> {
        self.run(Ask::of::<T>(Collective::Reduce).of_type_by(op).at(root), data, &[])
    }

    /// [`ProcessGroup::reduce`] in the background.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when there is no rank `root`.
    pub fn reduce_async<T, B>(&self, buffer: B, op: impl Into<Operator<T>>, root: Rank) -> Begun<B>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        self.submit(Ask::of::<T>(Collective::Reduce).of_type_by(op).at(root), buffer, [])
    }

    /// Reduces the `input` of all ranks. Each rank gets one block of the result: rank `i` gets block `i`.
    ///
    /// `input` holds `world_size` blocks of the length of `output`.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when the lengths do not fit;
    /// otherwise as for [`ProcessGroup::all_reduce`].
    pub fn reduce_scatter<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        op: impl Into<Operator<T>>,
    ) -> Result<()> {
        self.run(Ask::of::<T>(Collective::ReduceScatter).of_type_by(op), output, input)
    }

    /// [`ProcessGroup::reduce_scatter`] in the background. Gives `output` back.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when the lengths do not fit.
    pub fn reduce_scatter_async<T, I, B>(
        &self,
        input: I,
        output: B,
        op: impl Into<Operator<T>>,
    ) -> Begun<B>
    where
        T: Element,
        I: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        self.submit(Ask::of::<T>(Collective::ReduceScatter).of_type_by(op), output, input)
    }

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

    /// Returns when every rank has called it.
    ///
    /// # Errors
    ///
    /// As for [`ProcessGroup::all_reduce`].
    pub fn barrier(&self) -> Result<()> {
        self.run::<u8>(Ask::of::<u8>(Collective::Barrier), &mut [], &[])
    }

    /// [`ProcessGroup::barrier`] in the background.
    ///
    /// # Errors
    ///
    /// None: there is no argument. The [`Work`](crate::Work) has the errors of [`ProcessGroup::barrier`].
    pub fn barrier_async(&self) -> Begun<Vec<u8>> {
        self.submit::<u8, _, _>(Ask::of::<u8>(Collective::Barrier), Vec::new(), [])
    }

    /// A [`barrier`](ProcessGroup::barrier) with a time limit of its own. When the time is over, it names
    /// every missing rank, on every rank.
    ///
    /// Every rank hears from every other rank, so each of them can tell which ranks are missing. Where ranks
    /// share no memory, this takes more messages than a plain barrier.
    ///
    /// # Errors
    ///
    /// [`Collective`](crate::ErrorKind::Collective) with all missing ranks when the time limit has passed. Then the
    /// group is poisoned, as after any other failure. A rank that comes late gets this error from its call, or, if it
    /// comes at the last moment, from its next call. A rank that has died is named at once.
    /// [`Argument`](crate::ErrorKind::Argument) for a time limit of zero.
    pub fn monitored_barrier(&self, timeout: Duration) -> Result<()> {
        if timeout.is_zero() {
            return Err(Error::argument(
                "monitored_barrier",
                "no rank can answer in no time: pass a longer time limit",
            ));
        }
        let ask = Ask::of::<u8>(Collective::MonitoredBarrier).within(timeout);
        self.run::<u8>(ask, &mut [], &[])
    }
}
