//! Several calls of one kind and type, carried out as one call.
//!
//! The data is copied from the buffers into one, and back.

use drumline_engine::operator::Operator;
use drumline_kernels::copy;
use drumline_schedule::{Collective, step::Rank};

use super::{
    Prepared, TorchSpelling, call,
    lists::{concat, deal_out, lengths},
};
use crate::{Begun, Element, Result};

impl TorchSpelling<'_> {
    /// [`ProcessGroup::all_reduce`](crate::ProcessGroup::all_reduce) of several buffers as one call.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use drumline::{ProcessGroup, ReduceOp};
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let (mut a, mut b) = ([1.0], [2.0, 3.0]);
    /// group.torch_spelling().all_reduce_coalesced(&mut [&mut a, &mut b], ReduceOp::Avg).unwrap();
    /// assert_eq!((a, b), ([1.0], [2.0, 3.0]));
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`ProcessGroup::all_reduce`](crate::ProcessGroup::all_reduce), and on ranks whose buffers have
    /// other lengths than those of another rank.
    pub fn all_reduce_coalesced<T: Element>(
        &self,
        buffers: &mut [&mut [T]],
        op: impl Into<Operator<T>>,
    ) -> Result<()> {
        let mut all = concat(buffers);
        let call = call::<T>(Collective::AllReduce, all.len()).in_parts(lengths(buffers));
        self.group.run(call, Some(op.into()), &mut all, &[])?;
        deal_out(&all, buffers);
        Ok(())
    }

    /// [`TorchSpelling::all_reduce_coalesced`] in the background. Gives the buffers back.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// let work = group.torch_spelling().all_reduce_coalesced_async(vec![vec![1.0], vec![2.0, 3.0]], drumline::ReduceOp::Sum)?;
    /// assert_eq!(work.wait()?, [vec![1.0], vec![2.0, 3.0]]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`ProcessGroup::all_reduce_async`](crate::ProcessGroup::all_reduce_async).
    pub fn all_reduce_coalesced_async<T, B>(
        &self,
        buffers: Vec<B>,
        op: impl Into<Operator<T>>,
    ) -> Begun<Vec<B>>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let all = concat(&buffers);
        let call = call::<T>(Collective::AllReduce, all.len()).in_parts(lengths(&buffers));
        let call = Ok((call, all, Vec::new()));
        self.group
            .submit_copy(call, Some(op.into()), buffers, |all, buffers| deal_out(all, buffers))
    }

    /// [`ProcessGroup::all_gather`](crate::ProcessGroup::all_gather) of each `inputs[i]` into `outputs[i]`,
    /// as one call.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use drumline::ProcessGroup;
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let (mut a, mut b) = ([0; 3], [0; 6]);
    /// let own = [1, 2, 3].map(|value| value * 10_i32.pow(group.rank() as u32));
    /// group.torch_spelling().all_gather_coalesced(&[&own[..1], &own[1..]], &mut [&mut a, &mut b]).unwrap();
    /// assert_eq!((a, b), ([1, 10, 100], [2, 3, 20, 30, 200, 300]));
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`ProcessGroup::all_gather`](crate::ProcessGroup::all_gather), and on ranks whose buffers have
    /// other lengths than those of another rank.
    pub fn all_gather_coalesced<T: Element>(
        &self,
        inputs: &[&[T]],
        outputs: &mut [&mut [T]],
    ) -> Result<()> {
        let (call, mut all, own) = self.gather_together(inputs, outputs)?;
        self.group.run(call, None, &mut all, &own)?;
        deal_out_by_rank(&all, &lengths(inputs), outputs);
        Ok(())
    }

    /// [`TorchSpelling::all_gather_coalesced`] in the background. Gives `outputs` back.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// let work = group.torch_spelling().all_gather_coalesced_async(&[&[1], &[2, 3]], vec![vec![0], vec![0, 0]])?;
    /// assert_eq!(work.wait()?, [vec![1], vec![2, 3]]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) when numbers or lengths of buffers do not fit.
    pub fn all_gather_coalesced_async<T, B>(
        &self,
        inputs: &[&[T]],
        outputs: Vec<B>,
    ) -> Begun<Vec<B>>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let (call, parts) = (self.gather_together(inputs, &outputs), lengths(inputs));
        self.group.submit_copy(call, None, outputs, move |all, outputs| {
            deal_out_by_rank(all, &parts, outputs);
        })
    }

    /// [`ProcessGroup::reduce_scatter`](crate::ProcessGroup::reduce_scatter) of each `inputs[i]` into
    /// `outputs[i]`, as one call.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use drumline::{ProcessGroup, ReduceOp};
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let (mut a, mut b) = ([0], [0, 0]);
    /// let (inputs, mut outputs) = ([&[1, 2, 3][..], &[4, 4, 5, 5, 6, 6]], [&mut a[..], &mut b]);
    /// group.torch_spelling().reduce_scatter_coalesced(&inputs, &mut outputs, ReduceOp::Max).unwrap();
    /// let value = group.rank() + 1;
    /// assert_eq!((a, b), ([value as i32], [value as i32 + 3; 2]));
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`ProcessGroup::reduce_scatter`](crate::ProcessGroup::reduce_scatter), and on ranks whose
    /// buffers have other lengths than those of another rank.
    pub fn reduce_scatter_coalesced<T: Element>(
        &self,
        inputs: &[&[T]],
        outputs: &mut [&mut [T]],
        op: impl Into<Operator<T>>,
    ) -> Result<()> {
        let (call, mut own, all) = self.scatter_together(inputs, outputs)?;
        self.group.run(call, Some(op.into()), &mut own, &all)?;
        deal_out(&own, outputs);
        Ok(())
    }

    /// [`TorchSpelling::reduce_scatter_coalesced`] in the background. Gives `outputs` back.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// let outputs = vec![vec![0], vec![0, 0]];
    /// let work = group.torch_spelling().reduce_scatter_coalesced_async(&[&[1], &[2, 3]], outputs, drumline::ReduceOp::Sum)?;
    /// assert_eq!(work.wait()?, [vec![1], vec![2, 3]]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) when numbers or lengths of buffers do not fit.
    pub fn reduce_scatter_coalesced_async<T, B>(
        &self,
        inputs: &[&[T]],
        outputs: Vec<B>,
        op: impl Into<Operator<T>>,
    ) -> Begun<Vec<B>>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let call = self.scatter_together(inputs, &outputs);
        self.group
            .submit_copy(call, Some(op.into()), outputs, |own, outputs| deal_out(own, outputs))
    }

    /// The call, room for its result, and this rank's contribution to it.
    fn gather_together<T: Element>(
        &self,
        inputs: &[&[T]],
        outputs: &[impl AsRef<[T]>],
    ) -> Prepared<T> {
        let (operation, parts) = ("all_gather_coalesced", lengths(inputs));
        self.check_pairs_of_buffers(operation, &parts, &lengths(outputs), "an output")?;
        let own = inputs.concat();
        let all = vec![T::zeroed(); own.len() * self.group.world_size()];
        Ok((call::<T>(Collective::AllGather, own.len()).in_parts(parts), all, own))
    }

    /// The same. This rank's contribution has, for each rank, its blocks of all inputs.
    fn scatter_together<T: Element>(
        &self,
        inputs: &[&[T]],
        outputs: &[impl AsRef<[T]>],
    ) -> Prepared<T> {
        let (operation, parts) = ("reduce_scatter_coalesced", lengths(outputs));
        self.check_pairs_of_buffers(operation, &parts, &lengths(inputs), "an input")?;
        let blocks_for = |rank: Rank| {
            let blocks = inputs.iter().zip(&parts);
            blocks.flat_map(move |(input, len)| &input[rank * len..][..*len])
        };
        let all: Vec<T> = (0..self.group.world_size()).flat_map(blocks_for).copied().collect();
        let call = call::<T>(Collective::ReduceScatter, parts.iter().sum());
        Ok((call.in_parts(parts), concat(outputs), all))
    }

    /// Checks that each long buffer holds a block for every rank, as long as the short buffer of the pair.
    fn check_pairs_of_buffers(
        &self,
        operation: &'static str,
        blocks: &[usize],
        long: &[usize],
        what: &str,
    ) -> Result<()> {
        self.check_entries(operation, long.len(), blocks.len())?;
        let mut pairs = blocks.iter().zip(long);
        pairs.try_for_each(|(&block, &long)| self.group.check_blocks(operation, block, long, what))
    }
}

/// Copies the contribution of each rank, in `all`, to its places in the outputs.
fn deal_out_by_rank<T: Element>(mut all: &[T], parts: &[usize], outputs: &mut [impl AsMut<[T]>]) {
    let mut place = 0;
    while !all.is_empty() {
        for (&len, output) in parts.iter().zip(outputs.iter_mut()) {
            let (block, rest) = all.split_at(len);
            copy((&mut output.as_mut()[place * len..][..len]).into(), block.into());
            all = rest;
        }
        place += 1;
    }
}
