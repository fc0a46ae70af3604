//! Scans: each rank gets the sum over the ranks up to its own.

use drumline_engine::operator::Operator;
use drumline_schedule::Collective;

use super::{ProcessGroup, call};
use crate::{Begun, Element, Result};

impl ProcessGroup {
    /// Reduces the `data` of the ranks up to this one, in place. Rank 0 keeps its own data, rank 1 gets the
    /// sum of ranks 0 and 1, and the last rank gets the sum of all.
    ///
    /// All ranks pass the same number of elements. Each rank adds along the tree over the ranks that it sums,
    /// whatever order the group has for other sums. An average is taken over these ranks.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use drumline::{ProcessGroup, ReduceOp};
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let mut data = [1, group.rank()].map(|value| value as i64);
    /// group.scan(&mut data, ReduceOp::Sum).unwrap();
    /// assert_eq!(data, [[1, 0], [2, 1], [3, 3]][group.rank()]);
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`ProcessGroup::all_reduce`]. A rank that needs no answer from others (rank 0) learns of a
    /// mismatch in its next call or in [`destroy`](ProcessGroup::destroy).
    pub fn scan<T: Element>(&self, data: &mut [T], op: impl Into<Operator<T>>) -> Result<()> {
        self.run(call::<T>(Collective::Scan, data.len()), Some(op.into()), data, &[])
    }

    /// [`ProcessGroup::scan`] in the background.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// assert_eq!(group.scan_async(vec![3], drumline::ReduceOp::Sum)?.wait()?, [3]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`ProcessGroup::all_reduce_async`].
    pub fn scan_async<T, B>(&self, buffer: B, op: impl Into<Operator<T>>) -> Begun<B>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let call = call::<T>(Collective::Scan, buffer.as_ref().len());
        self.submit(Ok(call), Some(op.into()), buffer, Vec::new())
    }

    /// Reduces the `data` of the ranks below this one, in place. On rank 0, which has none below, `data` does
    /// not change.
    ///
    /// Otherwise it is like [`ProcessGroup::scan`].
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use drumline::{ProcessGroup, ReduceOp};
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// // Where each rank's rows begin among those of all.
    /// let rows = [10, 20, 30][group.rank()];
    /// let mut first = [rows];
    /// group.exclusive_scan(&mut first, ReduceOp::Sum).unwrap();
    /// let first = if group.rank() == 0 { 0 } else { first[0] };
    /// assert_eq!(first, [0, 10, 30][group.rank()]);
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`ProcessGroup::scan`].
    pub fn exclusive_scan<T: Element>(
        &self,
        data: &mut [T],
        op: impl Into<Operator<T>>,
    ) -> Result<()> {
        self.run(call::<T>(Collective::ExclusiveScan, data.len()), Some(op.into()), data, &[])
    }

    /// [`ProcessGroup::exclusive_scan`] in the background.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// let before = group.exclusive_scan_async(vec![3], drumline::ReduceOp::Sum)?.wait()?;
    /// assert_eq!(before, [3]); // nothing is before rank 0: the buffer stays as it is
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`ProcessGroup::all_reduce_async`].
    pub fn exclusive_scan_async<T, B>(&self, buffer: B, op: impl Into<Operator<T>>) -> Begun<B>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let call = call::<T>(Collective::ExclusiveScan, buffer.as_ref().len());
        self.submit(Ok(call), Some(op.into()), buffer, Vec::new())
    }
}
