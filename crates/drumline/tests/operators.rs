//! Every element type with every operator that it has, and what happens with the others.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{everywhere, failure, tree, world_with};
use drumline::{
    Bool, Cause, Complex, DType, Element, Error, F8E4M3, F8E5M2, Operator, ProcessGroup, ReduceOp,
    bf16, f16,
};

const LEN: usize = 37;

/// An element type whose results are known without the kernels.
trait Sample: Element {
    /// Small whole numbers, as far as the type has them.
    fn sample(number: usize) -> Self;

    fn combine(op: ReduceOp, a: Self, b: Self) -> Self;

    fn divide(self, by: usize) -> Self;
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Sample for $type {
            fn sample(number: usize) -> $type {
                number as $type
            }

            fn combine(op: ReduceOp, a: $type, b: $type) -> $type {
                match op {
                    ReduceOp::Sum | ReduceOp::Avg => a.wrapping_add(b),
                    ReduceOp::Product => a.wrapping_mul(b),
                    ReduceOp::Min => a.min(b),
                    ReduceOp::Max => a.max(b),
                    ReduceOp::Band => a & b,
                    ReduceOp::Bor => a | b,
                    ReduceOp::Bxor => a ^ b,
                    other => panic!("{other} has no definition here"),
                }
            }

            fn divide(self, by: usize) -> $type {
                self / by as $type
            }
        }
    )*};
}

integers!(u8, u16, u32, u64, i8, i16, i32, i64);

/// Numbers of which all partial results are exact, so that an average is rounded once in any way.
macro_rules! floats {
    ($($type:ty, $from:expr, $to:expr);*) => {$(
        impl Sample for $type {
            fn sample(number: usize) -> $type {
                $from((number % 3) as f64 - 1.0)
            }

            fn combine(op: ReduceOp, a: $type, b: $type) -> $type {
                let (a, b): (f64, f64) = ($to(a), $to(b));
                $from(match op {
                    ReduceOp::Sum | ReduceOp::Avg => a + b,
                    ReduceOp::Product => a * b,
                    ReduceOp::Min if a.total_cmp(&b).is_lt() => a,
                    ReduceOp::Max if a.total_cmp(&b).is_gt() => a,
                    ReduceOp::Min | ReduceOp::Max => b,
                    other => panic!("{other} has no definition here"),
                })
            }

            fn divide(self, by: usize) -> $type {
                $from($to(self) / by as f64)
            }
        }
    )*};
}

floats!(
    F8E4M3, |x: f64| F8E4M3::from_f32(x as f32), |x: F8E4M3| f64::from(x.to_f32());
    F8E5M2, |x: f64| F8E5M2::from_f32(x as f32), |x: F8E5M2| f64::from(x.to_f32());
    f16, |x: f64| f16::from_f32(x as f32), f16::to_f64;
    bf16, |x: f64| bf16::from_f32(x as f32), bf16::to_f64;
    f32, |x: f64| x as f32, f64::from;
    f64, |x: f64| x, |x: f64| x
);

macro_rules! complex {
    ($($part:ty),*) => {$(
        impl Sample for Complex<$part> {
            fn sample(number: usize) -> Self {
                Complex::new(<$part>::sample(number), <$part>::sample(number / 4))
            }

            fn combine(op: ReduceOp, a: Self, b: Self) -> Self {
                match op {
                    ReduceOp::Sum | ReduceOp::Avg => a + b,
                    ReduceOp::Product => a * b,
                    other => panic!("{other} has no definition here"),
                }
            }

            fn divide(self, by: usize) -> Self {
                Complex::new(self.re.divide(by), self.im.divide(by))
            }
        }
    )*};
}

complex!(f32, f64);

impl Sample for Bool {
    fn sample(number: usize) -> Bool {
        (number % 3 == 1).into()
    }

    fn combine(op: ReduceOp, a: Bool, b: Bool) -> Bool {
        let (a, b) = (a.get(), b.get());
        Bool::from(match op {
            ReduceOp::Sum | ReduceOp::Max | ReduceOp::Bor => a || b,
            ReduceOp::Product | ReduceOp::Min | ReduceOp::Band => a && b,
            ReduceOp::Bxor => a != b,
            other => panic!("{other} has no definition here"),
        })
    }

    fn divide(self, _by: usize) -> Bool {
        panic!("there is no average of truths")
    }
}

