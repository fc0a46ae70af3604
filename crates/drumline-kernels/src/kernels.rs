//! The loops for each element type.

use std::marker::PhantomData;

use bytemuck::Zeroable;
use half::{bf16, f16};
use num_complex::Complex;

use crate::arithmetic::{And, Arithmetic, Max, Min, Operator, Or, Product, Sum, Xor};
use crate::isa::{Features, Isa, Kernel};
use crate::lanes::Lanes;
use crate::operand::Addend;
use crate::{Bool, F8E4M3, F8E5M2, ReduceOp, Source, Target};

/// What a kernel computes from the inputs, whatever their type.
#[derive(Clone, Copy, Debug)]
pub struct Reduction<'a> {
    pub(crate) op: ReduceOp,
    /// The stack program of [`reduce_tree`](crate::reduce_tree).
    pub(crate) merges: &'a [usize],
    /// The number by which the result is divided, if it is an average.
    pub(crate) divisor: Option<u32>,
}

/// The loops as functions that are not generic, so that they are compiled once, at the optimisation
/// level of this crate, and not again in every crate that calls them.
///
/// All operands of a function have the same length. An operand that is shorter than the first one
/// causes a panic, never an access beyond its end.
pub trait Kernels: Lanes {
    fn reduce_kernel(
        isa: Isa,
        reduction: &Reduction<'_>,
        dsts: &[Target<'_, Self>],
        srcs: &[Source<'_, Self>],
    );
    /// Inputs of either width, and partial results.
    fn sum_kernel(
        isa: Isa,
        reduction: &Reduction<'_>,
        dsts: &[Target<'_, Self::Wide>],
        srcs: &[Addend<'_, Self>],
    );
    /// Inputs of either width, and results that are rounded.
    fn round_kernel(
        isa: Isa,
        reduction: &Reduction<'_>,
        dsts: &[Target<'_, Self>],
        srcs: &[Addend<'_, Self>],
    );
    fn widen_kernel(isa: Isa, dst: Target<'_, Self::Wide>, src: Source<'_, Self>);
    fn narrow_kernel(isa: Isa, dst: Target<'_, Self>, src: Source<'_, Self::Wide>);
    fn scale_kernel(isa: Isa, data: Target<'_, Self>, factor: Self);
}

/// Implements [`Kernels`] for the types of one class, with a loop for each operator that they have.
macro_rules! kernels {
    ($($type:ty),* => $operators:tt, scaled by $product:ident, $width:ident) => {$(
        impl Kernels for $type {
            fn reduce_kernel(
                isa: Isa,
                reduction: &Reduction<'_>,
                dsts: &[Target<'_, Self>],
                srcs: &[Source<'_, Self>],
            ) {
                by_operator!(reduction.op, $operators, (isa, reduction, dsts, srcs));
            }

            fn sum_kernel(
                isa: Isa,
                reduction: &Reduction<'_>,
                dsts: &[Target<'_, Self::Wide>],
                srcs: &[Addend<'_, Self>],
            ) {
                mixed!($width, $operators, (isa, reduction, dsts, srcs));
            }

            fn round_kernel(
                isa: Isa,
                reduction: &Reduction<'_>,
                dsts: &[Target<'_, Self>],
                srcs: &[Addend<'_, Self>],
            ) {
                mixed!($width, $operators, (isa, reduction, dsts, srcs));
            }

            fn widen_kernel(isa: Isa, dst: Target<'_, Self::Wide>, src: Source<'_, Self>) {
                isa.run(Walk::<BLOCK, _> { len: dst.len(), blocks: Widen { dst, src } });
            }

            fn narrow_kernel(isa: Isa, dst: Target<'_, Self>, src: Source<'_, Self::Wide>) {
                isa.run(Walk::<BLOCK, _> { len: dst.len(), blocks: Narrow { dst, src } });
            }

            fn scale_kernel(isa: Isa, data: Target<'_, Self>, factor: Self) {
                let blocks = Scale { data, factor, op: PhantomData::<$product> };
                isa.run(Walk::<BLOCK, _> { len: data.len(), blocks });
            }
        }
    )*};
}

/// Inputs of either width. If sums are as wide as elements, there is only one width.
macro_rules! mixed {
    (narrow, $operators:tt, ($isa:expr, $reduction:expr, $dsts:expr, $srcs:expr)) => {
        by_operator!($reduction.op, $operators, ($isa, $reduction, $dsts, $srcs))
    };
    (wide, $operators:tt, ($isa:expr, $reduction:expr, $dsts:expr, $srcs:expr)) => {{
        let srcs: Vec<Source<'_, Self>> = $srcs
            .iter()
            .map(|src| match src {
                Addend::Element(src) | Addend::Sum(src) => *src,
            })
            .collect();
        Self::reduce_kernel($isa, $reduction, $dsts, &srcs)
    }};
}

macro_rules! by_operator {
    ($op:expr, [$($($name:ident)|+ => $shapes:ident::<$loops:ident>),*], $operands:tt) => {
        match $op {
            $($(ReduceOp::$name)|+ => $shapes::<_, _, $loops> $operands,)*
            #[allow(unreachable_patterns, reason = "some types have all operators")]
            op => unreachable!("`reduce_tree` refuses {op}"),
        }
    };
}

kernels!(
    u8, u16, u32, u64, i8, i16, i32, i64 => [
        Sum | Avg => rolled::<Sum>, Product => rolled::<Product>, Min => rolled::<Min>, Max => rolled::<Max>,
        Band => rolled::<And>, Bor => rolled::<Or>, Bxor => rolled::<Xor>
    ],
    scaled by Product, wide
);
kernels!(
    F8E4M3, F8E5M2 => [
        Sum | Avg => rolled::<Sum>, Product => rolled::<Product>, Min => rolled::<Min>, Max => rolled::<Max>
    ],
    scaled by Product, narrow
);
kernels!(
    f16, bf16 => [
        Sum | Avg => unrolled::<Sum>, Product => rolled::<Product>, Min => rolled::<Min>, Max => rolled::<Max>
    ],
    scaled by Product, narrow
);
kernels!(
    f32, f64 => [
        Sum | Avg => unrolled::<Sum>, Product => rolled::<Product>, Min => rolled::<Min>, Max => rolled::<Max>
    ],
    scaled by Product, wide
);
kernels!(
    Complex<f32>, Complex<f64> => [Sum | Avg => rolled::<Sum>, Product => rolled::<Product>],
    scaled by Product, wide
);
kernels!(
    Bool => [
        Sum | Max | Bor => rolled::<Or>, Product | Min | Band => rolled::<And>, Bxor => rolled::<Xor>
    ],
    scaled by And, wide
);

/// The largest number of partial results on the stack of a program. Panics unless the program leaves
/// one result.
pub(crate) fn depth(merges: &[usize]) -> usize {
    let mut waiting: usize = 0;
    let mut most = 1;
    for &merges in merges {
        assert!(merges <= waiting, "more merges than partial results");
        waiting = waiting + 1 - merges;
        most = most.max(waiting);
    }
    assert_eq!(waiting, 1, "the merges must leave one result");
    most
}

/// An operand that is read as wide values.
trait Input<W> {
    fn len(&self) -> usize;
    fn read<F: Features, const N: usize>(&self, at: usize) -> [W; N];
}

impl<T: Lanes> Input<T::Wide> for Source<'_, T> {
    fn len(&self) -> usize {
        Source::len(self)
    }

    #[inline(always)]
    fn read<F: Features, const N: usize>(&self, at: usize) -> [T::Wide; N] {
        T::widen::<F, N>(self.load(at))
    }
}

impl<T: Lanes> Input<T::Wide> for Addend<'_, T> {
    fn len(&self) -> usize {
        Addend::len(self)
    }

    #[inline(always)]
    fn read<F: Features, const N: usize>(&self, at: usize) -> [T::Wide; N] {
        match self {
            Addend::Element(source) => T::widen::<F, N>(source.load(at)),
            Addend::Sum(source) => source.load(at),
        }
    }
}

/// Loops for the canonical trees over four and eight inputs besides. They are for sums of gradients alone: each takes as
/// long to compile as all other loops of its operator.
fn unrolled<T: Lanes, I: Input<T::Wide>, O: Operator<T::Wide>>(
    isa: Isa,
    reduction: &Reduction<'_>,
    dsts: &[Target<'_, T>],
    srcs: &[I],
) {
    match reduction.merges {
        [0, 1, 0, 2] => few::<T, I, O, 4>(isa, reduction.divisor, dsts, srcs),
        [0, 1, 0, 2, 0, 1, 0, 3] => few::<T, I, O, 8>(isa, reduction.divisor, dsts, srcs),
        _ => rolled::<T, I, O>(isa, reduction, dsts, srcs),
    }
}

/// A loop for the only tree over two inputs, and one for every other tree.
fn rolled<T: Lanes, I: Input<T::Wide>, O: Operator<T::Wide>>(
    isa: Isa,
    reduction: &Reduction<'_>,
    dsts: &[Target<'_, T>],
    srcs: &[I],
) {
    let &Reduction { merges, divisor, .. } = reduction;
    if let [0, 1] = merges {
        return few::<T, I, O, 2>(isa, divisor, dsts, srcs);
    }
    let on_stack = &mut [[T::Wide::zeroed(); MANY_BLOCK]; DEPTH_ON_STACK];
    let mut on_heap;
    let depth = depth(merges);
    let waiting = if depth <= DEPTH_ON_STACK {
        &mut on_stack[..]
    } else {
        on_heap = vec![[T::Wide::zeroed(); MANY_BLOCK]; depth];
        &mut on_heap[..]
    };
    let blocks = Many { dsts, srcs, merges, divisor, waiting, op: PhantomData::<O> };
    isa.run(Walk::<MANY_BLOCK, _> { len: srcs[0].len(), blocks });
}

#[inline]
fn few<T: Lanes, I: Input<T::Wide>, O: Operator<T::Wide>, const INPUTS: usize>(
    isa: Isa,
    divisor: Option<u32>,
    dsts: &[Target<'_, T>],
    srcs: &[I],
) {
    let Ok(srcs) = <&[I; INPUTS]>::try_from(srcs) else {
        unreachable!("a program has one number of merges for each input");
    };
    let blocks = Few::<T, I, O, INPUTS> { dsts, srcs, divisor, op: PhantomData };
    isa.run(Walk::<BLOCK, _> { len: srcs[0].len(), blocks });
}

/// Elements of a block; of `f32`, one cache line.
const BLOCK: usize = 16;

/// Elements of a block for [`Many`], which has more to do between blocks.
const MANY_BLOCK: usize = 32;

/// Partial results that fit on the stack: enough for the canonical tree over 64 inputs.
const DEPTH_ON_STACK: usize = 7;

/// Work on the block of `N` elements from `at` on, for any `N`.
///
/// All elements of a block are loaded before any is stored. So operands may be the same memory, and
/// the compiler vectorises the work without checks for that.
trait Blocks {
    fn block<F: Features, const N: usize>(&mut self, at: usize);
}

/// Works on all elements in order: in blocks of `BLOCK` elements, and one by one at the end.
struct Walk<const BLOCK: usize, B> {
    len: usize,
    blocks: B,
}

impl<const BLOCK: usize, B: Blocks> Kernel for Walk<BLOCK, B> {
    #[inline(always)]
    fn run<F: Features>(self) {
        let Walk { len, mut blocks } = self;
        let mut at = 0;
        while at + BLOCK <= len {
            blocks.block::<F, BLOCK>(at);
            at += BLOCK;
        }
        while at < len {
            blocks.block::<F, 1>(at);
            at += 1;
        }
    }
}

/// Copies between operands that do not overlap.
pub(crate) fn copy_by_lines(isa: Isa, dst: Target<'_, u8>, src: Source<'_, u8>) {
    isa.run(Walk::<COPY_BLOCK, _> { len: src.len(), blocks: Lines { dst, src } });
}

/// Bytes of two cache lines.
const COPY_BLOCK: usize = 128;

struct Lines<'a> {
    dst: Target<'a, u8>,
    src: Source<'a, u8>,
}

impl Blocks for Lines<'_> {
    #[inline(always)]
    fn block<F: Features, const N: usize>(&mut self, at: usize) {
        self.dst.store::<N>(at, self.src.load(at));
    }
}

struct Widen<'a, T: Lanes> {
    dst: Target<'a, T::Wide>,
    src: Source<'a, T>,
}

impl<T: Lanes> Blocks for Widen<'_, T> {
    #[inline(always)]
    fn block<F: Features, const N: usize>(&mut self, at: usize) {
        self.dst.store(at, T::widen::<F, N>(self.src.load(at)));
    }
}

struct Narrow<'a, T: Lanes> {
    dst: Target<'a, T>,
    src: Source<'a, T::Wide>,
}

impl<T: Lanes> Blocks for Narrow<'_, T> {
    #[inline(always)]
    fn block<F: Features, const N: usize>(&mut self, at: usize) {
        self.dst.store(at, T::narrow::<F, N>(self.src.load(at)));
    }
}

/// Multiplies each element by a factor and rounds the product.
struct Scale<'a, T: Lanes, O> {
    data: Target<'a, T>,
    factor: T,
    op: PhantomData<O>,
}

impl<T: Lanes, O: Operator<T::Wide>> Blocks for Scale<'_, T, O> {
    #[inline(always)]
    fn block<F: Features, const N: usize>(&mut self, at: usize) {
        let values = T::widen::<F, N>(self.data.as_source().load(at));
        let factor = T::widen::<F, N>([self.factor; N]);
        self.data.store(at, T::narrow::<F, N>(combine::<O, _, N>(values, factor)));
    }
}

/// The canonical tree over few inputs, whose number is a power of two. All of them fit in registers.
struct Few<'a, T: Lanes, I, O, const INPUTS: usize> {
    dsts: &'a [Target<'a, T>],
    srcs: &'a [I; INPUTS],
    divisor: Option<u32>,
    op: PhantomData<O>,
}

impl<T, I, O, const INPUTS: usize> Blocks for Few<'_, T, I, O, INPUTS>
where
    T: Lanes,
    I: Input<T::Wide>,
    O: Operator<T::Wide>,
{
    #[inline(always)]
    fn block<F: Features, const N: usize>(&mut self, at: usize) {
        let mut partial = [[T::Wide::zeroed(); N]; INPUTS];
        for (partial, src) in partial.iter_mut().zip(self.srcs) {
            *partial = src.read::<F, N>(at);
        }
        let mut width = INPUTS;
        while width > 1 {
            width /= 2;
            for i in 0..width {
                partial[i] = combine::<O, _, N>(partial[2 * i], partial[2 * i + 1]);
            }
        }
        finish::<T, F, O, N>(self.dsts, at, partial[0], self.divisor);
    }
}

/// Any tree over any number of inputs.
struct Many<'a, T: Lanes, I, O> {
    dsts: &'a [Target<'a, T>],
    srcs: &'a [I],
    merges: &'a [usize],
    divisor: Option<u32>,
    /// A block for each partial result that waits to be merged.
    waiting: &'a mut [[T::Wide; MANY_BLOCK]],
    op: PhantomData<O>,
}

impl<T: Lanes, I: Input<T::Wide>, O: Operator<T::Wide>> Blocks for Many<'_, T, I, O> {
    #[inline(always)]
    fn block<F: Features, const N: usize>(&mut self, at: usize) {
        // The topmost partial result stays in registers.
        let mut top = self.srcs[0].read::<F, N>(at);
        let mut height = 0;
        for (src, &merges) in self.srcs.iter().zip(self.merges).skip(1) {
            let input = src.read::<F, N>(at);
            if merges == 0 {
                self.waiting[height][..N].copy_from_slice(&top);
                height += 1;
                top = input;
                continue;
            }
            top = combine::<O, _, N>(top, input);
            for _ in 1..merges {
                height -= 1;
                for (top, &lower) in top.iter_mut().zip(&self.waiting[height][..N]) {
                    *top = O::apply(lower, *top);
                }
            }
        }
        finish::<T, F, O, N>(self.dsts, at, top, self.divisor);
    }
}

#[inline(always)]
fn combine<O: Operator<A>, A: Arithmetic, const N: usize>(mut a: [A; N], b: [A; N]) -> [A; N] {
    for (a, b) in a.iter_mut().zip(b) {
        *a = O::apply(*a, b);
    }
    a
}

#[inline(always)]
fn finish<T: Lanes, F: Features, O: Operator<T::Wide>, const N: usize>(
    dsts: &[Target<'_, T>],
    at: usize,
    mut result: [T::Wide; N],
    divisor: Option<u32>,
) {
    if O::AVERAGES
        && let Some(divisor) = divisor
    {
        for value in &mut result {
            *value = value.divide(divisor);
        }
    }
    let result = T::narrow::<F, N>(result);
    for dst in dsts {
        dst.store(at, result);
    }
}
