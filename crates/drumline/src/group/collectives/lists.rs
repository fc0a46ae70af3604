//! Collectives on lists of buffers.
//!
//! Two kinds: in the `_list` forms a list has a buffer for every rank, in the `_coalesced` forms it
//! has the buffers of several calls of one type, which travel as one operation. Both copy the
//! buffers to one behind the other and back.

use drumline_schedule::step::Rank;

use super::{ProcessGroup, call, call_of};
use crate::{Element, Error, Operator, Result, executor::Operation as Kind};

impl ProcessGroup {
    /// [`ProcessGroup::all_gather`] into a buffer for every rank. They may have different lengths,
    /// the same on all ranks; that of this rank has the length of `input`.
    ///
    /// ```
    /// # use drumline::ProcessGroup;
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let (mut a, mut b, mut c) = ([0; 1], [0; 2], [0; 3]);
    /// let own = vec![7; group.rank() + 1];
    /// group.all_gather_list(&own, &mut [&mut a, &mut b, &mut c]).unwrap();
    /// assert_eq!((a, b, c), ([7], [7; 2], [7; 3]));
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::all_gather_v`].
    pub fn all_gather_list<T: Element>(&self, input: &[T], outputs: &mut [&mut [T]]) -> Result<()> {
        let counts = lengths(outputs);
        let blocks = self.blocks_by_rank("all_gather_list", &counts, input.len(), None)?;
        let mut all = vec![T::zeroed(); counts.iter().sum()];
        self.run(call_of::<T>(Kind::AllGather, blocks), &mut all, input)?;
        deal_out(&all, outputs);
        Ok(())
    }

    /// [`ProcessGroup::gather`] into a buffer for every rank, all as long as `input`. On ranks other
    /// than the root the list is empty.
    ///
    /// ```
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
    /// group.gather_list(&[group.rank() as u16; 2], &mut outputs, 0).unwrap();
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
    /// As [`ProcessGroup::gather`].
    pub fn gather_list<T: Element>(
        &self,
        input: &[T],
        outputs: &mut [&mut [T]],
        root: Rank,
    ) -> Result<()> {
        let operation = "gather_list";
        self.check_list_at_root(operation, root, &lengths(outputs), input.len())?;
        let mut all = vec![T::zeroed(); outputs.len() * input.len()];
        self.run(call::<T>(Kind::Gather, input.len()).rooted(root), &mut all, input)?;
        deal_out(&all, outputs);
        Ok(())
    }

