//! Collectives in which every rank has several members: buffers of one length, as many on every
//! rank, each of which counts as a rank does elsewhere.
//!
//! Member `j` of rank `k` is number `k * n + j`, if ranks have `n` members each. Sums are those of a
//! host and its ranks under [`SumOrder::Placement`](crate::SumOrder::Placement): first the tree over
//! the members of a rank, then the tree over ranks. Partial sums are kept in the type that the
//! elements accumulate in.

use bytemuck::Zeroable;
use drumline_kernels::{Source, Target, combine, narrow, reduce_tree, widen};
use drumline_schedule::{
    step::Rank,
    tree::{Node, merges},
};

use super::{ProcessGroup, call, lists::deal_out};
use crate::{Element, Error, ReduceOp, Result, call::Call, executor::Operation as Kind};

impl ProcessGroup {
    /// Reduces all buffers of all ranks, in place: afterwards they are all the same.
    ///
    /// ```
    /// # use drumline::{ProcessGroup, ReduceOp};
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let (mut a, mut b) = ([1], [group.rank() as i32]);
    /// group.all_reduce_multi(&mut [&mut a, &mut b], ReduceOp::Sum).unwrap();
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
    /// [`ProcessGroup::all_reduce`].
    pub fn all_reduce_multi<T: Element>(
        &self,
        buffers: &mut [&mut [T]],
        op: ReduceOp,
    ) -> Result<()> {
        let len = check_members("all_reduce_multi", buffers)?;
        let mut sum = sum_of_members(buffers, op);
        let call = of_members::<T>(Kind::AllReduce, len, buffers.len()).reducing(across(op));
        self.run(call, &mut sum, &[])?;
        self.finish(op, &mut sum, buffers.len());
        buffers.iter_mut().for_each(|buffer| round(&sum, buffer));
        Ok(())
    }

    /// Reduces all buffers of all ranks into buffer `root_buffer` of rank `root`. All other
    /// buffers stay as they are.
    ///
    /// ```
    /// # use drumline::{ProcessGroup, ReduceOp};
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let (mut a, mut b) = ([1], [2]);
    /// group.reduce_multi(&mut [&mut a, &mut b], ReduceOp::Sum, 2, 1).unwrap();
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
    /// rank or has no such buffer; otherwise as [`ProcessGroup::reduce`].
    pub fn reduce_multi<T: Element>(
        &self,
        buffers: &mut [&mut [T]],
        op: ReduceOp,
        root: Rank,
        root_buffer: usize,
    ) -> Result<()> {
        let len = self.check_root_buffer("reduce_multi", buffers, root, root_buffer)?;
        let mut sum = sum_of_members(buffers, op);
        let call = of_members::<T>(Kind::Reduce, len, buffers.len()).rooted(root);
        self.run(call.reducing(across(op)), &mut sum, &[])?;
        if self.rank() == root {
            self.finish(op, &mut sum, buffers.len());
            round(&sum, buffers[root_buffer]);
        }
        Ok(())
    }

    /// Gives all buffers of all ranks what buffer `root_buffer` of rank `root` has.
    ///
    /// ```
    /// # use drumline::ProcessGroup;
    /// # let groups = ProcessGroup::local_world(3)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let (mut a, mut b) = ([1], [10 + group.rank() as u8]);
    /// group.broadcast_multi(&mut [&mut a, &mut b], 1, 1).unwrap();
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
    /// rank or has no such buffer; otherwise as [`ProcessGroup::broadcast`].
    pub fn broadcast_multi<T: Element>(
        &self,
        buffers: &mut [&mut [T]],
        root: Rank,
        root_buffer: usize,
    ) -> Result<()> {
        let len = self.check_root_buffer("broadcast_multi", buffers, root, root_buffer)?;
        let parts = vec![len, buffers.len()];
        let call = call::<T>(Kind::Broadcast, len).rooted(root).in_parts(parts);
        self.run(call, buffers[root_buffer], &[])?;
        let (before, at_and_behind) = buffers.split_at_mut(root_buffer);
        if let [source, behind @ ..] = at_and_behind {
            before.iter_mut().chain(behind).for_each(|buffer| buffer.copy_from_slice(source));
        }
        Ok(())
    }

    /// Collects the inputs of all ranks in every output, in the order of members.
    ///
    /// There are as many outputs as inputs. Each output holds a block for every member of the
    /// group: with `n` inputs, that of input `j` of rank `k` is block `k * n + j`.
    ///
    /// ```
    /// # use drumline::ProcessGroup;
    /// # let groups = ProcessGroup::local_world(2)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let inputs = [10, 11].map(|value| [value + 10 * group.rank() as i16]);
    /// let [mut a, mut b] = [[0; 4]; 2];
    /// group.all_gather_multi(&[&inputs[0], &inputs[1]], &mut [&mut a, &mut b]).unwrap();
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
    /// [`ProcessGroup::all_gather`].
    pub fn all_gather_multi<T: Element>(
        &self,
        inputs: &[&[T]],
        outputs: &mut [&mut [T]],
    ) -> Result<()> {
        let operation = "all_gather_multi";
        let len = check_members(operation, inputs)?;
        let all = check_members(operation, outputs)?;
        check_as_many(operation, inputs.len(), outputs.len())?;
        let own = inputs.concat();
        self.check_blocks(operation, own.len(), all, "an output")?;
        if let [first, others @ ..] = outputs {
            let parts = vec![len, inputs.len()];
            let call = call::<T>(Kind::AllGather, own.len()).in_parts(parts);
            self.run(call, first, &own)?;
            others.iter_mut().for_each(|other| other.copy_from_slice(first));
        }
        Ok(())
    }

