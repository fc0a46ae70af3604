//! The local work of a rank in collectives in which it has several members.

use bytemuck::Zeroable;
use drumline_engine::call::Call;
use drumline_kernels::{Source, Target, combine, narrow, reduce_tree, widen};
use drumline_schedule::{
    Collective,
    tree::{Node, merges},
};

use super::{call, lists::deal_out, usable};
use crate::{Element, Error, ReduceOp, Result};

/// Divides a sum by the number of `members`, if `op` is the average.
pub(super) fn finish<A: Element>(op: ReduceOp, sum: &mut [A], members: usize) {
    if op == ReduceOp::Avg && !sum.is_empty() {
        let all = Target::from(sum);
        reduce_tree(op, &[all], &[all.as_source()], &[0], Some(members));
    }
}

/// A call that reduces sums of members, in the type in which such sums are kept, and the sum of this rank's members.
pub(super) fn summed<T: Element>(
    operation: Collective,
    elements: usize,
    members: &[impl AsRef<[T]>],
    op: ReduceOp,
) -> Result<(Call, Vec<T::Accumulator>)> {
    // The parts also hold the type of the members, which the call shows nowhere else.
    let parts = vec![elements, members.len(), T::DTYPE as usize];
    let call = call::<T::Accumulator>(operation, elements).in_parts(parts);
    Ok((usable::<T>(call, &Some(op.into()))?, sum_of_members(members, op)))
}

/// The operator over the sums of all ranks. An average is divided at the end, by the number of all members.
pub(super) fn across(op: ReduceOp) -> ReduceOp {
    if op == ReduceOp::Avg { ReduceOp::Sum } else { op }
}

/// The canonical sum of this rank's members, neither divided nor rounded.
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

pub(super) fn round<T: Element>(sum: &[T::Accumulator], to: &mut [T]) {
    narrow(Target::from(to), Source::from(sum));
}

pub(super) fn round_and_deal_out<T: Element>(
    sum: &[T::Accumulator],
    buffers: &mut [impl AsMut<[T]>],
) {
    let mut rounded = vec![T::zeroed(); sum.len()];
    round(sum, &mut rounded);
    deal_out(&rounded, buffers);
}

/// The common length of the buffers.
pub(super) fn check_members<T>(
    operation: &'static str,
    buffers: &[impl AsRef<[T]>],
) -> Result<usize> {
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

pub(super) fn check_as_many(operation: &'static str, expected: usize, found: usize) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    let problem = format!("{expected} buffers are given on one side and {found} on the other");
    Err(Error::InvalidArgument { operation, problem })
}
