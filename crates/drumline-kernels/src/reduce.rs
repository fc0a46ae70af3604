//! Reductions.

use bytemuck::Pod;

use crate::isa::Isa;
use crate::kernels::{Reduction, depth};
use crate::operand::Addend;
use crate::{Element, ReduceOp, Source, Target};

/// Combines `src` into `dst`, element by element.
///
/// All operators commute bit for bit, payloads of NaN apart, so either of the two may be the left
/// operand. If this call completes the result of all ranks, `finish` is their number, and an average
/// is divided by it.
///
/// The result is rounded to `T`. Where `T` is narrower than its
/// [accumulator](Element::Accumulator), a partial result must not be rounded. So combine only the
/// inputs of exactly two ranks like this; for more ranks use [`reduce_tree`], or keep the partial
/// results [widened](crate::widen).
///
/// # Panics
///
/// When the lengths differ, when `finish` is 0 or more than `u32::MAX`, or when the type does
/// not [support](ReduceOp::supports) the operator.
pub fn combine<T: Element>(
    op: ReduceOp,
    dst: Target<'_, T>,
    src: Source<'_, T>,
    finish: Option<usize>,
) {
    reduce_tree(op, &[dst], &[dst.as_source(), src], &[0, 1], finish);
}

/// Combines all inputs in the order of a tree and writes the result to every destination, in one
/// pass over memory. Partial results are kept in [`Element::Accumulator`]; only the result is rounded
/// to `T`.
///
/// The tree is a program for a stack: push input `i`, then combine the two topmost partial results
/// `merges[i]` times. One partial result must be left at the end. If this call completes the result
/// of all ranks, `finish` is their number, and an average is divided by it.
///
/// A destination may be the same memory as an input. If two operands overlap only in part, the
/// results are unspecified.
///
/// # Panics
///
/// When lengths differ, when `merges` does not leave exactly one partial result, when `finish`
/// is 0 or more than `u32::MAX`, or when the type does not [support](ReduceOp::supports) the
/// operator.
pub fn reduce_tree<T: Element>(
    op: ReduceOp,
    dsts: &[Target<'_, T>],
    srcs: &[Source<'_, T>],
    merges: &[usize],
    finish: Option<usize>,
) {
    check(dsts, srcs.iter().map(Source::len), merges);
    T::reduce_kernel(Isa::best(), &reduction::<T>(op, merges, finish), dsts, srcs);
}

/// [`reduce_tree`] with inputs of either width, and a partial result: it is not rounded, and not divided.
///
/// # Panics
///
/// As [`reduce_tree`].
pub fn reduce_to_sums<T: Element>(
    op: ReduceOp,
    dsts: &[Target<'_, T::Accumulator>],
    srcs: &[Addend<'_, T>],
    merges: &[usize],
) {
    check(dsts, srcs.iter().map(Addend::len), merges);
    T::sum_kernel(Isa::best(), &reduction::<T>(op, merges, None), dsts, srcs);
}

/// [`reduce_tree`] with inputs of either width.
///
/// # Panics
///
/// As [`reduce_tree`].
pub fn reduce_sums<T: Element>(
    op: ReduceOp,
    dsts: &[Target<'_, T>],
    srcs: &[Addend<'_, T>],
    merges: &[usize],
    finish: Option<usize>,
) {
    check(dsts, srcs.iter().map(Addend::len), merges);
    T::round_kernel(Isa::best(), &reduction::<T>(op, merges, finish), dsts, srcs);
}

fn reduction<T: Element>(op: ReduceOp, merges: &[usize], finish: Option<usize>) -> Reduction<'_> {
    let dtype = T::DTYPE;
    assert!(op.supports(dtype), "{dtype} has no {op}");
    let ranks = finish.map(|ranks| u32::try_from(ranks).unwrap_or(0));
    assert_ne!(ranks, Some(0), "a number of ranks is between 1 and 2^32 - 1");
    Reduction { op, merges, divisor: ranks.filter(|_| op == ReduceOp::Avg) }
}

/// [`reduce_tree`] with a function in place of an operator. The function need not commute: its first
/// argument is the partial result of the inputs further left. Partial results are kept in `T`.
///
/// If the function panics, some elements of the destinations have been written and others have not.
///
/// # Panics
///
/// When lengths differ, or when `merges` does not leave exactly one partial result.
pub fn reduce_tree_with<T: Pod>(
    function: &dyn Fn(T, T) -> T,
    dsts: &[Target<'_, T>],
    srcs: &[Source<'_, T>],
    merges: &[usize],
) {
    check(dsts, srcs.iter().map(Source::len), merges);
    let mut waiting = Vec::with_capacity(depth(merges));
    for at in 0..srcs[0].len() {
        for (src, &merges) in srcs.iter().zip(merges) {
            let [input] = src.load(at);
            let left = waiting.len() - merges;
            let result =
                waiting.drain(left..).rev().fold(input, |right, left| function(left, right));
            waiting.push(result);
        }
        for result in waiting.drain(..) {
            dsts.iter().for_each(|dst| dst.store(at, [result]));
        }
    }
}

/// Panics unless there are inputs, a number of merges for each, and all operands have one length.
fn check<T>(
    dsts: &[Target<'_, T>],
    mut srcs: impl ExactSizeIterator<Item = usize>,
    merges: &[usize],
) {
    assert_eq!(srcs.len(), merges.len(), "one number of merges for each input");
    let first = srcs.next();
    assert!(first.is_some(), "the merges must leave one result: there are no inputs");
    let mut all = srcs.chain(dsts.iter().map(Target::len));
    assert!(all.all(|len| Some(len) == first), "operands of a reduction differ in length");
}