/// All operators on all ranks of one group, one after another.
fn check<T: Sample>(group: &ProcessGroup) {
    let ranks = group.world_size();
    let value = |rank: usize, index: usize| T::sample(rank * rank * 5 + index * 3 + 1);
    for op in ReduceOp::ALL {
        let mut data: Vec<T> = (0..LEN).map(|index| value(group.rank(), index)).collect();
        let before = data.clone();
        let result = group.all_reduce(&mut data, op);
        if !op.supports(T::DTYPE) {
            let Err(Error::InvalidArgument { operation, problem }) = result else {
                panic!("{op} of {}: {result:?}", T::DTYPE)
            };
            assert_eq!((operation, &data), ("all_reduce", &before));
            let expected = format!("{} has no operator {op}, but sum, ", T::DTYPE);
            assert!(problem.starts_with(&expected), "{problem}");
            continue;
        }
        result.unwrap();
        for (index, result) in data.into_iter().enumerate() {
            let column: Vec<T> = (0..ranks).map(|rank| value(rank, index)).collect();
            let all = tree(&column, &|a, b| T::combine(op, a, b));
            let expected = if op == ReduceOp::Avg { all.divide(ranks) } else { all };
            // What stands there, not what it is equal to.
            let bytes = |value: &T| bytemuck::bytes_of(value).to_vec();
            assert_eq!(bytes(&result), bytes(&expected), "{op} of {}, {index}", T::DTYPE);
        }
    }
}

#[test]
fn every_type_has_its_operators() {
    everywhere(|config| {
        for world_size in [1, 2, 3, 5] {
            world_with(world_size, config, |group| {
                check::<u8>(&group);
                check::<u16>(&group);
                check::<u32>(&group);
                check::<u64>(&group);
                check::<i8>(&group);
                check::<i16>(&group);
                check::<i32>(&group);
                check::<i64>(&group);
                check::<F8E4M3>(&group);
                check::<F8E5M2>(&group);
                check::<f16>(&group);
                check::<bf16>(&group);
                check::<f32>(&group);
                check::<f64>(&group);
                check::<Complex<f32>>(&group);
                check::<Complex<f64>>(&group);
                check::<Bool>(&group);
            });
        }
    });
}

/// Elements of 16 bytes and of 1, between others, share the memory that a group keeps.
#[test]
fn blocks_of_every_type_are_gathered_and_scattered() {
    fn check<T: Sample>(group: &ProcessGroup) {
        let (rank, ranks) = (group.rank(), group.world_size());
        let own: Vec<T> = (0..7).map(|index| T::sample(rank + index)).collect();
        let mut all = vec![T::sample(0); 7 * ranks];
        group.all_gather(&own, &mut all).unwrap();
        for (index, value) in all.iter().enumerate() {
            assert_eq!(*value, T::sample(index / 7 + index % 7));
        }
        let mut part = own.clone();
        group.reduce_scatter(&all, &mut part, ReduceOp::Product).unwrap();
        for (index, value) in part.iter().enumerate() {
            let one = T::sample(rank + index);
            let product = (1..ranks).fold(one, |a, _| T::combine(ReduceOp::Product, a, one));
            assert_eq!(*value, product, "{}", T::DTYPE);
        }
    }
    everywhere(|config| {
        for world_size in [2, 3, 5] {
            world_with(world_size, config, |group| {
                check::<Bool>(&group);
                check::<Complex<f64>>(&group);
                check::<u8>(&group);
                check::<Complex<f64>>(&group);
                check::<F8E5M2>(&group);
                check::<Complex<f32>>(&group);
            });
        }
    });
}

/// A peer that writes 2 or 255 in the place of a `bool` means true.
#[test]
fn a_bool_may_be_any_byte() {
    everywhere(|config| {
        let told = world_with(3, config, |group| {
            let own: [u8; 3] = [2 * group.rank() as u8, 0, 255];
            let mut data: [Bool; 3] = bytemuck::cast(own);
            group.all_reduce(&mut data, ReduceOp::Band).unwrap();
            bytemuck::cast::<_, [u8; 3]>(data)
        });
        assert_eq!(told, [[0, 0, 1]; 3]);
    });
}

