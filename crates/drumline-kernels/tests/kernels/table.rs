//! The kernels as the library calls them: on bytes, by the table of their type. So these tests compile no kernel anew.

use drumline_kernels::{Addend, Element, ReduceOp, Source, Target};

pub(crate) fn reduce_tree<T: Element>(
    op: ReduceOp,
    dsts: &[Target<'_, T>],
    srcs: &[Source<'_, T>],
    merges: &[usize],
    finish: Option<usize>,
) {
    let srcs: Vec<_> = srcs.iter().map(|src| src.as_bytes()).collect();
    (T::DTYPE.kernels().reduce_tree)(op, &all_bytes(dsts), &srcs, merges, finish);
}

/// The tree over two, one of which is the destination.
pub(crate) fn combine<T: Element>(
    op: ReduceOp,
    dst: Target<'_, T>,
    src: Source<'_, T>,
    finish: Option<usize>,
) {
    reduce_tree(op, &[dst], &[dst.as_source(), src], &[0, 1], finish);
}

pub(crate) fn reduce_to_sums<T: Element>(
    op: ReduceOp,
    dsts: &[Target<'_, T::Accumulator>],
    srcs: &[Addend<'_, T>],
    merges: &[usize],
) {
    (T::DTYPE.kernels().reduce_to_sums)(op, &all_bytes(dsts), &addends(srcs), merges);
}

pub(crate) fn reduce_sums<T: Element>(
    op: ReduceOp,
    dsts: &[Target<'_, T>],
    srcs: &[Addend<'_, T>],
    merges: &[usize],
    finish: Option<usize>,
) {
    (T::DTYPE.kernels().reduce_sums)(op, &all_bytes(dsts), &addends(srcs), merges, finish);
}

pub(crate) fn widen<T: Element>(dst: &mut [T::Accumulator], src: Source<'_, T>) {
    (T::DTYPE.kernels().widen)(Target::from(dst).as_bytes(), src.as_bytes());
}

pub(crate) fn narrow<T: Element>(dst: Target<'_, T>, src: &[T::Accumulator]) {
    (T::DTYPE.kernels().narrow)(dst.as_bytes(), Source::from(src).as_bytes());
}

pub(crate) fn scale<T: Element>(data: Target<'_, T>, factor: T) {
    (T::DTYPE.kernels().scale)(data.as_bytes(), bytemuck::bytes_of(&factor));
}

fn all_bytes<'a, T: bytemuck::Pod>(targets: &[Target<'a, T>]) -> Vec<Target<'a, u8>> {
    targets.iter().map(|target| target.as_bytes()).collect()
}

fn addends<'a, T: Element>(srcs: &[Addend<'a, T>]) -> Vec<Addend<'a, u8>> {
    let addend = |src: &Addend<'a, T>| match src {
        Addend::Element(src) => Addend::Element(src.as_bytes()),
        Addend::Sum(src) => Addend::Sum(src.as_bytes()),
    };
    srcs.iter().map(addend).collect()
}
