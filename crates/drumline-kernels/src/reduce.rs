use crate::{Element, ReduceOp};

/// Combines `src` into `dst`, element by element.
///
/// All operators commute bit for bit, payloads of NaN apart, so it does not matter which of the
/// two is the left operand. `finish` is the number of ranks when this completes the sum of all
/// of them.
///
/// # Panics
///
/// When the lengths differ.
pub fn combine<T: Element>(op: ReduceOp, dst: &mut [T], src: &[T], finish: Option<usize>) {
    assert_eq!(dst.len(), src.len(), "operands of a reduction differ in length");
    match (op, finish) {
        (ReduceOp::Sum, _) | (ReduceOp::Avg, None) => zip(dst, src, T::sum),
        (ReduceOp::Avg, Some(ranks)) => zip(dst, src, |a, b| a.sum(b).divide(ranks)),
        (ReduceOp::Min, _) => zip(dst, src, T::min),
        (ReduceOp::Max, _) => zip(dst, src, T::max),
    }
}

#[inline(always)]
fn zip<T: Copy>(dst: &mut [T], src: &[T], f: impl Fn(T, T) -> T) {
    for (a, b) in dst.iter_mut().zip(src) {
        *a = f(*a, *b);
    }
}

/// One operand of [`reduce_tree`].
#[derive(Clone, Copy, Debug)]
pub enum TreeInput<'a, T> {
    /// What the destination holds before the call.
    Destination,
    /// Another slice, as long as the destination.
    Slice(&'a [T]),
}

/// Elements per chunk of [`reduce_tree`]. The partial sums of a chunk, one for each level of
/// the tree, stay in the first-level cache: 6 levels of 512 `f64` are 24 KiB.
const CHUNK: usize = 512;

