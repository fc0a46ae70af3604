//! Collectives in which every rank has several members. Members are buffers of one length. Every rank has the
//! same number of members, and each counts as a rank does in other collectives.
//!
//! If ranks have `n` members each, member `j` of rank `k` has the number `k * n + j`. Sums are added as for hosts and
//! their ranks under [`SumOrder::Placement`](crate::SumOrder::Placement): first along the tree over the members of a
//! rank, then along the tree over ranks. Partial sums are kept in the type in which the elements accumulate.

use bytemuck::Zeroable;
use drumline_engine::call::Call;
use drumline_kernels::copy;
use drumline_schedule::{Collective, step::Rank};

use super::{
    Prepared, TorchSpelling, call,
    members::{across, check_as_many, check_members, finish, round, round_and_deal_out, summed},
};
use crate::{Begun, Element, Error, ReduceOp, Result};

impl TorchSpelling<'_> {
    /// Reduces all buffers of all ranks, in place. Afterwards all buffers are the same.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use drumline::{ProcessGroup, ReduceOp};
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let (mut a, mut b) = ([1], [group.rank() as i32]);
    /// group.torch_spelling().all_reduce_multi(&mut [&mut a, &mut b], ReduceOp::Sum).unwrap();
    /// assert_eq!((a, b), ([6], [6]));
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for an empty list or lengths that differ; otherwise as
    /// [`ProcessGroup::all_reduce`](crate::ProcessGroup::all_reduce).
    pub fn all_reduce_multi<T: Element>(
        &self,
        buffers: &mut [&mut [T]],
        op: ReduceOp,
    ) -> Result<()> {
        let len = check_members("all_reduce_multi", buffers)?;
        let (call, mut sum) = summed(Collective::AllReduce, len, buffers, op)?;
        self.group.run(call, Some(across(op).into()), &mut sum, &[])?;
        finish(op, &mut sum, self.members(buffers.len()));
        buffers.iter_mut().for_each(|buffer| round(&sum, buffer));
        Ok(())
    }

    /// [`TorchSpelling::all_reduce_multi`] in the background. Gives the buffers back.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// let work = group.torch_spelling().all_reduce_multi_async(vec![vec![1], vec![2]], drumline::ReduceOp::Sum)?;
    /// assert_eq!(work.wait()?, [[3], [3]]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] as for the blocking form.
    pub fn all_reduce_multi_async<T, B>(&self, buffers: Vec<B>, op: ReduceOp) -> Begun<Vec<B>>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let members = self.members(buffers.len());
        let call = check_members("all_reduce_multi", &buffers)
            .and_then(|len| summed::<T>(Collective::AllReduce, len, &buffers, op))
            .map(|(call, sum)| (call, sum, Vec::new()));
        self.group.submit_copy(call, Some(across(op).into()), buffers, move |sum, buffers| {
            finish(op, sum, members);
            buffers.iter_mut().for_each(|buffer| round(sum, buffer.as_mut()));
        })
    }

    /// Reduces all buffers of all ranks into buffer `root_buffer` of rank `root`. No other buffer changes.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use drumline::{ProcessGroup, ReduceOp};
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let (mut a, mut b) = ([1], [2]);
    /// group.torch_spelling().reduce_multi(&mut [&mut a, &mut b], ReduceOp::Sum, 2, 1).unwrap();
    /// assert_eq!((a, b), ([1], if group.rank() == 2 { [9] } else { [2] }));
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for an empty list, lengths that differ, or a root that is no
    /// rank or has no such buffer; otherwise as for [`ProcessGroup::reduce`](crate::ProcessGroup::reduce).
    pub fn reduce_multi<T: Element>(
        &self,
        buffers: &mut [&mut [T]],
        op: ReduceOp,
        root: Rank,
        root_buffer: usize,
    ) -> Result<()> {
        let len = self.check_root_buffer("reduce_multi", buffers, root, root_buffer)?;
        let (call, mut sum) = summed(Collective::Reduce, len, buffers, op)?;
        self.group.run(call.rooted(root), Some(across(op).into()), &mut sum, &[])?;
        if self.group.rank() == root {
            finish(op, &mut sum, self.members(buffers.len()));
            round(&sum, buffers[root_buffer]);
        }
        Ok(())
    }

    /// [`TorchSpelling::reduce_multi`] in the background. Gives the buffers back.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// let work = group.torch_spelling().reduce_multi_async(vec![vec![1], vec![2]], drumline::ReduceOp::Sum, 0, 1)?;
    /// assert_eq!(work.wait()?, [[1], [3]]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] as for the blocking form.
    pub fn reduce_multi_async<T, B>(
        &self,
        buffers: Vec<B>,
        op: ReduceOp,
        root: Rank,
        root_buffer: usize,
    ) -> Begun<Vec<B>>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let (members, at_root) = (self.members(buffers.len()), self.group.rank() == root);
        let call = self
            .check_root_buffer("reduce_multi", &buffers, root, root_buffer)
            .and_then(|len| summed::<T>(Collective::Reduce, len, &buffers, op))
            .map(|(call, sum)| (call.rooted(root), sum, Vec::new()));
        self.group.submit_copy(call, Some(across(op).into()), buffers, move |sum, buffers| {
            if at_root {
                finish(op, sum, members);
                round(sum, buffers[root_buffer].as_mut());
            }
        })
    }

    /// Copies buffer `root_buffer` of rank `root` into all buffers of all ranks.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use drumline::ProcessGroup;
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let (mut a, mut b) = ([1], [10 + group.rank() as u8]);
    /// group.torch_spelling().broadcast_multi(&mut [&mut a, &mut b], 1, 1).unwrap();
    /// assert_eq!((a, b), ([11], [11]));
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for an empty list, lengths that differ, or a root that is no
    /// rank or has no such buffer; otherwise as for [`ProcessGroup::broadcast`](crate::ProcessGroup::broadcast).
    pub fn broadcast_multi<T: Element>(
        &self,
        buffers: &mut [&mut [T]],
        root: Rank,
        root_buffer: usize,
    ) -> Result<()> {
        let len = self.check_root_buffer("broadcast_multi", buffers, root, root_buffer)?;
        let parts = vec![len, buffers.len()];
        let call = call::<T>(Collective::Broadcast, len).rooted(root).in_parts(parts);
        self.group.run(call, None, buffers[root_buffer], &[])?;
        let (before, at_and_behind) = buffers.split_at_mut(root_buffer);
        if let [source, behind @ ..] = at_and_behind {
            before
                .iter_mut()
                .chain(behind)
                .for_each(|buffer| copy((&mut **buffer).into(), (&**source).into()));
        }
        Ok(())
    }

    /// [`TorchSpelling::broadcast_multi`] in the background. Gives the buffers back.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// let work = group.torch_spelling().broadcast_multi_async(vec![vec![1], vec![2]], 0, 1)?;
    /// assert_eq!(work.wait()?, [[2], [2]]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] as for the blocking form.
    pub fn broadcast_multi_async<T, B>(
        &self,
        buffers: Vec<B>,
        root: Rank,
        root_buffer: usize,
    ) -> Begun<Vec<B>>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let len = self.check_root_buffer("broadcast_multi", &buffers, root, root_buffer);
        let call = len.map(|len| {
            let parts = vec![len, buffers.len()];
            let call = call::<T>(Collective::Broadcast, len).rooted(root).in_parts(parts);
            (call, buffers[root_buffer].as_ref().to_vec(), Vec::new())
        });
        self.group.submit_copy(call, None, buffers, copy_to_each)
    }

    /// Collects the inputs of all ranks in every output, in the order of members.
    ///
    /// There are as many outputs as inputs. Each output holds a block for every member of the group. With `n`
    /// inputs, input `j` of rank `k` becomes block `k * n + j`.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use drumline::ProcessGroup;
    /// # let groups = ProcessGroup::local_world(2)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let inputs = [10, 11].map(|value| [value + 10 * group.rank() as i16]);
    /// let [mut a, mut b] = [[0; 4]; 2];
    /// group.torch_spelling().all_gather_multi(&[&inputs[0], &inputs[1]], &mut [&mut a, &mut b]).unwrap();
    /// assert_eq!((a, b), ([10, 11, 20, 21], [10, 11, 20, 21]));
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] when numbers or lengths of buffers do not fit; otherwise as
    /// [`ProcessGroup::all_gather`](crate::ProcessGroup::all_gather).
    pub fn all_gather_multi<T: Element>(
        &self,
        inputs: &[&[T]],
        outputs: &mut [&mut [T]],
    ) -> Result<()> {
        let (call, own) = self.gather_of_members(inputs, outputs)?;
        if let [first, others @ ..] = outputs {
            self.group.run(call, None, first, &own)?;
            others.iter_mut().for_each(|other| copy((&mut **other).into(), (&**first).into()));
        }
        Ok(())
    }

    /// [`TorchSpelling::all_gather_multi`] in the background. Gives `outputs` back.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// let work = group.torch_spelling().all_gather_multi_async(&[&[1], &[2]], vec![vec![0; 2]; 2])?;
    /// assert_eq!(work.wait()?, [[1, 2], [1, 2]]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] as for the blocking form.
    pub fn all_gather_multi_async<T, B>(&self, inputs: &[&[T]], outputs: Vec<B>) -> Begun<Vec<B>>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let ranks = self.group.world_size();
        let call = self.gather_of_members(inputs, &outputs);
        let call = call.map(|(call, own)| (call, vec![T::zeroed(); own.len() * ranks], own));
        self.group.submit_copy(call, None, outputs, copy_to_each)
    }

    /// Reduces all inputs of all ranks, and gives every member its block of the result. It undoes the
    /// distribution of [`TorchSpelling::all_gather_multi`].
    ///
    /// There are as many inputs as outputs, `n` of them. Each input holds a block for every member of the group, as
    /// long as an output. Output `j` of rank `k` gets the sum of the blocks `k * n + j` of all inputs.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # use drumline::{ProcessGroup, ReduceOp};
    /// # let groups = ProcessGroup::local_world(2)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let input = [1, 2, 3, 4];
    /// let (mut a, mut b) = ([0], [0]);
    /// let (inputs, mut outputs) = ([&input[..], &input], [&mut a[..], &mut b]);
    /// group.torch_spelling().reduce_scatter_multi(&inputs, &mut outputs, ReduceOp::Sum).unwrap();
    /// assert_eq!((a, b), if group.rank() == 0 { ([4], [8]) } else { ([12], [16]) });
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] when numbers or lengths of buffers do not fit; otherwise as
    /// [`ProcessGroup::reduce_scatter`](crate::ProcessGroup::reduce_scatter).
    pub fn reduce_scatter_multi<T: Element>(
        &self,
        inputs: &[&[T]],
        outputs: &mut [&mut [T]],
        op: ReduceOp,
    ) -> Result<()> {
        let (call, mut own, sum) = self.scatter_of_members(inputs, outputs, op)?;
        self.group.run(call, Some(across(op).into()), &mut own, &sum)?;
        finish(op, &mut own, self.members(inputs.len()));
        round_and_deal_out(&own, outputs);
        Ok(())
    }

    /// [`TorchSpelling::reduce_scatter_multi`] in the background. Gives `outputs` back.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// # let group = drumline::ProcessGroup::alone();
    /// let outputs = vec![vec![0], vec![0]];
    /// let work = group.torch_spelling().reduce_scatter_multi_async(&[&[1, 2], &[3, 4]], outputs, drumline::ReduceOp::Sum)?;
    /// assert_eq!(work.wait()?, [[4], [6]]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] as for the blocking form.
    pub fn reduce_scatter_multi_async<T, B>(
        &self,
        inputs: &[&[T]],
        outputs: Vec<B>,
        op: ReduceOp,
    ) -> Begun<Vec<B>>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let members = self.members(inputs.len());
        let call = self.scatter_of_members(inputs, &outputs, op);
        self.group.submit_copy(call, Some(across(op).into()), outputs, move |own, outputs| {
            finish(op, own, members);
            round_and_deal_out(own, outputs);
        })
    }

    /// The call, and this rank's contribution to it.
    fn gather_of_members<T: Element>(
        &self,
        inputs: &[&[T]],
        outputs: &[impl AsRef<[T]>],
    ) -> Result<(Call, Vec<T>)> {
        let operation = "all_gather_multi";
        let len = check_members(operation, inputs)?;
        let all = check_members(operation, outputs)?;
        check_as_many(operation, inputs.len(), outputs.len())?;
        let own = inputs.concat();
        self.group.check_blocks(operation, own.len(), all, "an output")?;
        let parts = vec![len, inputs.len()];
        Ok((call::<T>(Collective::AllGather, own.len()).in_parts(parts), own))
    }

    /// The call, room for its result, and this rank's contribution to it.
    fn scatter_of_members<T: Element>(
        &self,
        inputs: &[&[T]],
        outputs: &[impl AsRef<[T]>],
        op: ReduceOp,
    ) -> Prepared<T::Accumulator> {
        let operation = "reduce_scatter_multi";
        let all = check_members(operation, inputs)?;
        let len = check_members(operation, outputs)?;
        check_as_many(operation, outputs.len(), inputs.len())?;
        let block = len * outputs.len();
        self.group.check_blocks(operation, block, all, "an input")?;
        let (call, sum) = summed(Collective::ReduceScatter, block, inputs, op)?;
        Ok((call, vec![T::Accumulator::zeroed(); block], sum))
    }

    /// The number of members of all ranks together.
    fn members(&self, of_a_rank: usize) -> usize {
        self.group.world_size() * of_a_rank
    }

    fn check_root_buffer<T>(
        &self,
        operation: &'static str,
        buffers: &[impl AsRef<[T]>],
        root: Rank,
        root_buffer: usize,
    ) -> Result<usize> {
        self.group.check_rank(operation, root)?;
        let len = check_members(operation, buffers)?;
        if root_buffer < buffers.len() {
            return Ok(len);
        }
        let problem =
            format!("there is no buffer {root_buffer}: the list has {} of them", buffers.len());
        Err(Error::InvalidArgument { operation, problem })
    }
}

/// Copies the elements to each buffer.
fn copy_to_each<T: Element>(elements: &mut [T], buffers: &mut [impl AsMut<[T]>]) {
    buffers.iter_mut().for_each(|buffer| copy(buffer.as_mut().into(), elements[..].into()));
}
