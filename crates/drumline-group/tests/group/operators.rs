//! Every element type with every operator that it has, and what happens with the others.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use crate::common::{Barrier, everywhere, failure, world_with};
use drumline_group::{
    Cause, Config, DType, Element, Error, ErrorKind, Operator, ProcessGroup, ReduceOp,
    RegisteredBuffer, bf16, f16,
    types::{Bool, Complex, F8E4M3, F8E5M2},
};

/// Results are compared by the conformance suite. What has no meaning is refused everywhere alike:
/// nothing is sent, and the group goes on.
#[test]
fn operators_that_a_type_does_not_have_are_refused() {
    fn check<T: Element>(group: &ProcessGroup) -> usize {
        let lacking = ReduceOp::ALL.into_iter().filter(|op| !op.supports(T::DTYPE));
        let refused = lacking.map(|op| {
            let mut data = vec![T::zeroed(); 3];
            let Err(error) = group.all_reduce(&mut data, op) else {
                panic!("{op} of {}", T::DTYPE)
            };
            let expected = format!("{} has no operator {op}, but sum, ", T::DTYPE);
            assert_eq!(error.kind(), ErrorKind::Argument, "{error}");
            assert!(error.message().starts_with(&format!("all_reduce: {expected}")), "{error}");
        });
        refused.count()
    }
    everywhere(|config| {
        world_with(2, config, |group| {
            let integers = [
                check::<u8>(&group),
                check::<u16>(&group),
                check::<u32>(&group),
                check::<u64>(&group),
                check::<i8>(&group),
                check::<i16>(&group),
                check::<i32>(&group),
                check::<i64>(&group),
            ];
            assert_eq!(integers, [0; 8]);
            let floats = [
                check::<F8E4M3>(&group),
                check::<F8E5M2>(&group),
                check::<f16>(&group),
                check::<bf16>(&group),
                check::<f32>(&group),
                check::<f64>(&group),
            ];
            assert_eq!(floats, [3; 6], "band, bor, bxor");
            let complex = [check::<Complex<f32>>(&group), check::<Complex<f64>>(&group)];
            assert_eq!(complex, [5; 2], "these, min, max");
            assert_eq!(check::<Bool>(&group), 1, "avg");
            group.barrier().unwrap();
        });
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
                Err(error) if error.kind() == ErrorKind::Argument
            ));
        });
    });
}

/// In the background, too. Only one rank makes the call, and what it calls next is still what the other calls.
#[test]
fn an_operator_that_a_type_does_not_have_harms_nobody() {
    everywhere(|config| {
        world_with(2, config, |group| {
            if group.rank() == 1 {
                let data = vec![Complex::new(1.0_f32, 2.0); 3];
                let error = group.all_reduce_async(data, ReduceOp::Max).unwrap_err();
                assert_eq!(error.error.kind(), ErrorKind::Argument, "{error}");
                assert_eq!(
                    error.to_string(),
                    "all_reduce: complex64 has no operator max, but sum, avg, product (drumline explain argument)"
                );
            }
            let sum = group.all_reduce_async(vec![1_u16], ReduceOp::Sum).unwrap();
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
                    (true, _) => group
                        .all_reduce_async(data, operator)
                        .unwrap()
                        .wait()
                        .map(drop)
                        .map_err(Error::from),
                    (false, true) => group.all_reduce(&mut data, operator),
                    (false, false) => group.all_reduce(&mut vec![1; 20_000], operator),
                };
                let error = result.and_then(|()| group.barrier()).unwrap_err();
                assert!(
                    matches!(group.barrier(), Err(error) if error.kind() == ErrorKind::Poisoned)
                );
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

/// Rank 1 is in the middle of its sum when rank 0 runs out of patience and has its buffer back.
#[test]
fn what_a_rank_writes_after_it_has_given_up_is_in_nobodys_sum() {
    const LEN: usize = 30_000;
    type Buffer = RegisteredBuffer<u32>;
    fn results(
        call: impl Fn(
            &ProcessGroup,
            &mut Buffer,
            Operator<u32>,
        ) -> (drumline_group::Result<()>, Vec<u32>)
        + Sync,
    ) -> Vec<Option<Vec<u32>>> {
        let given_up = Arc::new((Barrier::new(2), AtomicBool::new(false)));
        world_with(2, &Config::default(), |group| {
            let (rank, waits) = (group.rank(), given_up.clone());
            let operator = Operator::custom("slow", move |left: u32, right| {
                if rank == 1 && !waits.1.swap(true, Ordering::SeqCst) {
                    waits.0.wait();
                }
                left + right
            });
            let mut buffer = group.alloc_registered(2 * LEN).unwrap();
            buffer.fill(1 + rank as u32);
            let limit = Duration::from_millis(if rank == 0 { 200 } else { 600_000 });
            let (end, sums) = call(&group.within(limit), &mut buffer, operator);
            assert_eq!(failure(end.unwrap_err()).culprit(), Some(1));
            if rank == 1 {
                return Some(sums);
            }
            buffer.fill(1_000);
            given_up.0.wait();
            None
        })
    }
    let sums = results(|group, input, operator| {
        let mut sums = vec![0; LEN];
        (group.reduce_scatter(input, &mut sums, operator), sums)
    });
    assert_eq!(sums, [None, Some(vec![3; LEN])]);
    let sums = results(|group, data, operator| (group.all_reduce(data, operator), data.to_vec()));
    assert_eq!(sums, [None, Some(vec![3; 2 * LEN])]);
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
