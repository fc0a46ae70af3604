//! Collectives that collect the blocks of all ranks: all_gather and gather.

use drumline_schedule::{Collective, step::Rank};

use super::{ProcessGroup, call, call_of};
use crate::{Begun, Element, Result};

impl ProcessGroup {
    /// Collects the `input` of every rank in `output`, in order of rank.
    ///
    /// All ranks pass the same number of elements; `output` holds `world_size` times as many.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use drumline::ProcessGroup;
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let mut all = [0; 3];
    /// group.all_gather(&[group.rank()].map(|rank| rank as u8), &mut all).unwrap();
    /// assert_eq!(all, [0, 1, 2]);
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
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        self.check_blocks("all_gather", input.len(), output.len(), "an output")?;
        self.run(call::<T>(Collective::AllGather, input.len()), None, output, input)
    }

    /// [`ProcessGroup::all_gather`] in the background. Gives `output` back.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// let work = group.all_gather_async(vec![7], vec![0; group.world_size()])?;
    /// assert_eq!(work.wait()?, [7]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) when the lengths do not fit.
    pub fn all_gather_async<T, I, B>(&self, input: I, output: B) -> Begun<B>
    where
        T: Element,
        I: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let len = input.as_ref().len();
        let fits = self.check_blocks("all_gather", len, output.as_ref().len(), "an output");
        self.submit(fits.map(|()| call::<T>(Collective::AllGather, len)), None, output, input)
    }

    /// [`ProcessGroup::all_gather`] of blocks of different lengths: rank `i` brings `counts[i]`
    /// elements. All ranks pass the same `counts`.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use drumline::ProcessGroup;
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let own = vec![group.rank() as i32; group.rank()];
    /// let mut all = [0; 3];
    /// group.all_gather_v(&own, &mut all, &[0, 1, 2]).unwrap();
    /// assert_eq!(all, [1, 2, 2]);
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
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
        let blocks =
            self.blocks_by_rank("all_gather_v", counts, input.len(), Some(output.len()))?;
        self.run(call_of::<T>(Collective::AllGather, blocks), None, output, input)
    }

    /// [`ProcessGroup::all_gather_v`] in the background. Gives `output` back.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// let work = group.all_gather_v_async(vec![7, 8], vec![0; 2], &[2])?;
    /// assert_eq!(work.wait()?, [7, 8]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) when the lengths do not fit.
    pub fn all_gather_v_async<T, I, B>(&self, input: I, output: B, counts: &[usize]) -> Begun<B>
    where
        T: Element,
        I: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let (own, long) = (input.as_ref().len(), output.as_ref().len());
        let blocks = self.blocks_by_rank("all_gather_v", counts, own, Some(long));
        self.submit(blocks.map(|it| call_of::<T>(Collective::AllGather, it)), None, output, input)
    }

    /// Collects the `input` of every rank in `output` at rank `root`, in order of rank.
    ///
    /// All ranks pass the same number of elements. At the root, `output` holds `world_size` times as many; on other
    /// ranks it is empty. On those, success means that their elements have been taken, not that they have arrived.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use drumline::ProcessGroup;
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let mut all = if group.rank() == 2 { vec![0; 3] } else { vec![] };
    /// group.gather(&[group.rank() as u32], &mut all, 2).unwrap();
    /// assert_eq!(all, if group.rank() == 2 { vec![0, 1, 2] } else { vec![] });
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) when the lengths do not fit or there is no
    /// rank `root`; otherwise as for [`ProcessGroup::all_reduce`]. A rank that needs no answer from others
    /// learns of a mismatch in its next call or in [`destroy`](ProcessGroup::destroy).
    pub fn gather<T: Element>(&self, input: &[T], output: &mut [T], root: Rank) -> Result<()> {
        self.check_at_root("gather", root, input.len(), output.len(), "an output")?;
        self.run(call::<T>(Collective::Gather, input.len()).rooted(root), None, output, input)
    }

    /// [`ProcessGroup::gather`] in the background. Gives `output` back.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// let work = group.gather_async(vec![7], vec![0; group.world_size()], 0)?;
    /// assert_eq!(work.wait()?, [7]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) when the lengths do not fit or there is no
    /// rank `root`.
    pub fn gather_async<T, I, B>(&self, input: I, output: B, root: Rank) -> Begun<B>
    where
        T: Element,
        I: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let (len, long) = (input.as_ref().len(), output.as_ref().len());
        let fits = self.check_at_root("gather", root, len, long, "an output");
        let call = fits.map(|()| call::<T>(Collective::Gather, len).rooted(root));
        self.submit(call, None, output, input)
    }

    /// [`ProcessGroup::gather`] of blocks of different lengths: rank `i` brings `counts[i]`
    /// elements. All ranks pass the same `counts`.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use drumline::ProcessGroup;
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let mut all = if group.rank() == 0 { vec!['.' as u32; 3] } else { vec![] };
    /// let own = ['a', 'b', 'c'].map(u32::from)[group.rank()..][..1].repeat(group.rank());
    /// group.gather_v(&own, &mut all, &[0, 1, 2], 0).unwrap();
    /// assert_eq!(all, if group.rank() == 0 { vec![98, 99, 99] } else { vec![] });
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
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
        let blocks = self.blocks_at_root("gather_v", root, counts, input.len(), output.len())?;
        self.run(call_of::<T>(Collective::Gather, blocks).rooted(root), None, output, input)
    }

    /// [`ProcessGroup::gather_v`] in the background. Gives `output` back.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// let work = group.gather_v_async(vec![7, 8], vec![0; 2], &[2], 0)?;
    /// assert_eq!(work.wait()?, [7, 8]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) when the lengths do not fit or there is no
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
        let (own, long) = (input.as_ref().len(), output.as_ref().len());
        let blocks = self.blocks_at_root("gather_v", root, counts, own, long);
        let call = blocks.map(|blocks| call_of::<T>(Collective::Gather, blocks).rooted(root));
        self.submit(call, None, output, input)
    }
}
