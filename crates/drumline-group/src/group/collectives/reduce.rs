//! Collectives that reduce: all_reduce, reduce, reduce_scatter.

use drumline_engine::operator::Operator;
use drumline_kernels::copy;
use drumline_schedule::{Collective, step::Rank};

use super::{Ask, ProcessGroup, check_len};
use crate::{Begun, Element, Result, WorkError};

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

    /// Reduces `input` over all ranks into `output`, which has the same length. `input` does not change.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when the lengths differ;
    /// otherwise as for [`ProcessGroup::all_reduce`].
    pub fn all_reduce_into<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        op: impl Into<Operator<T>>,
    ) -> Result<()> {
        check_len("all_reduce_into", "the output", output.len(), input.len())?;
        copy(output.into(), input.into());
        self.all_reduce(output, op)
    }

    /// [`ProcessGroup::all_reduce_into`] in the background. Gives `output` back.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when the lengths differ.
    pub fn all_reduce_into_async<T, B>(
        &self,
        input: &[T],
        mut output: B,
        op: impl Into<Operator<T>>,
    ) -> Begun<B>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let ask = Ask::of::<T>(Collective::AllReduce).of_type_by(op);
        let len = output.as_ref().len();
        let fits = check_len("all_reduce_into", "the output", len, input.len());
        if let Err(error) = fits.and_then(|()| ask.check_operator()) {
            return Err(WorkError { error, buffer: Some(output) });
        }
        copy(output.as_mut().into(), input.into());
        self.submit(ask, output, [])
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

    /// Reduces the `input` of all ranks into `output` at rank `root`. There `output` has the length of
    /// `input`; on other ranks it is empty. `input` does not change.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when there is no rank `root` or `output` has
    /// the wrong length; otherwise as for [`ProcessGroup::reduce`].
    pub fn reduce_into<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        op: impl Into<Operator<T>>,
        root: Rank,
    ) -> Result<()> {
        self.check_rank("reduce_into", root)?;
        if self.rank() == root {
            check_len("reduce_into", "the output", output.len(), input.len())?;
            copy(output.into(), input.into());
            // Other ranks have no output, so the output at the root must not count as registered.
            let ask = Ask::of::<T>(Collective::Reduce).of_type_by(op).at(root).staged();
            return self.run(ask, output, &[]);
        }
        let what = "the output of a rank that is not the root";
        check_len("reduce_into", what, output.len(), 0)?;
        self.reduce(&mut input.to_vec(), op, root)
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

    /// [`ProcessGroup::reduce_scatter`] in blocks of different lengths: rank `i` gets a block of `counts[i]`
    /// elements. All ranks pass the same `counts`.
    ///
    /// # Errors
    ///
    /// As for [`ProcessGroup::reduce_scatter`].
    pub fn reduce_scatter_v<T: Element>(
        &self,
        input: &[T],
        counts: &[usize],
        output: &mut [T],
        op: impl Into<Operator<T>>,
    ) -> Result<()> {
        let ask = Ask::of::<T>(Collective::ReduceScatter).of_type_by(op).in_blocks(counts);
        self.run(ask, output, input)
    }

    /// [`ProcessGroup::reduce_scatter_v`] in the background. Gives `output` back.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when the lengths do not fit.
    pub fn reduce_scatter_v_async<T, I, B>(
        &self,
        input: I,
        counts: &[usize],
        output: B,
        op: impl Into<Operator<T>>,
    ) -> Begun<B>
    where
        T: Element,
        I: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let ask = Ask::of::<T>(Collective::ReduceScatter).of_type_by(op).in_blocks(counts);
        self.submit(ask, output, input)
    }
}