/// Combines all `inputs` into `dst` in one pass over memory, in the order of a tree.
///
/// The tree comes as a stack program: after input `i` has been pushed, the two topmost partial
/// sums are combined `merges[i]` times, and in the end one is left. `finish` is the number of
/// ranks when this completes the sum of all of them.
///
/// # Panics
///
/// When lengths differ, or when `merges` does not leave exactly one partial sum.
pub fn reduce_tree<T: Element>(
    op: ReduceOp,
    dst: &mut [T],
    inputs: &[TreeInput<'_, T>],
    merges: &[usize],
    finish: Option<usize>,
) {
    assert_eq!(inputs.len(), merges.len(), "one number of merges for each input");
    let total: usize = merges.iter().sum();
    assert_eq!(total + 1, inputs.len(), "the merges must leave one sum");
    let mut partial = vec![[T::zeroed(); CHUNK]; stack_depth(merges)];

    for start in (0..dst.len()).step_by(CHUNK) {
        let len = CHUNK.min(dst.len() - start);
        let range = start..start + len;
        let mut top = 0;
        let mut left = total;
        for (input, &merges) in inputs.iter().zip(merges) {
            let src = match *input {
                TreeInput::Destination => &dst[range.clone()],
                TreeInput::Slice(slice) => &slice[range.clone()],
            };
            // The pushed input is combined from where it lies; only one that has to wait for
            // its right neighbour is copied.
            if merges == 0 {
                partial[top][..len].copy_from_slice(src);
                top += 1;
                continue;
            }
            left -= 1;
            let completes = |left: usize| if left == 0 { finish } else { None };
            combine(op, &mut partial[top - 1][..len], src, completes(left));
            for _ in 1..merges {
                top -= 1;
                left -= 1;
                let (lower, upper) = partial.split_at_mut(top);
                combine(op, &mut lower[top - 1][..len], &upper[0][..len], completes(left));
            }
        }
        dst[range].copy_from_slice(&partial[0][..len]);
    }
}

/// The largest number of partial sums that wait at a time.
fn stack_depth(merges: &[usize]) -> usize {
    let mut depth: usize = 0;
    let mut deepest = 1;
    for &merges in merges {
        assert!(merges <= depth, "more merges than partial sums");
        depth = depth + 1 - merges;
        deepest = deepest.max(depth);
    }
    deepest
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The canonical tree, written as its definition.
    fn tree(op: ReduceOp, values: &[f32]) -> f32 {
        if let [value] = values {
            return *value;
        }
        let half = 1 << (values.len() - 1).ilog2();
        let mut sum = [tree(op, &values[..half])];
        combine(op, &mut sum, &[tree(op, &values[half..])], None);
        sum[0]
    }

    /// The stack program of the canonical tree over `n` leaves.
    fn merges(n: usize) -> Vec<usize> {
        let mut merges: Vec<usize> =
            (1..=n).map(|count: usize| count.trailing_zeros() as usize).collect();
        merges[n - 1] += n.count_ones() as usize - 1;
        merges
    }

    proptest! {
        #[test]
        fn reduce_tree_adds_in_the_order_of_the_tree(
            ranks in 1_usize..20, len in 0_usize..1200, own in 0_usize..20, seed: u32,
        ) {
            let own = own % ranks;
            // Values of very different size, so that another order gives other bits.
            let value = |rank: usize, i: usize| {
                let x = (seed ^ (rank * 7919 + i) as u32).wrapping_mul(2_654_435_761);
                f32::from_bits((x & 0x007f_ffff) | ((100 + (x >> 27)) << 23))
            };
            let inputs: Vec<Vec<f32>> =
                (0..ranks).map(|rank| (0..len).map(|i| value(rank, i)).collect()).collect();
            for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max] {
                let mut dst = inputs[own].clone();
                let operands: Vec<_> = (0..ranks)
                    .map(|rank| match rank {
                        _ if rank == own => TreeInput::Destination,
                        _ => TreeInput::Slice(&inputs[rank][..]),
                    })
                    .collect();
                reduce_tree(op, &mut dst, &operands, &merges(ranks), Some(ranks));
                for i in 0..len {
                    let column: Vec<f32> = inputs.iter().map(|input| input[i]).collect();
                    let mut expected = tree(op, &column);
                    if op == ReduceOp::Avg && ranks > 1 {
                        expected /= ranks as f32;
                    }
                    prop_assert_eq!(dst[i].to_bits(), expected.to_bits());
                }
            }
        }

        #[test]
        fn minimum_and_maximum_do_not_depend_on_the_order(a: u64, b: u64) {
            for (x, y) in [(a, b), (a, a ^ (1 << 63)), (0, 1 << 63), (a, f64::NAN.to_bits())] {
                let (x, y) = (f64::from_bits(x), f64::from_bits(y));
                for op in [ReduceOp::Min, ReduceOp::Max] {
                    let (mut xy, mut yx) = ([x], [y]);
                    combine(op, &mut xy, &[y], Some(2));
                    combine(op, &mut yx, &[x], Some(2));
                    prop_assert_eq!(xy[0].to_bits(), yx[0].to_bits());
                    if x.is_nan() || y.is_nan() {
                        prop_assert!(xy[0].is_nan());
                    }
                }
            }
        }
    }

    #[test]
    fn zeros_are_ordered_by_sign() {
        let mut zero = [0.0_f32];
        combine(ReduceOp::Min, &mut zero, &[-0.0], None);
        assert!(zero[0].is_sign_negative());
        combine(ReduceOp::Max, &mut zero, &[0.0], None);
        assert!(zero[0].is_sign_positive());
    }

    #[test]
    fn integers_wrap_and_averages_round_towards_zero() {
        let mut bytes = [200_u8, 3];
        combine(ReduceOp::Sum, &mut bytes, &[100, 4], None);
        assert_eq!(bytes, [44, 7]);

        let mut longs = [-5_i64, i64::MAX];
        combine(ReduceOp::Avg, &mut longs, &[0, 1], Some(2));
        assert_eq!(longs, [-2, i64::MIN / 2]);
    }
}
