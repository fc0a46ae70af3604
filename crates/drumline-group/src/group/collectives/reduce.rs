//! Collectives that reduce: all_reduce, reduce, reduce_scatter.

use drumline_engine::{operator::Operator, typed_call::TypedCall};
use drumline_kernels::copy;
use drumline_schedule::{Collective, step::Rank};

use super::{ProcessGroup, call, call_of, usable};
use crate::{Begun, Element, Result};

impl ProcessGroup {
    /// Reduces `data` over all ranks, in place. Afterwards `data` is the same on every rank.
    ///
    /// All ranks pass the same number of elements. The result has the same bits with every algorithm, because
    /// all algorithms add in the same order (payloads of NaN apart). Sums of 16-bit floats are kept in `f32`
    /// and rounded once.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use drumline::{ProcessGroup, ReduceOp};
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let mut data = [group.rank() as f32, 1.0];
    /// group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    /// assert_eq!(data, [3.0, 3.0]);
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Collective`](crate::Error::Collective) says which rank did what;
    /// [`Error::Poisoned`](crate::Error::Poisoned) after a failure.
    pub fn all_reduce<T: Element>(&self, data: &mut [T], op: impl Into<Operator<T>>) -> Result<()> {
        let call = call::<T>(Collective::AllReduce, data.len());
        self.run(call, Some(op.into()), data, &[])
    }

    /// [`ProcessGroup::all_reduce`] in the background.
    ///
    /// The buffer may be anything that can be used as a slice: a `Vec<T>`, a `Box<[T]>`, a
    /// [`RegisteredBuffer<T>`](crate::RegisteredBuffer).
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// let work = group.all_reduce_async(vec![1.0, 2.0], drumline::ReduceOp::Sum)?;
    /// // ... compute something else ...
    /// assert_eq!(work.wait()?, [1.0, 2.0]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) when the elements do not have the operator.
    pub fn all_reduce_async<T, B>(&self, buffer: B, op: impl Into<Operator<T>>) -> Begun<B>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let call = call::<T>(Collective::AllReduce, buffer.as_ref().len());
        self.submit(Ok(call), Some(op.into()), buffer, Vec::new())
    }

    /// Reduces `input` over all ranks into `output`, which has the same length. `input` does not change.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use drumline::{ProcessGroup, ReduceOp};
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let mut sum = [0];
    /// group.all_reduce_into(&[1], &mut sum, ReduceOp::Sum).unwrap();
    /// assert_eq!(sum, [3]);
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) when the lengths differ;
    /// otherwise as for [`ProcessGroup::all_reduce`].
    pub fn all_reduce_into<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        op: impl Into<Operator<T>>,
    ) -> Result<()> {
        self.check_len("all_reduce_into", "the output", output.len(), input.len())?;
        copy(output.into(), input.into());
        self.all_reduce(output, op)
    }

    /// [`ProcessGroup::all_reduce_into`] in the background. Gives `output` back.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// let work = group.all_reduce_into_async(&[1.0, 2.0], vec![0.0; 2], drumline::ReduceOp::Sum)?;
    /// assert_eq!(work.wait()?, [1.0, 2.0]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) when the lengths differ.
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
        let (len, op) = (output.as_ref().len(), Some(op.into()));
        let fits = self.check_len("all_reduce_into", "the output", len, input.len());
        let call = fits.and_then(|()| usable(call::<T>(Collective::AllReduce, len), &op));
        if call.is_ok() {
            copy(output.as_mut().into(), input.into());
        }
        self.submit(call, op, output, Vec::new())
    }

    /// Reduces the `data` of all ranks to rank `root`, in place. On other ranks `data` does not change.
    ///
    /// All ranks pass the same number of elements. On ranks other than the root, success means that their
    /// elements have been taken, not that the sum is complete.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use drumline::{ProcessGroup, ReduceOp};
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let mut data = [group.rank(), 5].map(|value| value as i32);
    /// group.reduce(&mut data, ReduceOp::Max, 1).unwrap();
    /// assert_eq!(data[0], if group.rank() == 1 { 2 } else { group.rank() as i32 });
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) when there is no rank `root`; otherwise as
    /// for [`ProcessGroup::all_reduce`]. A rank that needs no answer from others learns of a mismatch in its
    /// next call or in [`destroy`](ProcessGroup::destroy).
    pub fn reduce<T: Element>(
        &self,
        data: &mut [T],
        op: impl Into<Operator<T>>,
        root: Rank,
    ) -> Result<()> {
        self.check_rank("reduce", root)?;
        self.run(call::<T>(Collective::Reduce, data.len()).rooted(root), Some(op.into()), data, &[])
    }

    /// [`ProcessGroup::reduce`] in the background.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// let work = group.reduce_async(vec![1.0, 2.0], drumline::ReduceOp::Sum, 0)?;
    /// assert_eq!(work.wait()?, [1.0, 2.0]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) when there is no rank `root`.
    pub fn reduce_async<T, B>(&self, buffer: B, op: impl Into<Operator<T>>, root: Rank) -> Begun<B>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let call = call::<T>(Collective::Reduce, buffer.as_ref().len()).rooted(root);
        let call = self.check_rank("reduce", root).map(|()| call);
        self.submit(call, Some(op.into()), buffer, Vec::new())
    }

    /// Reduces the `input` of all ranks into `output` at rank `root`. There `output` has the length of
    /// `input`; on other ranks it is empty. `input` does not change.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use drumline::{ProcessGroup, ReduceOp};
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let mut sum = if group.rank() == 0 { vec![0.0] } else { vec![] };
    /// group.reduce_into(&[2.0], &mut sum, ReduceOp::Sum, 0).unwrap();
    /// assert_eq!(sum, if group.rank() == 0 { vec![6.0] } else { vec![] });
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) when there is no rank `root` or `output` has
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
            self.check_len("reduce_into", "the output", output.len(), input.len())?;
            copy(output.into(), input.into());
            let call = call::<T>(Collective::Reduce, output.len()).rooted(root);
            // Other ranks have no output, so the output at the root must not count as registered.
            let operation =
                TypedCall::<T, _, _>::new(self.limited(call), Some(op.into()), output, &[]);
            return self.inner.run(&mut operation.staged());
        }
        self.check_len(
            "reduce_into",
            "the output of a rank that is not the root",
            output.len(),
            0,
        )?;
        self.reduce(&mut input.to_vec(), op, root)
    }

    /// Reduces the `input` of all ranks. Each rank gets one block of the result: rank `i` gets block `i`.
    ///
    /// `input` holds `world_size` blocks of the length of `output`.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use drumline::{ProcessGroup, ReduceOp};
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let mut part = [0];
    /// group.reduce_scatter(&[10, 20, 30], &mut part, ReduceOp::Sum).unwrap();
    /// assert_eq!(part, [[30], [60], [90]][group.rank()]);
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) when the lengths do not fit;
    /// otherwise as for [`ProcessGroup::all_reduce`].
    pub fn reduce_scatter<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        op: impl Into<Operator<T>>,
    ) -> Result<()> {
        self.check_blocks("reduce_scatter", output.len(), input.len(), "an input")?;
        let call = call::<T>(Collective::ReduceScatter, output.len());
        self.run(call, Some(op.into()), output, input)
    }

    /// [`ProcessGroup::reduce_scatter`] in the background. Gives `output` back.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// let work = group.reduce_scatter_async(vec![1.0, 2.0], vec![0.0; 2], drumline::ReduceOp::Sum)?;
    /// assert_eq!(work.wait()?, [1.0, 2.0]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) when the lengths do not fit.
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
        let len = output.as_ref().len();
        let fits = self.check_blocks("reduce_scatter", len, input.as_ref().len(), "an input");
        let call = fits.map(|()| call::<T>(Collective::ReduceScatter, len));
        self.submit(call, Some(op.into()), output, input)
    }

    /// [`ProcessGroup::reduce_scatter`] in blocks of different lengths: rank `i` gets a block of `counts[i]`
    /// elements. All ranks pass the same `counts`.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use drumline::{ProcessGroup, ReduceOp};
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let counts = [0, 1, 2];
    /// let mut part = vec![0; counts[group.rank()]];
    /// group.reduce_scatter_v(&[1, 2, 3], &counts, &mut part, ReduceOp::Sum).unwrap();
    /// assert_eq!(part, [vec![], vec![3], vec![6, 9]][group.rank()]);
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
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
        let blocks =
            self.blocks_by_rank("reduce_scatter_v", counts, output.len(), Some(input.len()))?;
        self.run(call_of::<T>(Collective::ReduceScatter, blocks), Some(op.into()), output, input)
    }

    /// [`ProcessGroup::reduce_scatter_v`] in the background. Gives `output` back.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// let work = group.reduce_scatter_v_async(vec![1.0, 2.0], &[2], vec![0.0; 2], drumline::ReduceOp::Sum)?;
    /// assert_eq!(work.wait()?, [1.0, 2.0]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) when the lengths do not fit.
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
        let (own, long) = (output.as_ref().len(), input.as_ref().len());
        let blocks = self.blocks_by_rank("reduce_scatter_v", counts, own, Some(long));
        let call = blocks.map(|blocks| call_of::<T>(Collective::ReduceScatter, blocks));
        self.submit(call, Some(op.into()), output, input)
    }
}
