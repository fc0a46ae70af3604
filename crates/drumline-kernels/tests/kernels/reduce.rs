//! Every element type, operator and arrangement of operands, compared with the definitions.

use bytemuck::Zeroable;
use drumline_kernels::{
    Addend, Bool, DType, F8E4M3, F8E5M2, ReduceOp, Source, Target, f16, reduce_tree_with,
};
use proptest::prelude::*;

use crate::{
    reference::{Reference, canonical, operators, places, random, tree},
    table::{combine, narrow, reduce_sums, reduce_to_sums, reduce_tree, widen},
};

/// A case, for any element type.
#[derive(Clone, Debug)]
struct Case {
    ranks: usize,
    len: usize,
    /// Elements of each buffer that lie before the operand.
    skip: usize,
    /// Which inputs are destinations too, one bit each.
    in_place: u64,
    /// Destinations that are no inputs.
    extra: usize,
    finish: bool,
    wild: bool,
    seed: u64,
}

fn cases() -> impl Strategy<Value = Case> {
    let ranks = prop_oneof![1_usize..10, 1_usize..70];
    // Blocks are 16 or 32 elements.
    let len = prop_oneof![0_usize..4, 15_usize..18, 31_usize..35, 0_usize..150];
    (ranks, len, 0_usize..3, any::<u64>(), 0_usize..3, any::<[bool; 2]>(), any::<u64>()).prop_map(
        |(ranks, len, skip, in_place, extra, [finish, wild], seed)| Case {
            ranks,
            len,
            skip,
            in_place,
            extra,
            finish,
            wild,
            seed,
        },
    )
}