    /// [`ProcessGroup::scatter`] of a buffer for every rank, all as long as `output`. On ranks other
    /// than the root the list is empty.
    ///
    /// ```
    /// # use drumline::ProcessGroup;
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let inputs: &[&[i8]] = if group.rank() == 1 { &[&[1], &[2], &[3]] } else { &[] };
    /// let mut own = [0];
    /// group.scatter_list(inputs, &mut own, 1).unwrap();
    /// assert_eq!(own, [group.rank() as i8 + 1]);
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::scatter`].
    pub fn scatter_list<T: Element>(
        &self,
        inputs: &[&[T]],
        output: &mut [T],
        root: Rank,
    ) -> Result<()> {
        self.check_list_at_root("scatter_list", root, &lengths(inputs), output.len())?;
        let call = call::<T>(Kind::Scatter, output.len()).rooted(root);
        self.run(call, output, &inputs.concat())
    }

    /// [`ProcessGroup::reduce_scatter`] of a buffer for every rank. They may have different
    /// lengths, the same on all ranks; that of this rank has the length of `output`.
    ///
    /// ```
    /// # use drumline::{ProcessGroup, ReduceOp};
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let mut part = vec![0; group.rank()];
    /// group.reduce_scatter_list(&[&[], &[1], &[2, 3]], &mut part, ReduceOp::Sum).unwrap();
    /// assert_eq!(part, [vec![], vec![3], vec![6, 9]][group.rank()]);
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::reduce_scatter_v`].
    pub fn reduce_scatter_list<T: Element>(
        &self,
        inputs: &[&[T]],
        output: &mut [T],
        op: impl Into<Operator<T>>,
    ) -> Result<()> {
        let counts = lengths(inputs);
        let blocks = self.blocks_by_rank("reduce_scatter_list", &counts, output.len(), None)?;
        let call = call_of::<T>(Kind::ReduceScatter, blocks).reducing(op);
        self.run(call, output, &inputs.concat())
    }

    /// [`ProcessGroup::all_to_all_v`] with a buffer to and one from every rank, of any lengths.
    ///
    /// ```
    /// # use drumline::ProcessGroup;
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let [mut a, mut b, mut c] = [[0]; 3];
    /// let to = [0, 1, 2].map(|to| [10 * group.rank() as u64 + to]);
    /// group.all_to_all_list(&[&to[0], &to[1], &to[2]], &mut [&mut a, &mut b, &mut c]).unwrap();
    /// assert_eq!([a, b, c].concat(), [0, 10, 20].map(|value| value + group.rank() as u64));
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::all_to_all_v`].
    pub fn all_to_all_list<T: Element>(
        &self,
        inputs: &[&[T]],
        outputs: &mut [&mut [T]],
    ) -> Result<()> {
        let (send_counts, recv_counts) = (lengths(inputs), lengths(outputs));
        let mut all = vec![T::zeroed(); recv_counts.iter().sum()];
        self.all_to_all_v(&inputs.concat(), &send_counts, &mut all, &recv_counts)?;
        deal_out(&all, outputs);
        Ok(())
    }

    /// [`ProcessGroup::all_reduce`] of several buffers as one operation.
    ///
    /// ```
    /// # use drumline::{ProcessGroup, ReduceOp};
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let (mut a, mut b) = ([1.0], [2.0, 3.0]);
    /// group.all_reduce_coalesced(&mut [&mut a, &mut b], ReduceOp::Avg).unwrap();
    /// assert_eq!((a, b), ([1.0], [2.0, 3.0]));
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::all_reduce`]. Ranks whose buffers have other lengths are told so.
    pub fn all_reduce_coalesced<T: Element>(
        &self,
        buffers: &mut [&mut [T]],
        op: impl Into<Operator<T>>,
    ) -> Result<()> {
        let mut all = concat(buffers);
        let call = call::<T>(Kind::AllReduce, all.len()).in_parts(lengths(buffers));
        self.run(call.reducing(op), &mut all, &[])?;
        deal_out(&all, buffers);
        Ok(())
    }

    /// [`ProcessGroup::all_gather`] of `inputs[i]` into `outputs[i]`, for all `i`, as one operation.
    ///
    /// ```
    /// # use drumline::ProcessGroup;
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let (mut a, mut b) = ([0; 3], [0; 6]);
    /// let own = [1, 2, 3].map(|value| value * 10_i32.pow(group.rank() as u32));
    /// group.all_gather_coalesced(&[&own[..1], &own[1..]], &mut [&mut a, &mut b]).unwrap();
    /// assert_eq!((a, b), ([1, 10, 100], [2, 3, 20, 30, 200, 300]));
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::all_gather`]. Ranks whose buffers have other lengths are told so.
    pub fn all_gather_coalesced<T: Element>(
        &self,
        inputs: &[&[T]],
        outputs: &mut [&mut [T]],
    ) -> Result<()> {
        let parts = lengths(inputs);
        self.check_pairs_of_buffers(
            "all_gather_coalesced",
            &parts,
            &lengths(outputs),
            "an output",
        )?;
        let own = inputs.concat();
        let mut all = vec![T::zeroed(); own.len() * self.world_size()];
        let call = call::<T>(Kind::AllGather, own.len()).in_parts(parts);
        self.run(call, &mut all, &own)?;
        let mut rest = &all[..];
        for rank in 0..self.world_size() {
            for (input, output) in inputs.iter().zip(outputs.iter_mut()) {
                let (block, behind) = rest.split_at(input.len());
                output[rank * input.len()..][..input.len()].copy_from_slice(block);
                rest = behind;
            }
        }
        Ok(())
    }

    /// [`ProcessGroup::reduce_scatter`] of `inputs[i]` into `outputs[i]`, for all `i`, as one
    /// operation.
    ///
    /// ```
    /// # use drumline::{ProcessGroup, ReduceOp};
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let (mut a, mut b) = ([0], [0, 0]);
    /// let (inputs, mut outputs) = ([&[1, 2, 3][..], &[4, 4, 5, 5, 6, 6]], [&mut a[..], &mut b]);
    /// group.reduce_scatter_coalesced(&inputs, &mut outputs, ReduceOp::Max).unwrap();
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
    /// As [`ProcessGroup::reduce_scatter`]. Ranks whose buffers have other lengths are told so.
    pub fn reduce_scatter_coalesced<T: Element>(
        &self,
        inputs: &[&[T]],
        outputs: &mut [&mut [T]],
        op: impl Into<Operator<T>>,
    ) -> Result<()> {
        let (operation, parts) = ("reduce_scatter_coalesced", lengths(outputs));
        self.check_pairs_of_buffers(operation, &parts, &lengths(inputs), "an input")?;
        let blocks_for = |rank: Rank| {
            let blocks = inputs.iter().zip(&parts);
            blocks.flat_map(move |(input, len)| &input[rank * len..][..*len])
        };
        let all: Vec<T> = (0..self.world_size()).flat_map(blocks_for).copied().collect();
        let mut own = vec![T::zeroed(); parts.iter().sum()];
        let call = call::<T>(Kind::ReduceScatter, own.len()).in_parts(parts).reducing(op);
        self.run(call, &mut own, &all)?;
        deal_out(&own, outputs);
        Ok(())
    }

    fn check_list_at_root(
        &self,
        operation: &'static str,
        root: Rank,
        lengths: &[usize],
        block: usize,
    ) -> Result<()> {
        self.check_rank(operation, root)?;
        let expected = if self.rank() == root { self.world_size() } else { 0 };
        self.check_entries(operation, lengths.len(), expected)?;
        lengths
            .iter()
            .try_for_each(|&len| self.check_len(operation, "a buffer of the list", len, block))
    }

    /// Whether each long buffer holds a block for every rank of the short one beside it.
    fn check_pairs_of_buffers(
        &self,
        operation: &'static str,
        blocks: &[usize],
        long: &[usize],
        what: &str,
    ) -> Result<()> {
        self.check_entries(operation, long.len(), blocks.len())?;
        let mut pairs = blocks.iter().zip(long);
        pairs.try_for_each(|(&block, &long)| self.check_blocks(operation, block, long, what))
    }

    fn check_entries(&self, operation: &'static str, found: usize, expected: usize) -> Result<()> {
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

fn concat<T: Element>(buffers: &[&mut [T]]) -> Vec<T> {
    buffers.iter().flat_map(|buffer| buffer.iter().copied()).collect()
}

/// The inverse of `concat`.
pub(super) fn deal_out<T: Element>(mut all: &[T], buffers: &mut [&mut [T]]) {
    for buffer in buffers {
        let (own, rest) = all.split_at(buffer.len());
        buffer.copy_from_slice(own);
        all = rest;
    }
}
