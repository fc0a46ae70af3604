//! Collectives that distribute the data of one rank: broadcast and scatter.

use drumline_schedule::{Collective, step::Rank};

use super::{ProcessGroup, call, call_of};
use crate::{Begun, Element, Result};

impl ProcessGroup {
    /// Copies the `data` of rank `root` to every rank.
    ///
    /// All ranks pass the same number of elements. On the root, success means that the data has
    /// been sent, not that it has arrived.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use drumline::ProcessGroup;
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let mut data = [group.rank() as f64; 2];
    /// group.broadcast(&mut data, 1).unwrap();
    /// assert_eq!(data, [1.0; 2]);
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) when there is no rank `root`; otherwise as
    /// for [`ProcessGroup::all_reduce`].
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: Rank) -> Result<()> {
        self.check_rank("broadcast", root)?;
        self.run(call::<T>(Collective::Broadcast, data.len()).rooted(root), None, data, &[])
    }

    /// [`ProcessGroup::broadcast`] in the background.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// assert_eq!(group.broadcast_async(vec![1.0, 2.0], 0)?.wait()?, [1.0, 2.0]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) when there is no rank `root`.
    pub fn broadcast_async<T, B>(&self, buffer: B, root: Rank) -> Begun<B>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let call = call::<T>(Collective::Broadcast, buffer.as_ref().len()).rooted(root);
        self.submit(self.check_rank("broadcast", root).map(|()| call), None, buffer, Vec::new())
    }

    /// Sends block `i` of rank `root`'s `input` to rank `i`, into `output`.
    ///
    /// All ranks pass outputs of the same length. At the root, `input` holds `world_size` times as many elements; on
    /// other ranks it is empty. On the root, success means that the blocks have been sent, not that they have arrived.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use drumline::ProcessGroup;
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let blocks = if group.rank() == 0 { vec![5, 6, 7] } else { vec![] };
    /// let mut own = [0];
    /// group.scatter(&blocks, &mut own, 0).unwrap();
    /// assert_eq!(own, [[5], [6], [7]][group.rank()]);
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) when the lengths do not fit or there is no
    /// rank `root`; otherwise as for [`ProcessGroup::all_reduce`]. The root needs no answer from others: it
    /// learns of a mismatch in its next call or in [`destroy`](ProcessGroup::destroy).
    pub fn scatter<T: Element>(&self, input: &[T], output: &mut [T], root: Rank) -> Result<()> {
        self.check_at_root("scatter", root, output.len(), input.len(), "an input")?;
        self.run(call::<T>(Collective::Scatter, output.len()).rooted(root), None, output, input)
    }

    /// [`ProcessGroup::scatter`] in the background. Gives `output` back.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// assert_eq!(group.scatter_async(vec![7], vec![0], 0)?.wait()?, [7]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) when the lengths do not fit or there is no
    /// rank `root`.
    pub fn scatter_async<T, I, B>(&self, input: I, output: B, root: Rank) -> Begun<B>
    where
        T: Element,
        I: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let (len, long) = (output.as_ref().len(), input.as_ref().len());
        let fits = self.check_at_root("scatter", root, len, long, "an input");
        let call = fits.map(|()| call::<T>(Collective::Scatter, len).rooted(root));
        self.submit(call, None, output, input)
    }

    /// [`ProcessGroup::scatter`] of blocks of different lengths: rank `i` gets `counts[i]`
    /// elements. All ranks pass the same `counts`.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use drumline::ProcessGroup;
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let counts = [2, 0, 1];
    /// let blocks = if group.rank() == 0 { vec![5, 6, 7] } else { vec![] };
    /// let mut own = vec![0; counts[group.rank()]];
    /// group.scatter_v(&blocks, &counts, &mut own, 0).unwrap();
    /// assert_eq!(own, [vec![5, 6], vec![], vec![7]][group.rank()]);
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
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
        let blocks = self.blocks_at_root("scatter_v", root, counts, output.len(), input.len())?;
        self.run(call_of::<T>(Collective::Scatter, blocks).rooted(root), None, output, input)
    }

    /// [`ProcessGroup::scatter_v`] in the background. Gives `output` back.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// assert_eq!(group.scatter_v_async(vec![7, 8], &[2], vec![0; 2], 0)?.wait()?, [7, 8]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) when the lengths do not fit or there is no
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
        let (own, long) = (output.as_ref().len(), input.as_ref().len());
        let blocks = self.blocks_at_root("scatter_v", root, counts, own, long);
        let call = blocks.map(|blocks| call_of::<T>(Collective::Scatter, blocks).rooted(root));
        self.submit(call, None, output, input)
    }
}