    /// Reduces all inputs of all ranks, and gives every member its block: the inverse of
    /// [`ProcessGroup::all_gather_multi`].
    ///
    /// There are as many inputs as outputs, `n` of them. Each input holds a block for every
    /// member of the group, of the length of an output; output `j` of rank `k` gets the sum of all
    /// blocks `k * n + j`.
    ///
    /// ```
    /// # use drumline::{ProcessGroup, ReduceOp};
    /// # let groups = ProcessGroup::local_world(2)?;
    /// # std::thread::scope(|threads| {
    /// #     for group in groups {
    /// #         threads.spawn(move || {
    /// let input = [1, 2, 3, 4];
    /// let (mut a, mut b) = ([0], [0]);
    /// let (inputs, mut outputs) = ([&input[..], &input], [&mut a[..], &mut b]);
    /// group.reduce_scatter_multi(&inputs, &mut outputs, ReduceOp::Sum).unwrap();
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
    /// [`ProcessGroup::reduce_scatter`].
    pub fn reduce_scatter_multi<T: Element>(
        &self,
        inputs: &[&[T]],
        outputs: &mut [&mut [T]],
        op: ReduceOp,
    ) -> Result<()> {
        let operation = "reduce_scatter_multi";
        let all = check_members(operation, inputs)?;
        let len = check_members(operation, outputs)?;
        check_as_many(operation, outputs.len(), inputs.len())?;
        let block = len * outputs.len();
        self.check_blocks(operation, block, all, "an input")?;
        let sum = sum_of_members(inputs, op);
        let mut own = vec![T::Accumulator::zeroed(); block];
        let call = of_members::<T>(Kind::ReduceScatter, block, inputs.len()).reducing(across(op));
        self.run(call, &mut own, &sum)?;
        self.finish(op, &mut own, inputs.len());
        let mut rounded = vec![T::zeroed(); block];
        round(&own, &mut rounded);
        deal_out(&rounded, outputs);
        Ok(())
    }

    /// Completes an average.
    fn finish<A: Element>(&self, op: ReduceOp, sum: &mut [A], members: usize) {
        if op == ReduceOp::Avg && !sum.is_empty() {
            let all = Target::from(sum);
            let members = self.world_size() * members;
            reduce_tree(op, &[all], &[all.as_source()], &[0], Some(members));
        }
    }

    fn check_root_buffer<T>(
        &self,
        operation: &'static str,
        buffers: &[impl AsRef<[T]>],
        root: Rank,
        root_buffer: usize,
    ) -> Result<usize> {
        self.check_rank(operation, root)?;
        let len = check_members(operation, buffers)?;
        if root_buffer < buffers.len() {
            return Ok(len);
        }
        let problem =
            format!("there is no buffer {root_buffer}: the list has {} of them", buffers.len());
        Err(Error::InvalidArgument { operation, problem })
    }
}

/// A reduction of members, in the type that their sums are kept in.
fn of_members<T: Element>(operation: Kind, elements: usize, members: usize) -> Call {
    // The type of the members themselves does not show otherwise.
    let parts = vec![elements, members, T::DTYPE as usize];
    call::<T::Accumulator>(operation, elements).in_parts(parts)
}

/// What ranks do with sums of members: an average is divided in the end, by all members.
fn across(op: ReduceOp) -> ReduceOp {
    if op == ReduceOp::Avg { ReduceOp::Sum } else { op }
}

/// The canonical sum of a rank's members, not divided and not rounded.
fn sum_of_members<T: Element>(members: &[impl AsRef<[T]>], op: ReduceOp) -> Vec<T::Accumulator> {
    let leaves: Vec<Node> = (0..members.len()).map(Node::leaf).collect();
    let merges = merges(Node::root(members.len()), &leaves).unwrap_or_default();
    let mut stack: Vec<Vec<T::Accumulator>> = Vec::new();
    for (member, merges) in members.iter().zip(merges) {
        let member = member.as_ref();
        let mut right = vec![T::Accumulator::zeroed(); member.len()];
        widen(Target::from(&mut right[..]), Source::from(member));
        for _ in 0..merges {
            let Some(mut left) = stack.pop() else { break };
            combine(op, Target::from(&mut left[..]), Source::from(&right[..]), None);
            right = left;
        }
        stack.push(right);
    }
    stack.pop().unwrap_or_default()
}

fn round<T: Element>(sum: &[T::Accumulator], to: &mut [T]) {
    narrow(Target::from(to), Source::from(sum));
}

/// The common length of the buffers.
fn check_members<T>(operation: &'static str, buffers: &[impl AsRef<[T]>]) -> Result<usize> {
    let invalid = |problem| Err(Error::InvalidArgument { operation, problem });
    let mut lengths = buffers.iter().map(|buffer| buffer.as_ref().len());
    let Some(first) = lengths.next() else {
        return invalid("the list is empty: every rank has at least one buffer".to_owned());
    };
    match lengths.find(|len| *len != first) {
        None => Ok(first),
        Some(other) => invalid(format!(
            "a buffer has {other} elements and the first one {first}: all must be as long"
        )),
    }
}

fn check_as_many(operation: &'static str, expected: usize, found: usize) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    let problem = format!("{expected} buffers are given on one side and {found} on the other");
    Err(Error::InvalidArgument { operation, problem })
}