fn config() -> ProptestConfig {
    let cases = if cfg!(miri) { 3 } else { 200 };
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

fn check<T: Reference>(case: &Case) -> Result<(), TestCaseError> {
    let Case { ranks, len, skip, in_place, extra, finish, wild, seed } = *case;
    let value = |rank: usize, i: usize| {
        T::random(random(seed ^ random((rank * 1_000_003 + i) as u64)), wild)
    };
    let buffers: Vec<Vec<T>> =
        (0..ranks + extra).map(|rank| (0..skip + len).map(|i| value(rank, i)).collect()).collect();
    let finish = finish.then_some(ranks);

    for op in operators::<T>() {
        let mut after = buffers.clone();
        let operands: Vec<Target<'_, T>> =
            after.iter_mut().map(|b| Target::from(&mut b[..]).slice(skip..skip + len)).collect();
        let is_output = |i: usize| i >= ranks || in_place >> (i % 64) & 1 == 1;
        let dsts: Vec<_> =
            (0..ranks + extra).filter(|i| is_output(*i)).map(|i| operands[i]).collect();
        let srcs: Vec<Source<'_, T>> = operands[..ranks].iter().map(|t| t.as_source()).collect();
        reduce_tree(op, &dsts, &srcs, &canonical(ranks), finish);

        for i in 0..skip + len {
            let column: Vec<T> = buffers[..ranks].iter().map(|b| b[i]).collect();
            let expected = T::reduce(op, &column, finish);
            for (rank, buffer) in after.iter().enumerate() {
                let written = i >= skip && is_output(rank);
                let expected = if written { expected } else { buffers[rank][i] };
                prop_assert!(
                    buffer[i].same(expected),
                    "{op} of {}: element {i} of buffer {rank} is {:?}, not {expected:?}; \
                     inputs {column:?}",
                    T::DTYPE,
                    buffer[i],
                );
            }
        }
    }
    Ok(())
}

/// Some inputs are elements and some are sums, as `in_place` says. (A sum of one element is as exact as the element.)
fn check_widths<T: Reference>(case: &Case) -> Result<(), TestCaseError> {
    let Case { ranks, len, skip: _, in_place, extra: _, finish, wild, seed } = *case;
    let value = |rank: usize, i: usize| {
        T::random(random(seed ^ random((rank * 1_000_003 + i) as u64)), wild)
    };
    let inputs: Vec<Vec<T>> =
        (0..ranks).map(|rank| (0..len).map(|i| value(rank, i)).collect()).collect();
    let wide = |input: &Vec<T>| {
        let mut wide = vec![T::Accumulator::zeroed(); len];
        widen(&mut wide[..], Source::from(&input[..]));
        wide
    };
    let sums: Vec<Vec<T::Accumulator>> = inputs.iter().map(wide).collect();
    let addends: Vec<Addend<'_, T>> = (0..ranks)
        .map(|rank| match in_place >> (rank % 64) & 1 == 1 {
            true => Addend::Element(Source::from(&inputs[rank][..])),
            false => Addend::Sum(Source::from(&sums[rank][..])),
        })
        .collect();
    for op in operators::<T>() {
        let [mut rounded, mut narrowed] = [vec![T::zeroed(); len], vec![T::zeroed(); len]];
        let [mut sum, mut copy] = [0; 2].map(|_| vec![T::Accumulator::zeroed(); len]);
        let finish = finish.then_some(ranks);
        reduce_sums(op, &[Target::from(&mut rounded[..])], &addends, &canonical(ranks), finish);
        let into = [&mut sum, &mut copy].map(|it| Target::from(&mut it[..]));
        reduce_to_sums::<T>(op, &into, &addends, &canonical(ranks));
        prop_assert_eq!(bytemuck::cast_slice::<_, u8>(&sum), bytemuck::cast_slice::<_, u8>(&copy));
        narrow(Target::from(&mut narrowed[..]), &sum[..]);
        for i in 0..len {
            let column: Vec<T> = inputs.iter().map(|input| input[i]).collect();
            for (found, finish) in [(rounded[i], finish), (narrowed[i], None)] {
                let expected = T::reduce(op, &column, finish);
                prop_assert!(found.same(expected), "{op}: {found:?}, not {expected:?}: {column:?}");
            }
        }
    }
    Ok(())
}

/// Whether results are rounded, so that the order of the inputs matters.
fn rounds(op: ReduceOp, dtype: DType) -> bool {
    let sums = matches!(op, ReduceOp::Sum | ReduceOp::Avg | ReduceOp::Product);
    sums && (dtype.is_float() || dtype.is_complex())
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn reduce_tree_does_what_the_definitions_say(case in cases()) {
        by_type!(T => check::<T>(&case)?);
    }

    #[test]
    fn inputs_of_either_width_give_the_same_bits(case in cases()) {
        by_type!(T => check_widths::<T>(&case)?);
    }

    #[test]
    fn combine_is_the_tree_over_two(a: u64, b: u64, wild: bool, finish: bool) {
        fn check<T: Reference>(case: (u64, u64, bool, bool)) -> Result<(), TestCaseError> {
            let (a, b, wild, finish) = case;
            let (a, b) = (T::random(a, wild), T::random(b, wild));
            let finish = finish.then_some(2);
            for op in operators::<T>() {
                let mut dst = [a; 17];
                combine(op, (&mut dst[..]).into(), (&[b; 17][..]).into(), finish);
                let expected = T::reduce(op, &[a, b], finish);
                prop_assert!(dst.iter().all(|x| x.same(expected)), "{op} {a:?} {b:?} {dst:?}");
                // With the operands exchanged, and with both the same.
                let mut dst = [b];
                combine(op, (&mut dst[..]).into(), (&[a][..]).into(), finish);
                prop_assert!(dst[0].same(expected));
                let mut dst = [a; 17];
                let target = Target::from(&mut dst[..]);
                combine(op, target, target.as_source(), finish);
                let expected = T::reduce(op, &[a, a], finish);
                prop_assert!(dst.iter().all(|x| x.same(expected)));
            }
            Ok(())
        }
        let case = (a, b, wild, finish);
        by_type!(T => check::<T>(case)?);
    }

    #[test]
    fn order_free_operators_may_take_any_order(bits: [u64; 5], turn in 1_usize..5) {
        fn check<T: Reference>(bits: [u64; 5], turn: usize) -> Result<(), TestCaseError> {
            let values = bits.map(|bits| T::random(bits, true));
            let mut turned = values;
            turned.rotate_left(turn);
            turned.swap(0, 1);
            for op in operators::<T>().filter(|op| !rounds(*op, T::DTYPE)) {
                let (mut a, mut b) = ([values[0]], [values[0]]);
                let srcs = values.each_ref().map(|x| Source::from(std::slice::from_ref(x)));
                reduce_tree(op, &[(&mut a[..]).into()], &srcs, &canonical(5), Some(5));
                let srcs = turned.each_ref().map(|x| Source::from(std::slice::from_ref(x)));
                reduce_tree(op, &[(&mut b[..]).into()], &srcs, &[0, 0, 1, 0, 3], Some(5));
                prop_assert!(a[0].same(b[0]), "{op} of {values:?}: {a:?} or {b:?}");
            }
            Ok(())
        }
        by_type!(T => check::<T>(bits, turn)?);
    }

    /// The deepest program: every partial sum waits for the last input.
    #[test]
    fn programs_may_be_deeper_than_the_stack(
        values in prop::collection::vec(-1e9_f32..1e9, 1..40), len in 1_usize..40,
    ) {
        let inputs: Vec<Vec<f32>> = values.iter().map(|x| vec![*x; len]).collect();
        let srcs: Vec<_> = inputs.iter().map(|input| Source::from(&input[..])).collect();
        let mut merges = vec![0; values.len()];
        merges[values.len() - 1] = values.len() - 1;
        let mut dst = vec![0.0; len];
        reduce_tree(ReduceOp::Sum, &[(&mut dst[..]).into()], &srcs, &merges, None);

        let expected = values.iter().copied().rev().reduce(|right, left| left + right).unwrap();
        prop_assert_eq!(dst, vec![expected; len]);
    }
}

#[test]
fn a_sum_of_narrow_floats_is_rounded_once() {
    // Rounding after each step would lose every one of the small numbers.
    let inputs = [[f16::from_f32(2048.0)], [f16::ONE], [f16::ONE], [f16::ONE]];
    let mut sum = [f16::ZERO];
    let srcs = inputs.each_ref().map(|x| Source::from(&x[..]));
    reduce_tree(ReduceOp::Sum, &[(&mut sum[..]).into()], &srcs, &[0, 1, 0, 2], None);
    assert_eq!(sum[0].to_f32(), 2052.0);

    // The sum overflows the type, the average does not.
    let inputs = [[f16::MAX]; 3];
    let srcs = inputs.each_ref().map(|x| Source::from(&x[..]));
    reduce_tree(ReduceOp::Avg, &[(&mut sum[..]).into()], &srcs, &[0, 1, 1], Some(3));
    assert_eq!(sum[0], f16::MAX);
    reduce_tree(ReduceOp::Sum, &[(&mut sum[..]).into()], &srcs, &[0, 1, 1], Some(3));
    assert_eq!(sum[0], f16::INFINITY);

    let inputs = [[32.0], [1.0], [1.0], [1.0], [1.0]].map(|x| x.map(F8E4M3::from_f32));
    let mut sum = [F8E4M3::ZERO];
    let srcs = inputs.each_ref().map(|x| Source::from(&x[..]));
    reduce_tree(ReduceOp::Sum, &[(&mut sum[..]).into()], &srcs, &[0, 1, 0, 2, 1], None);
    assert_eq!(sum[0].to_f32(), 36.0);

    // The sum of 16 largest numbers is too large for the type, their average is not.
    let inputs = [[F8E5M2::MAX]; 16];
    let mut sum = [F8E5M2::ZERO];
    let srcs = inputs.each_ref().map(|x| Source::from(&x[..]));
    reduce_tree(ReduceOp::Avg, &[(&mut sum[..]).into()], &srcs, &canonical(16), Some(16));
    assert_eq!(sum[0], F8E5M2::MAX);
    reduce_tree(ReduceOp::Sum, &[(&mut sum[..]).into()], &srcs, &canonical(16), None);
    assert_eq!(sum[0], F8E5M2::INFINITY);
}

/// All combinations of types and operators.
#[test]
fn operators_fit_types_as_the_table_says() {
    for (dtype, op) in DType::ALL.into_iter().flat_map(|it| ReduceOp::ALL.map(|op| (it, op))) {
        let (float, complex) = (dtype.name().contains('f'), dtype.name().starts_with("complex"));
        let supported = match op.name() {
            "sum" | "product" => true,
            "avg" => dtype != DType::Bool,
            "min" | "max" => !complex,
            _ => !float && !complex,
        };
        assert_eq!(op.supports(dtype), supported, "{op} of {dtype}");
    }
    let sum = |values: &[f32]| tree(values, &|a, b| a + b);
    assert_ne!(
        sum(&[1e9, 1.0, -1e9]),
        sum(&[1e9, -1e9, 1.0]),
        "any order would give the same bits"
    );
}

#[test]
fn zeros_are_ordered_by_sign() {
    let mut zero = [0.0_f32];
    combine(ReduceOp::Min, (&mut zero[..]).into(), (&[-0.0][..]).into(), None);
    assert!(zero[0].is_sign_negative());
    combine(ReduceOp::Max, (&mut zero[..]).into(), (&[0.0][..]).into(), None);
    assert!(zero[0].is_sign_positive());
}

#[test]
fn integers_wrap_and_averages_round_towards_zero() {
    let mut bytes = [200_u8, 3];
    combine(ReduceOp::Sum, (&mut bytes[..]).into(), (&[100, 4][..]).into(), None);
    assert_eq!(bytes, [44, 7]);

    let mut longs = [-5_i64, i64::MAX];
    combine(ReduceOp::Avg, (&mut longs[..]).into(), (&[0, 1][..]).into(), Some(2));
    assert_eq!(longs, [-2, i64::MIN / 2]);

    let mut byte = [100_u8];
    combine(ReduceOp::Avg, (&mut byte[..]).into(), (&[100][..]).into(), Some(300));
    assert_eq!(byte, [0], "more ranks than the type can count");
}

/// For every length and place, with functions whose results depend on the order of their arguments.
#[test]
fn functions_are_applied_in_the_order_of_the_tree() {
    fn check<T: Reference>(function: impl Fn(T, T) -> T) {
        let value = |rank: usize, i: usize| T::random(random((rank * 1000 + i) as u64), false);
        for (len, skip) in places() {
            let ranks = 1 + (len + skip) % 7;
            let buffer = |rank| -> Vec<T> { (0..skip + len + 1).map(|i| value(rank, i)).collect() };
            let buffers: Vec<_> = (0..ranks).map(buffer).collect();
            let mut after = buffers.clone();
            let all: Vec<_> = after
                .iter_mut()
                .map(|buffer| Target::from(&mut buffer[skip..skip + len]))
                .collect();
            let srcs: Vec<_> = all.iter().map(|target| target.as_source()).collect();
            // The destinations are the first and the last input.
            let dsts = [all[0], all[ranks - 1]];
            reduce_tree_with(&function, &dsts, &srcs, &canonical(ranks));
            for i in 0..skip + len + 1 {
                let column: Vec<T> = buffers.iter().map(|buffer| buffer[i]).collect();
                let result = tree(&column, &function);
                for rank in 0..ranks {
                    let written =
                        (rank == 0 || rank == ranks - 1) && (skip..skip + len).contains(&i);
                    let expected = if written { result } else { column[rank] };
                    assert!(after[rank][i].same(expected), "{} at {i} of {rank}", T::DTYPE);
                }
            }
        }
    }
    // None of these commutes, and most are not associative.
    by_type!(T => check::<T>(|left, _| left));
    check::<u64>(|left, right| left.wrapping_mul(31).wrapping_sub(right));
    check::<F8E5M2>(|left, right| F8E5M2::from_f32(left.to_f32() - right.to_f32()));
    check::<Bool>(|left, right| (left.get() && !right.get()).into());
}

mod misuse {
    use super::*;

    fn reduce(srcs: &[&[f32]], merges: &[usize], finish: Option<usize>) {
        let srcs: Vec<_> = srcs.iter().map(|src| Source::from(*src)).collect();
        let mut dst = [0.0; 2];
        reduce_tree(ReduceOp::Sum, &[(&mut dst[..]).into()], &srcs, merges, finish);
    }

    #[test]
    #[should_panic(expected = "complex64 has no min")]
    fn an_operator_that_the_type_does_not_have() {
        let mut dst = [drumline_kernels::Complex::new(1.0_f32, 0.0)];
        let dst = Target::from(&mut dst[..]);
        combine(ReduceOp::Min, dst, dst.as_source(), None);
    }

    #[test]
    #[should_panic(expected = "operands of a reduction differ in length")]
    fn a_short_input_of_a_function() {
        let srcs = [Source::from(&[1_u8][..]), Source::from(&[1, 2][..])];
        reduce_tree_with(&|a, _| a, &[], &srcs, &[0, 1]);
    }

    #[test]
    #[should_panic(expected = "operands of a reduction differ in length")]
    fn a_short_input() {
        reduce(&[&[1.0, 2.0], &[1.0]], &[0, 1], None);
    }

    #[test]
    #[should_panic(expected = "operands of a reduction differ in length")]
    fn a_short_destination() {
        reduce(&[&[1.0; 3], &[1.0; 3]], &[0, 1], None);
    }

    #[test]
    #[should_panic(expected = "the merges must leave one result")]
    fn too_few_merges() {
        reduce(&[&[1.0; 2], &[1.0; 2]], &[0, 0], None);
    }

    #[test]
    #[should_panic(expected = "more merges than partial results")]
    fn a_merge_too_early() {
        reduce(&[&[1.0; 2], &[1.0; 2]], &[1, 0], None);
    }

    #[test]
    #[should_panic(expected = "the merges must leave one result")]
    fn no_input_at_all() {
        reduce(&[], &[], None);
    }

    #[test]
    #[should_panic(expected = "a number of ranks is between 1 and 2^32 - 1")]
    fn an_average_over_no_rank() {
        reduce(&[&[1.0; 2], &[1.0; 2]], &[0, 1], Some(0));
    }
}
