//! Collectives on lists that have a buffer for every rank.
//!
//! The data is copied from the buffers into one, and back.

use drumline_engine::operator::Operator;
use drumline_kernels::copy;
use drumline_schedule::{Collective, step::Rank};

use super::{TorchSpelling, call, call_of};
use crate::{Begun, Element, Error, Result};

impl TorchSpelling<'_> {
    /// [`ProcessGroup::all_gather`](crate::ProcessGroup::all_gather) into a buffer for every rank. The buffers may have
    /// different lengths, which are the same on all ranks. This rank's buffer has the length of `input`.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use drumline::ProcessGroup;
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let (mut a, mut b, mut c) = ([0; 1], [0; 2], [0; 3]);
    /// let own = vec![7; group.rank() + 1];
    /// group.torch_spelling().all_gather_list(&own, &mut [&mut a, &mut b, &mut c]).unwrap();
    /// assert_eq!((a, b, c), ([7], [7; 2], [7; 3]));
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`ProcessGroup::all_gather_v`](crate::ProcessGroup::all_gather_v).
    pub fn all_gather_list<T: Element>(&self, input: &[T], outputs: &mut [&mut [T]]) -> Result<()> {
        let counts = lengths(outputs);
        let blocks = self.group.blocks_by_rank("all_gather_list", &counts, input.len(), None)?;
        let mut all = vec![T::zeroed(); counts.iter().sum()];
        self.group.run(call_of::<T>(Collective::AllGather, blocks), None, &mut all, input)?;
        deal_out(&all, outputs);
        Ok(())
    }

    /// [`TorchSpelling::all_gather_list`] in the background. Gives `outputs` back.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// let work = group.torch_spelling().all_gather_list_async(vec![7], vec![vec![0]])?;
    /// assert_eq!(work.wait()?, [[7]]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] when numbers or lengths of buffers do not fit.
    pub fn all_gather_list_async<T, I, B>(&self, input: I, outputs: Vec<B>) -> Begun<Vec<B>>
    where
        T: Element,
        I: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let (counts, own) = (lengths(&outputs), input.as_ref().len());
        let all = vec![T::zeroed(); counts.iter().sum()];
        let blocks = self.group.blocks_by_rank("all_gather_list", &counts, own, None);
        let call = blocks.map(|it| (call_of::<T>(Collective::AllGather, it), all, input));
        self.group.submit_copy(call, None, outputs, |all, outputs| deal_out(all, outputs))
    }

    /// [`ProcessGroup::gather`](crate::ProcessGroup::gather) into a buffer for every rank, all as long as
    /// `input`. On ranks other than the root the list is empty.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use drumline::ProcessGroup;
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let [mut a, mut b, mut c] = [[0; 2]; 3];
    /// let mut outputs = match group.rank() {
    ///     0 => vec![&mut a[..], &mut b, &mut c],
    ///     _ => vec![],
    /// };
    /// group.torch_spelling().gather_list(&[group.rank() as u16; 2], &mut outputs, 0).unwrap();
    /// if group.rank() == 0 {
    ///     assert_eq!([a, b, c], [[0; 2], [1; 2], [2; 2]]);
    /// }
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`ProcessGroup::gather`](crate::ProcessGroup::gather).
    pub fn gather_list<T: Element>(
        &self,
        input: &[T],
        outputs: &mut [&mut [T]],
        root: Rank,
    ) -> Result<()> {
        let operation = "gather_list";
        self.check_list_at_root(operation, root, &lengths(outputs), input.len())?;
        let mut all = vec![T::zeroed(); outputs.len() * input.len()];
        self.group.run(
            call::<T>(Collective::Gather, input.len()).rooted(root),
            None,
            &mut all,
            input,
        )?;
        deal_out(&all, outputs);
        Ok(())
    }

    /// [`TorchSpelling::gather_list`] in the background. Gives `outputs` back.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// let work = group.torch_spelling().gather_list_async(vec![7], vec![vec![0]], 0)?;
    /// assert_eq!(work.wait()?, [[7]]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] when numbers or lengths of buffers do not fit.
    pub fn gather_list_async<T, I, B>(&self, input: I, outputs: Vec<B>, root: Rank) -> Begun<Vec<B>>
    where
        T: Element,
        I: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let len = input.as_ref().len();
        let fits = self.check_list_at_root("gather_list", root, &lengths(&outputs), len);
        let all = |()| vec![T::zeroed(); outputs.len() * len];
        let call = call::<T>(Collective::Gather, len).rooted(root);
        let call = fits.map(all).map(|all| (call, all, input));
        self.group.submit_copy(call, None, outputs, |all, outputs| deal_out(all, outputs))
    }

    /// [`ProcessGroup::scatter`](crate::ProcessGroup::scatter) of a buffer for every rank, all as long as
    /// `output`. On ranks other than the root the list is empty.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use drumline::ProcessGroup;
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let inputs: &[&[i8]] = if group.rank() == 1 { &[&[1], &[2], &[3]] } else { &[] };
    /// let mut own = [0];
    /// group.torch_spelling().scatter_list(inputs, &mut own, 1).unwrap();
    /// assert_eq!(own, [group.rank() as i8 + 1]);
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`ProcessGroup::scatter`](crate::ProcessGroup::scatter).
    pub fn scatter_list<T: Element>(
        &self,
        inputs: &[&[T]],
        output: &mut [T],
        root: Rank,
    ) -> Result<()> {
        self.check_list_at_root("scatter_list", root, &lengths(inputs), output.len())?;
        let call = call::<T>(Collective::Scatter, output.len()).rooted(root);
        self.group.run(call, None, output, &inputs.concat())
    }

    /// [`TorchSpelling::scatter_list`] in the background. Gives `output` back.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// let work = group.torch_spelling().scatter_list_async(&[&[7]], vec![0], 0)?;
    /// assert_eq!(work.wait()?, [7]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] when numbers or lengths of buffers do not fit.
    pub fn scatter_list_async<T, B>(&self, inputs: &[&[T]], output: B, root: Rank) -> Begun<B>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let len = output.as_ref().len();
        let fits = self.check_list_at_root("scatter_list", root, &lengths(inputs), len);
        let call = fits.map(|()| call::<T>(Collective::Scatter, len).rooted(root));
        self.group.submit(call, None, output, inputs.concat())
    }

    /// [`ProcessGroup::reduce_scatter`](crate::ProcessGroup::reduce_scatter) of a buffer for every rank. The buffers
    /// may have different lengths, which are the same on all ranks. This rank's buffer has the length of `output`.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use drumline::{ProcessGroup, ReduceOp};
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let mut part = vec![0; group.rank()];
    /// group.torch_spelling().reduce_scatter_list(&[&[], &[1], &[2, 3]], &mut part, ReduceOp::Sum).unwrap();
    /// assert_eq!(part, [vec![], vec![3], vec![6, 9]][group.rank()]);
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`ProcessGroup::reduce_scatter_v`](crate::ProcessGroup::reduce_scatter_v).
    pub fn reduce_scatter_list<T: Element>(
        &self,
        inputs: &[&[T]],
        output: &mut [T],
        op: impl Into<Operator<T>>,
    ) -> Result<()> {
        let counts = lengths(inputs);
        let blocks =
            self.group.blocks_by_rank("reduce_scatter_list", &counts, output.len(), None)?;
        let call = call_of::<T>(Collective::ReduceScatter, blocks);
        self.group.run(call, Some(op.into()), output, &inputs.concat())
    }

    /// [`TorchSpelling::reduce_scatter_list`] in the background. Gives `output` back.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// let work = group.torch_spelling().reduce_scatter_list_async(&[&[7]], vec![0], drumline::ReduceOp::Sum)?;
    /// assert_eq!(work.wait()?, [7]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] when numbers or lengths of buffers do not fit.
    pub fn reduce_scatter_list_async<T, B>(
        &self,
        inputs: &[&[T]],
        output: B,
        op: impl Into<Operator<T>>,
    ) -> Begun<B>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let (counts, own) = (lengths(inputs), output.as_ref().len());
        let blocks = self.group.blocks_by_rank("reduce_scatter_list", &counts, own, None);
        let call = blocks.map(|blocks| call_of::<T>(Collective::ReduceScatter, blocks));
        self.group.submit(call, Some(op.into()), output, inputs.concat())
    }

    /// [`ProcessGroup::all_to_all_v`](crate::ProcessGroup::all_to_all_v) with one buffer to every rank and
    /// one from every rank, of any lengths.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use drumline::ProcessGroup;
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let [mut a, mut b, mut c] = [[0]; 3];
    /// let to = [0, 1, 2].map(|to| [10 * group.rank() as u64 + to]);
    /// group.torch_spelling().all_to_all_list(&[&to[0], &to[1], &to[2]], &mut [&mut a, &mut b, &mut c]).unwrap();
    /// assert_eq!([a, b, c].concat(), [0, 10, 20].map(|value| value + group.rank() as u64));
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`ProcessGroup::all_to_all_v`](crate::ProcessGroup::all_to_all_v).
    pub fn all_to_all_list<T: Element>(
        &self,
        inputs: &[&[T]],
        outputs: &mut [&mut [T]],
    ) -> Result<()> {
        let (send_counts, recv_counts) = (lengths(inputs), lengths(outputs));
        let mut all = vec![T::zeroed(); recv_counts.iter().sum()];
        self.group.all_to_all_v(&inputs.concat(), &send_counts, &mut all, &recv_counts)?;
        deal_out(&all, outputs);
        Ok(())
    }

    /// [`TorchSpelling::all_to_all_list`] in the background. Gives `outputs` back.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// let work = group.torch_spelling().all_to_all_list_async(&[&[7]], vec![vec![0]])?;
    /// assert_eq!(work.wait()?, [[7]]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] when numbers or lengths of buffers do not fit.
    pub fn all_to_all_list_async<T, B>(&self, inputs: &[&[T]], outputs: Vec<B>) -> Begun<Vec<B>>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let (send_counts, recv_counts) = (lengths(inputs), lengths(&outputs));
        let (input, all) = (inputs.concat(), vec![T::zeroed(); recv_counts.iter().sum()]);
        let counts = self.group.check_pairs(input.len(), &send_counts, all.len(), &recv_counts);
        let call = counts.map(|it| (call_of::<T>(Collective::AllToAll, it), all, input));
        self.group.submit_copy(call, None, outputs, |all, outputs| deal_out(all, outputs))
    }

    fn check_list_at_root(
        &self,
        operation: &'static str,
        root: Rank,
        lengths: &[usize],
        block: usize,
    ) -> Result<()> {
        self.group.check_rank(operation, root)?;
        let expected = if self.group.rank() == root { self.group.world_size() } else { 0 };
        self.check_entries(operation, lengths.len(), expected)?;
        lengths.iter().try_for_each(|&len| {
            self.group.check_len(operation, "a buffer of the list", len, block)
        })
    }

    pub(super) fn check_entries(
        &self,
        operation: &'static str,
        found: usize,
        expected: usize,
    ) -> Result<()> {
        if found == expected {
            return Ok(());
        }
        let problem = format!("the list has {found} buffers where there should be {expected}");
        Err(Error::InvalidArgument { operation, problem })
    }
}

pub(super) fn lengths<T>(buffers: &[impl AsRef<[T]>]) -> Vec<usize> {
    buffers.iter().map(|buffer| buffer.as_ref().len()).collect()
}

pub(super) fn concat<T: Element>(buffers: &[impl AsRef<[T]>]) -> Vec<T> {
    buffers.iter().flat_map(|buffer| buffer.as_ref()).copied().collect()
}

/// The inverse of `concat`.
pub(super) fn deal_out<T: Element>(mut all: &[T], buffers: &mut [impl AsMut<[T]>]) {
    for buffer in buffers {
        let buffer = buffer.as_mut();
        let (own, rest) = all.split_at(buffer.len());
        copy(buffer.into(), own.into());
        all = rest;
    }
}