#[test]
fn an_input_is_multiplied_but_stays_as_it_is() {
    everywhere(|config| {
        world_with(3, config, |group| {
            let factor = group.rank() as i32 + 1;
            let input = [10, 20, 30];
            let mut sum = [0];
            group.reduce_scatter(&input, &mut sum, Operator::premul_sum(factor)).unwrap();
            assert_eq!(sum, [input[group.rank()] * (1 + 2 + 3)]);
            assert_eq!(input, [10, 20, 30]);

            let work = group.reduce_scatter_async(
                vec![f16::ONE; 3],
                vec![f16::ZERO],
                Operator::premul_sum(f16::from_f32(0.5)),
            );
            assert_eq!(work.unwrap().wait().unwrap(), [f16::from_f32(1.5)]);
            assert!(matches!(
                group.all_reduce(&mut [Bool::TRUE], Operator::premul_sum(Bool::TRUE)),
                Err(Error::InvalidArgument { .. })
            ));
        });
    });
}

/// Nothing is sent, and the group goes on.
#[test]
fn an_operator_that_a_type_does_not_have_harms_nobody() {
    everywhere(|config| {
        world_with(2, config, |group| {
            let data = vec![Complex::new(1.0_f32, 2.0); 3];
            let refused = group.all_reduce_async(data, ReduceOp::Max);
            let sum = group.all_reduce_async(vec![1_u16], ReduceOp::Sum);
            let error = refused.wait().unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
            assert_eq!(
                error.to_string(),
                "all_reduce: complex64 has no operator max, but sum, avg, product"
            );
            assert_eq!(sum.wait().unwrap(), [2]);
            group.destroy().unwrap();
        });
    });
}

#[test]
fn ranks_that_name_different_functions_are_told() {
    everywhere(|config| {
        let names = ["greatest common divisor", "least common multiple"];
        let told = world_with(3, config, |group| {
            let name = names[usize::from(group.rank() == 2)];
            let operator = Operator::custom(name, |left: u64, _| left);
            let result = group.all_reduce(&mut [6, 4], operator).and_then(|()| group.barrier());
            failure(result.unwrap_err()).to_string()
        });
        for text in told {
            let calls = text.matches("all_reduce(custom ").count();
            assert!(calls >= 2 && names.iter().any(|name| text.contains(name)), "{text}");
        }
        // A function is not a sum, either.
        let told = world_with(2, config, |group| {
            let operator = match group.rank() {
                0 => Operator::from(ReduceOp::Sum),
                _ => Operator::premul_sum(1_u8),
            };
            failure(group.all_reduce(&mut [1], operator).unwrap_err()).to_string()
        });
        for text in told {
            let calls = ["all_reduce(sum) of 1 u8", "all_reduce(premul_sum) of 1 u8"];
            assert!(calls.iter().all(|call| text.contains(call)), "{text}");
        }
    });
}

/// On one rank, so that the others must be told.
#[test]
fn a_function_that_panics_fails_the_call_on_every_rank() {
    everywhere(|config| {
        for (asynchronous, registered) in [(false, false), (false, true), (true, true)] {
            let told = world_with(3, config, |group| {
                let own = group.rank();
                let operator = Operator::custom("fragile", move |left: u32, right| {
                    assert!(own != 1, "broken on purpose");
                    left + right
                });
                let mut data = group.alloc_registered(20_000).unwrap();
                let result = match (asynchronous, registered) {
                    (true, _) => group.all_reduce_async(data, operator).wait().map(drop),
                    (false, true) => group.all_reduce(&mut data, operator),
                    (false, false) => group.all_reduce(&mut vec![1; 20_000], operator),
                };
                let error = result.and_then(|()| group.barrier()).unwrap_err();
                assert!(matches!(group.barrier(), Err(Error::Poisoned { .. })));
                failure(error)
            });
            for (rank, failure) in told.iter().enumerate() {
                let text = failure.to_string();
                assert!(text.contains("\"fragile\": broken on purpose"), "{text}");
                assert_eq!(matches!(failure.cause, Cause::Panicked { .. }), rank == 1, "{text}");
                assert_eq!(failure.culprit(), Some(1), "{text}");
            }
        }
    });
}

/// Types that collectives carry are known by the names and sizes that their docs give.
#[test]
fn types_are_as_wide_as_they_say() {
    fn check<T: Element>(name: &str) {
        assert_eq!((T::DTYPE.name(), T::DTYPE.size()), (name, size_of::<T>()));
        assert_eq!(T::DTYPE.accumulator(), <T::Accumulator as Element>::DTYPE);
    }
    check::<Bool>("bool");
    check::<Complex<f32>>("complex64");
    check::<Complex<f64>>("complex128");
    check::<F8E4M3>("f8e4m3");
    check::<F8E5M2>("f8e5m2");
    check::<f16>("f16");
    check::<bf16>("bf16");
    assert_eq!(DType::ALL.len(), 17);
}
